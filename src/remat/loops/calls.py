"""Loops, scans and while-loops as the public functions call them, on any engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import trees
from ..stores import MemoryStore, Store
from .lengths import KnownLength, Length, UnknownLength
from .lifecycle import LoopPass
from .options import LoopOptions, MemorySize
from .protocols import Progress
from .scans import state_and_output
from .steps import AnySteps, LoopCall

__all__ = ["LoopFunctions"]

CheckpointsByStep = Mapping[int, Any]


class LoopFunctions:
    """Loops on an engine, by its class of steps."""

    def __init__(
        self,
        open_steps: Callable[[LoopCall], AnySteps],
        ask: Callable[[Any, Any], Any],
        detached: Callable[[Any], Any] = lambda state: state,
        prepared: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        self._open = open_steps
        self._ask = ask  # calls the condition of a while-loop on a state; nothing is recorded
        self._detached = detached  # returns a state without its graph
        self._prepared = prepared  # returns what the caller gave as the engine uses it

    def run_loop(
        self,
        function: Any,
        state: Any,
        options: LoopOptions,
        *,
        xs: Any = None,
        progress: Progress | None = None,
    ) -> tuple[Any, Any, CheckpointsByStep]:
        """Run a loop, or a scan if `xs` is given; return final state, outputs and checkpoints."""
        scan, holder = xs is not None, [function]

        def step(state: Any, x: Any) -> tuple[Any, Any]:
            return state_and_output(holder[0](state, x)) if scan else (holder[0](state), None)

        leaves, structure = trees.flatten(state)
        inputs, inputs_structure = trees.flatten(xs) if scan else ([], None)
        prepared = self._prepared
        call = LoopCall(
            [holder],
            step,
            prepared(leaves),
            structure,
            prepared(inputs),
            inputs_structure,
            options.steps,
            # Of a chain of layers, the first may take integers.
            takes_any_state=options.is_planned,
        )
        name = "checkpointed_scan" if scan else "checkpointed_loop"
        return _run(name, call, self._open(call), KnownLength(options, progress), progress)

    def run_while(
        self,
        condition: Any,
        function: Any,
        state: Any,
        num_checkpoints: int | None,
        memory_budget: MemorySize | None,
        *,
        store: Store | None = None,
        progress: Progress | None = None,
    ) -> tuple[Any, CheckpointsByStep]:
        """Run a loop whose length shows at its end; return final state and checkpoints."""
        holder, asked = [function], [condition]
        ask, detached = self._ask, self._detached

        def step(state: Any, x: Any) -> tuple[Any, Any]:
            new = holder[0](state)
            if replay:  # a condition that draws random numbers has to draw them again
                ask(asked[0], detached(new))
            return new, None

        # (Shared by `step` and the length: a reference to the pass would be a cycle.)
        replay: list[Any] = []
        leaves, structure = trees.flatten(state)
        leaves = self._prepared(leaves)
        functions = [holder, asked]
        call = LoopCall(functions, step, leaves, structure, [], None, 0, takes_any_state=False)
        steps = self._open(call)

        def goes_on(state: Any) -> Any:
            return ask(asked[0], steps.tree(state))

        length = UnknownLength(
            goes_on, replay, num_checkpoints, memory_budget, store or MemoryStore()
        )
        final, _, checkpoints = _run("checkpointed_while", call, steps, length, progress)
        return final, checkpoints


def _run(
    name: str, call: LoopCall, steps: AnySteps, length: Length, progress: Progress | None
) -> tuple[Any, Any, CheckpointsByStep]:
    """Run a loop; return the final state and the outputs, with their graph, and checkpoints."""
    given, count, structure = call.given, len(call.leaves), call.structure
    loop = LoopPass(
        name,
        steps,
        steps.initial(call.leaves),
        length,
        progress,
        traced=steps.traced,
        made=lambda: steps.made(given),
    )
    results = steps.connect(loop, given)
    if not call.steps and call.xs_structure is not None:
        results[count:] = steps.outputs_of_no_step(loop.initial)
    view = steps.viewer(given, traced=loop.traced)
    outputs = steps.outputs.structure
    return (
        trees.unflatten(structure, results[:count]),
        () if outputs is None else trees.unflatten(outputs, results[count:]),
        loop.checkpoints(lambda held: trees.unflatten(structure, map(view, held.leaves))),
    )
