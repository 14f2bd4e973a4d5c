"""Loops under autograd: a loop is one primitive, and the runner computes its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from autograd.core import defvjp_argnums
from autograd.extend import primitive
from autograd.tracer import isbox, trace_stack

from ... import trees
from ...errors import UnsupportedError
from ...loops import (
    KnownLength,
    Length,
    LoopOptions,
    LoopPass,
    LoopRun,
    MemorySize,
    Progress,
    UnknownLength,
    state_and_output,
)
from ...stores import MemoryStore, Store
from .captures import Captures, capture, objects_among
from .custom_vjp import run_custom_vjp
from .memory_measure import memories
from .overlaps import guarded
from .randomness import Randomness
from .steps import Gradients, HeldState, Outputs, PerStep, RecordedStep, Steps
from .tape import is_differentiable, is_made, plain, zeros_like

__all__ = ["run_loop", "run_while"]

Run = LoopRun[Any, HeldState, RecordedStep, Gradients]
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
    loop = _Loop([function], state, xs)
    holder = loop.holders[0]

    def call(state: Any, x: Any) -> tuple[Any, Any]:
        return state_and_output(holder[0](state, x)) if scan else (holder[0](state), None)

    outputs = Outputs(options.steps, wanted=scan)
    name = "checkpointed_scan" if scan else "checkpointed_loop"
    length = KnownLength(options, progress)
    steps = loop.steps(call, outputs)
    empty: list[Any] = []
    if scan and not options.steps:
        empty = steps.outputs_of_no_step(loop.leaves, capture(loop.holders))
    final, stacks, checkpoints = _run(name, steps, loop, length, progress)
    stacks = stacks or empty
    ys = trees.unflatten(outputs.structure, stacks) if outputs.structure is not None else ()
    return final, ys, checkpoints


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
    loop = _Loop([function, condition], state, None)
    step, goes_on = loop.holders

    def call(state: Any, x: Any) -> tuple[Any, Any]:
        new = step[0](state)
        # A condition that draws random numbers has to draw them again.
        if replay:
            goes_on[0](new)
        return new, None

    # (Shared by `call` and the length: a reference to the pass would be a cycle.)
    replay: list[Any] = []
    steps = loop.steps(call, Outputs(0, wanted=False))

    def condition_now(state: Any) -> Any:
        return goes_on[0](state)

    length = UnknownLength(
        condition_now,
        replay,
        num_checkpoints,
        memory_budget,
        store or MemoryStore(),
    )
    final, _, checkpoints = _run("checkpointed_while", steps, loop, length, progress)
    return final, checkpoints


class _Loop:
    """The functions and values of a loop, and the boxes among them."""

    def __init__(self, functions: Sequence[Any], state: Any, xs: Any) -> None:
        self.holders = [[function] for function in functions]
        self.leaves, self.structure = trees.flatten(state)
        _check_state(self.leaves)
        self.xs: list[Any] = []
        self.xs_structure: trees.Structure | None = None
        if xs is not None:
            self.xs, self.xs_structure = trees.flatten(xs)
        # Without a trace there are no boxes to be found, and nothing is run again.
        searched = [*self.holders, *objects_among([*self.leaves, *self.xs]).values()]
        self.captures = capture(searched) if trace_stack.top >= 0 else Captures()

    @property
    def values(self) -> list[Any]:
        return [*self.leaves, *self.xs, *self.captures.boxes]

    @property
    def is_traced(self) -> bool:
        return any(map(isbox, self.values))

    def steps(self, call: Callable[[Any, Any], tuple[Any, Any]], outputs: Outputs) -> Steps:
        inputs = PerStep([np.asarray(plain(x)) for x in self.xs], self.xs_structure)
        captured = [plain(box) for box in self.captures.boxes]
        randomness = Randomness(self.captures.generators)
        traced = [isbox(leaf) for leaf in self.leaves]
        return Steps(
            call, self.structure, traced, self.captures, captured, randomness, inputs, outputs
        )


class _Primitive:
    """A traced loop as a primitive of autograd: what `run_custom_vjp` calls."""

    name = "checkpointed loop"

    def __init__(self, loop: LoopPass, steps: Steps) -> None:
        self.traced: list[bool] = []  # leaves of the final state, stacked outputs: differentiable?
        self._loop = loop
        self._steps = steps
        self._inputs = [*loop.initial.leaves, *steps.inputs.leaves, *steps.captured]

    def forward(self) -> tuple[Any, ...]:
        """Run forward; return the differentiable results."""
        self._loop.forward()
        results = self.results
        self.traced = [is_differentiable(result) for result in results]
        return tuple(r for r, traced in zip(results, self.traced, strict=True) if traced)

    @property
    def results(self) -> list[Any]:
        return [*self._loop.final.leaves, *self._steps.outputs.stacks]

    def backward(self, gradients: Sequence[Any]) -> list[Any]:
        """Return a gradient for each input: state, per-step inputs, captures."""
        parts = iter(gradients)
        seeds = [next(parts) if traced else None for traced in self.traced]
        count = len(self._loop.initial.leaves)
        found = self._loop.backward(seeds[:count], seeds[count:])
        return [
            zeros_like(value) if gradient is None and is_differentiable(value) else gradient
            for value, gradient in zip(self._inputs, found, strict=True)
        ]


def _run(
    name: str, steps: Steps, given: _Loop, length: Length, progress: Progress | None
) -> tuple[Any, list[Any], Checkpoints]:
    """Run a loop; return the final state, the stacked outputs and the checkpoints."""
    initial = HeldState(_plain_leaves(given.leaves), steps.randomness.snapshot())
    loop = LoopPass(
        name,
        steps,
        initial,
        length,
        progress,
        traced=given.is_traced,
        made=lambda: memories([plain(value) for value in given.values if is_made(value)]),
    )
    if given.is_traced:
        results = _run_traced(_Primitive(loop, steps), given.values)
    else:
        loop.forward_untraced()
        results = [*loop.final.leaves, *steps.outputs.stacks]
    count = len(given.leaves)
    final = trees.unflatten(given.structure, results[:count])
    return final, results[count:], _checkpoints(loop, given)


def _run_traced(primitive: _Primitive, values: Sequence[Any]) -> list[Any]:
    boxes = iter(run_custom_vjp(primitive, values))
    # (Copies of the rest: the caller may write to them, and re-runs are compared with them.)
    pairs = zip(primitive.traced, primitive.results, strict=True)
    return [next(boxes) if traced else _copy(result) for traced, result in pairs]


def _checkpoints(loop: LoopPass, given: _Loop) -> Checkpoints:
    """Return the states that are held, as the caller sees them."""
    anchor = next((value for value in given.values if isbox(value)), None)

    def shown(leaf: Any) -> Any:
        if anchor is None:
            return leaf
        return _read_only(leaf, anchor) if is_differentiable(leaf) else _copy(leaf)

    structure = given.structure
    return loop.checkpoints(lambda held: trees.unflatten(structure, map(shown, held.leaves)))


@primitive  # type: ignore[untyped-decorator]
def _read_only(leaf: Any, anchor: Any) -> Any:
    return leaf


# A caller that changes what it looks at gets an array of its own; nothing is copied before.
_read_only.copies_on_write = True


def _read_only_vjp(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Callable[[Any], Any]:
    def vjp(g: Any) -> Any:
        raise UnsupportedError(
            "gradients do not flow through the checkpoints that a loop returns; to use states on "
            "the way in a loss, return them as outputs of remat.checkpointed_scan"
        )

    return vjp


defvjp_argnums(_read_only, _read_only_vjp)


def _plain_leaves(leaves: list[Any]) -> list[Any]:
    """Look through the boxes; two boxes over one array are two arrays to the caller."""
    found: list[Any] = []
    for i, leaf in enumerate(leaves):
        value = plain(leaf)
        others = zip(found, leaves[:i], strict=True)
        shared = any(value is other and leaf is not box for other, box in others)
        found.append(value.copy() if shared and isinstance(value, np.ndarray) else value)
    return guarded(found, found)


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _check_state(leaves: list[Any]) -> None:
    values = [plain(leaf) for leaf in leaves]
    for value in values:
        if isinstance(value, np.ndarray) and (
            value.dtype == object or type(value) is not np.ndarray
        ):
            kind = "of objects" if value.dtype == object else f"of type {type(value).__name__}"
            raise TypeError(
                f"the state holds an array {kind}; use plain numpy.ndarray of numbers instead"
            )
    if not any(isinstance(v, np.ndarray | np.inexact | float | complex) for v in values):
        kinds = ", ".join(sorted({type(v).__name__ for v in values})) or "nothing"
        raise TypeError(
            f"the state holds no array, only {kinds}: there is nothing to differentiate"
        )
