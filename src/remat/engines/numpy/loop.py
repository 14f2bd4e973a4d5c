"""Loops under autograd: a whole loop is one primitive, and the runner computes its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from autograd.core import defvjp_argnums
from autograd.extend import primitive
from autograd.tracer import isbox, trace_stack

from ... import trees
from ...errors import RecomputeMismatchError, UnsupportedError
from ...loops import (
    Account,
    Budget,
    KnownLength,
    Length,
    LoopOptions,
    LoopRun,
    LoopTales,
    Measured,
    Progress,
    UnknownLength,
    Watcher,
    checkpoints_of,
    state_and_output,
)
from ...stores import MemoryStore, Store
from .captures import Captures, capture
from .overlaps import guarded
from .randomness import Randomness
from .steps import Gradients, HeldState, Outputs, PerStep, RecordedStep, Steps
from .tape import is_differentiable, is_made, plain, zeros_like
from .weighing import memories
from .whole import run_as_one

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
    body = _Pass(name, loop.steps(call, outputs), loop, length, progress)
    final, stacks = body.results_of(loop) if loop.is_traced else body.plainly(loop)
    ys = trees.unflatten(outputs.structure, stacks) if outputs.structure is not None else ()
    return final, ys, body.checkpoints(loop)


def run_while(
    condition: Any,
    function: Any,
    state: Any,
    num_checkpoints: int | None,
    memory_budget: Budget | None,
    *,
    store: Store | None = None,
    progress: Progress | None = None,
) -> tuple[Any, Checkpoints]:
    """Run a loop whose length shows at its end."""
    loop = _Loop([function, condition], state, None)
    step, goes_on = loop.holders

    def call(state: Any, x: Any) -> tuple[Any, Any]:
        new = step[0](state)
        # A condition that draws random numbers has to draw them again, too.
        if replay:
            goes_on[0](new)
        return new, None

    # (Something of their own that both refer to: a pass that `call` knows would be a cycle.)
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
    body = _Pass("checkpointed_while", steps, loop, length, progress)
    final, _ = body.results_of(loop) if loop.is_traced else body.plainly(loop)
    return final, body.checkpoints(loop)


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
        self.captures = capture(self.holders) if trace_stack.top >= 0 else Captures()

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


class _Pass:
    """One run of a loop: ahead once, and back as often as autograd asks."""

    name = "checkpointed loop"

    def __init__(
        self,
        shown_name: str,
        steps: Steps,
        loop: _Loop,
        length: Length,
        progress: Progress | None,
    ) -> None:
        self.shown_name = shown_name
        self.steps = steps
        self.length = length
        self.initial = HeldState(_plain_leaves(loop.leaves), steps.randomness.moment())
        self.inputs = [*self.initial.leaves, *steps.inputs.leaves, *steps.captured]
        self.progress = progress
        self.run: Run | None = None
        self.traced: list[bool] = []  # leaves of the final state, stacked outputs: differentiable?
        self.final: HeldState = self.initial
        self.account = Account()
        self.tales: LoopTales | None = None
        if self.account.must_weigh and loop.is_traced:
            made = [plain(value) for value in loop.values if is_made(value)]
            self.tales = LoopTales(self.account, memories(made), _held_bytes, progress)

    @property
    def watcher(self) -> Watcher | None:
        return self.tales or self.progress

    def weighed(self, measured: Measured) -> None:
        if self.tales:
            tape_bytes = measured.tape_bytes - measured.state_bytes
            self.tales.weighed(tape_bytes, plain_bytes=self.steps.plain_bytes)

    def shown(self, *, last: bool) -> AbstractContextManager[None]:
        return self.progress.shown(last=last) if self.progress else nullcontext()

    def plainly(self, loop: _Loop) -> tuple[Any, list[Any]]:
        """Run a loop that nobody differentiates."""
        with self.shown(last=True):
            self.run = self._start(traced=False)
        stacks = self.steps.outputs.stacks
        return trees.unflatten(loop.structure, self.final.leaves), stacks

    def results_of(self, loop: _Loop) -> tuple[Any, list[Any]]:
        """Run a traced loop as one primitive; return the final state and the stacked outputs."""
        values = iter(run_as_one(self, loop.values))
        raw = [*self.final.leaves, *self.steps.outputs.stacks]
        # (Copies of the rest: what the caller writes to is not what re-runs are compared with.)
        results = [next(values) if t else _copy(r) for t, r in zip(self.traced, raw, strict=True)]
        count = len(loop.leaves)
        return trees.unflatten(loop.structure, results[:count]), results[count:]

    def ahead(self) -> tuple[Any, ...]:
        self.account.begin(self.shown_name)
        with (
            self.account.inside(),
            self.steps.captures.filled(self.steps.captured),
            self.shown(last=False),
        ):
            self.run = self._start(traced=True)
        if self.tales:
            self.tales.settle()
        self.steps.captures.refuse_leftovers()
        self.steps.randomness.watch_only_used(self.initial.moment, self.steps.randomness.moment())
        results = [*self.final.leaves, *self.steps.outputs.stacks]
        self.traced = [is_differentiable(result) for result in results]
        return tuple(r for r, traced in zip(results, self.traced, strict=True) if traced)

    def back(self, gradients: Sequence[Any]) -> list[Any]:
        """Return a gradient for each input: state, per-step inputs, what is closed over."""
        steps, count = self.steps, len(self.initial.leaves)
        parts = iter(gradients)
        seeds = [next(parts) if traced else None for traced in self.traced]
        steps.start_gradients()
        steps.outputs.gradients = seeds[count:]
        now = steps.randomness.moment()
        known, steps.seconds = self.run.evaluations if self.run else 0, 0.0
        if self.tales:
            self.tales.is_ahead = False
        try:
            with (
                self.account.inside(),
                steps.captures.filled(steps.captured),
                self.shown(last=True),
            ):
                run, self.run = self.run or self._again(), None
                state = self.length.back(run, self.final, seeds[:count])
            if run.evaluations > known:
                self.account.recomputed(run.evaluations - known, steps.seconds)
            self.account.rounded(run.storing_error)
        finally:
            steps.randomness.go_to(now)
            steps.outputs.gradients = ()
        captured = [None if total is None else total[0] for total in steps.captured_sums]
        found = [*state, *steps.inputs.gradients, *captured]
        steps.start_gradients()
        return [
            zeros_like(value) if gradient is None and is_differentiable(value) else gradient
            for value, gradient in zip(self.inputs, found, strict=True)
        ]

    def _again(self) -> Run:
        """Run ahead once more: the checkpoints of the first time were used up."""
        known = self.final
        run = self._start(traced=True)
        difference = self.steps.difference(self.final, known)
        if difference:
            raise RecomputeMismatchError(f"the whole loop was run again and its final {difference}")
        return run

    def checkpoints(self, loop: _Loop) -> Checkpoints:
        """Return the states that are held, as the caller sees them."""
        anchor = next((value for value in loop.values if isbox(value)), None)

        def shown(leaf: Any) -> Any:
            if anchor is None or not is_differentiable(leaf):
                return leaf.copy() if isinstance(leaf, np.ndarray) and anchor is not None else leaf
            return _just_a_look(leaf, anchor)

        return checkpoints_of(
            self.run, lambda state: trees.unflatten(loop.structure, map(shown, state.leaves))
        )

    def _start(self, *, traced: bool) -> Run:
        """Run ahead: set `final` and return the run, ready to go back if `traced`."""
        run, self.final = self.length.ahead(
            self.steps,
            self.initial,
            traced=traced,
            weighed=self.weighed if self.tales else None,
            watcher=self.watcher,
        )
        return run


@primitive  # type: ignore[untyped-decorator]
def _just_a_look(leaf: Any, anchor: Any) -> Any:
    return leaf


# A caller that changes what it looks at gets an array of its own; nothing is copied before.
_just_a_look.copies_on_write = True


def _just_a_look_vjp(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Callable[[Any], Any]:
    def vjp(g: Any) -> Any:
        raise UnsupportedError(
            "gradients do not flow through the checkpoints that a loop returns; to use states on "
            "the way in a loss, return them as outputs of remat.checkpointed_scan"
        )

    return vjp


defvjp_argnums(_just_a_look, _just_a_look_vjp)


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


def _held_bytes(state: HeldState) -> int:
    return sum(memories(state.leaves).values())


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
