"""Loops on PyTorch: `checkpointed_loop`, `checkpointed_scan` and `checkpointed_while`.

The forward pass runs first, outside of any graph. Only then is it known what the steps close over,
and final state, initial state, inputs and captures are connected by one autograd node. So every
parameter gets one gradient per backward pass, whatever the number of steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from .... import trees
from ....loops import (
    KnownLength,
    Length,
    LoopOptions,
    LoopPass,
    MemorySize,
    Progress,
    UnknownLength,
    state_and_output,
)
from ....stores import MemoryStore, Store
from .autograd_node import connect, read_only_checkpoint
from .captures import replace_for_outer_loops
from .reach import Reach
from .scans import Outputs, PerStep
from .states import HeldState, LiveState, is_floating, is_object, is_tracked
from .steps import Steps

__all__ = ["run_loop", "run_while"]

Checkpoints = Mapping[int, Any]


def run_loop(
    function: Any,
    state: Any,
    options: LoopOptions,
    *,
    xs: Any = None,
    progress: Progress | None = None,
) -> tuple[Any, Any, Checkpoints]:
    """Run a loop, or a scan if `xs` is given; return final state, outputs and checkpoints."""
    scan = xs is not None

    def call(state: Any, x: Any) -> tuple[Any, Any]:
        return state_and_output(function(state, x)) if scan else (function(state), None)

    leaves, structure = trees.flatten(state)
    leaves = replace_for_outer_loops(leaves)
    if not options.is_planned:  # of a chain of layers, the first may take integers
        _check_state(leaves)
    inputs, inputs_structure = trees.flatten(xs) if scan else ([], None)
    inputs = replace_for_outer_loops(inputs)
    outputs = Outputs(options.steps, wanted=scan)
    reach = Reach([function, *filter(is_object, [*leaves, *inputs])])
    steps = Steps(call, structure, reach, PerStep(inputs, inputs_structure), outputs)
    name = "checkpointed_scan" if scan else "checkpointed_loop"
    length = KnownLength(options, progress)
    final, stacks, checkpoints = _run(name, steps, leaves, inputs, length, progress)
    if scan and not options.steps:
        stacks = steps.outputs_of_no_step(leaves)
    ys = trees.unflatten(outputs.structure, stacks) if outputs.structure is not None else ()
    return trees.unflatten(structure, final), ys, checkpoints


def run_while(
    condition: Any,
    function: Any,
    state: Any,
    num_checkpoints: int | None,
    memory_budget: MemorySize | None,
    *,
    store: Store | None = None,
    progress: Progress | None = None,
) -> tuple[Any, Checkpoints]:
    """Run a loop whose length shows at its end."""
    leaves, structure = trees.flatten(state)
    leaves = replace_for_outer_loops(leaves)
    _check_state(leaves)

    def goes_on(live: LiveState) -> bool:
        with torch.no_grad():
            return bool(condition(trees.unflatten(structure, live.leaves)))

    def call(state: Any, x: Any) -> tuple[Any, Any]:
        new = function(state)
        if replay:  # a condition that draws random numbers has to draw them again
            with torch.no_grad():
                condition(trees.map_leaves(_detached, new))
        return new, None

    # (Shared by `call` and the length: a reference to the pass would be a cycle.)
    replay: list[Any] = []
    steps = Steps(
        call,
        structure,
        Reach([function, condition, *filter(is_object, leaves)]),
        PerStep([], None),
        Outputs(0, wanted=False),
    )
    length = UnknownLength(goes_on, replay, num_checkpoints, memory_budget, store or MemoryStore())
    final, _, checkpoints = _run("checkpointed_while", steps, leaves, [], length, progress)
    return trees.unflatten(structure, final), checkpoints


def _run(
    name: str,
    steps: Steps,
    leaves: list[Any],
    inputs: list[Any],
    length: Length,
    progress: Progress | None,
) -> tuple[list[Any], list[Any], Checkpoints]:
    """Run a loop; return the final state and the outputs, with their graph, and checkpoints."""
    traced = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    tracked = [traced and is_tracked(leaf) for leaf in leaves]
    once = {id(leaf): _detached(leaf) for leaf in leaves}  # one tensor that occurs twice stays one
    initial = steps.initial([once[id(leaf)] for leaf in leaves], tracked)
    given = [*leaves, *inputs]
    loop = LoopPass(
        name,
        steps,
        initial,
        length,
        progress,
        traced=traced,
        made=lambda: _memories([v for v in given if is_tracked(v) and not v.is_leaf]),
    )
    loop.forward()
    results = connect(loop, steps, given)
    count = len(leaves)
    return results[:count], results[count:], _checkpoints(loop, steps.structure)


def _checkpoints(loop: LoopPass, structure: trees.Structure) -> Checkpoints:
    anchor = torch.zeros((), requires_grad=True) if loop.traced else None

    def shown(held: HeldState) -> Any:
        leaves = [read_only_checkpoint(leaf, anchor) for leaf in held.leaves]
        return trees.unflatten(structure, leaves)

    return loop.checkpoints(shown)


def _check_state(leaves: list[Any]) -> None:
    if not any(is_floating(leaf) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise TypeError(
            f"the state holds no floating-point tensor, only {kinds}: there is nothing to "
            "differentiate"
        )


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _memories(values: list[Any]) -> dict[Hashable, int]:
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return {("torch", storage._cdata): storage.nbytes() for storage in storages}
