"""Loops under autograd: a whole loop is one primitive, and the runner computes its gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from autograd.core import defvjp_argnums
from autograd.extend import primitive
from autograd.tracer import isbox, trace_stack

from ... import trees
from ...errors import RecomputeMismatchError, UnsupportedError
from ...loops import LoopOptions, LoopRun, Measured, Watcher
from ...loops.options import Budget, parse_memory
from ...schedules import Online
from ...sizes import parse_budget
from .accounts import Account, LoopTales, is_made
from .captures import Captures, capture
from .randomness import Randomness
from .steps import Gradients, HeldState, Outputs, PerStep, RecordedStep, Steps
from .tape import is_differentiable, plain, zeros_like
from .weighing import memories
from .whole import run_as_one

__all__ = ["run_loop", "run_while"]

Run = LoopRun[Any, HeldState, RecordedStep, Gradients]
Checkpoints = dict[int, Any]


class Progress(Watcher, Protocol):
    """A watcher that can be shown for a while."""

    def shown(self, *, last: bool) -> AbstractContextManager[None]: ...

    def expect(self, recomputed: int) -> None: ...


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
        return holder[0](state, x) if scan else (holder[0](state), None)

    outputs = Outputs(options.steps, wanted=scan)
    body = _FixedPass(loop.steps(call, outputs), loop, options, progress)
    body.shown_name = "checkpointed_scan" if scan else "checkpointed_loop"
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
    body = _WhilePass(steps, loop, goes_on, replay, num_checkpoints, memory_budget, progress)
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


class _Pass(ABC):
    """One run of a loop: ahead once, and back as often as autograd asks."""

    name = "checkpointed loop"
    shown_name = "checkpointed_loop"

    def __init__(self, steps: Steps, loop: _Loop, progress: Progress | None) -> None:
        self.steps = steps
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
            self.tales = LoopTales(self.account, memories(made), progress)

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
            self.run = self.start(traced=False)
        stacks = self.steps.outputs.stacks
        return trees.unflatten(loop.structure, self.final.leaves), stacks

    def results_of(self, loop: _Loop) -> tuple[Any, list[Any]]:
        """Run a traced loop as one primitive; return the final state and the stacked outputs."""
        values = iter(run_as_one(self, loop.values))
        raw = [*self.final.leaves, *self.steps.outputs.stacks]
        results = [next(values) if t else r for t, r in zip(self.traced, raw, strict=True)]
        count = len(loop.leaves)
        return trees.unflatten(loop.structure, results[:count]), results[count:]

    def ahead(self) -> tuple[Any, ...]:
        self.account.begin(self.shown_name)
        with (
            self.account.inside(),
            self.steps.captures.filled(self.steps.captured),
            self.shown(last=False),
        ):
            self.run = self.start(traced=True)
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
                state = self.finish(run, seeds[:count])
            if run.evaluations > known:
                self.account.recomputed(run.evaluations - known, steps.seconds)
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
        run = self.start(traced=True)
        difference = self.steps.difference(self.final, known)
        if difference:
            raise RecomputeMismatchError(f"the whole loop was run again and its final {difference}")
        return run

    def checkpoints(self, loop: _Loop) -> Checkpoints:
        """Return the states that are held, as the caller sees them."""
        held = self.run.held if self.run else {}
        anchor = next((value for value in loop.values if isbox(value)), None)

        def shown(leaf: Any) -> Any:
            if anchor is None or not is_differentiable(leaf):
                return leaf.copy() if isinstance(leaf, np.ndarray) and anchor is not None else leaf
            return _just_a_look(leaf, anchor)

        return {
            step: trees.unflatten(loop.structure, map(shown, state.leaves))
            for step, state in sorted(held.items())
        }

    @abstractmethod
    def start(self, *, traced: bool) -> Run:
        """Run ahead: set `final` and return the run, ready to go back if `traced`."""

    @abstractmethod
    def finish(self, run: Run, seeds: Gradients) -> Gradients:
        """Go back through a run."""


class _FixedPass(_Pass):
    """A loop of known length."""

    def __init__(
        self, steps: Steps, loop: _Loop, options: LoopOptions, progress: Progress | None
    ) -> None:
        super().__init__(steps, loop, progress)
        self.options = options
        self.schedule: Any = None

    def start(self, *, traced: bool) -> Run:
        first: RecordedStep | None = None
        if not traced:
            self.schedule = self.options.sweep(_state_bytes(self.initial))
        elif self.schedule is None:
            measured = None
            # Step 0 is always recorded first: that tells constants from what depends on the trace.
            if self.options.needs_measuring or (self.tales and self.options.steps):
                exactly = self.options.memory_budget is not None
                first, measured = self.steps.measure(self.initial, exactly=exactly)
                self.weighed(measured)
            elif self.options.steps:
                first = self.steps.record(self.initial, 0)
            self.steps.captures.accept_constants()
            self.schedule = self.options.choose(measured)
            if self.progress:
                self.progress.expect(self.schedule.evaluations - self.options.steps)
        run: Run = LoopRun(
            self.steps, self.initial, self.options.steps, first=first, watcher=self.watcher
        )
        self.final = run.forward(self.schedule)
        return run

    def finish(self, run: Run, seeds: Gradients) -> Gradients:
        return run.backward(seeds)


class _WhilePass(_Pass):
    """A loop that ends when its condition says so."""

    def __init__(
        self,
        steps: Steps,
        loop: _Loop,
        goes_on: list[Any],
        replay: list[Any],
        num_checkpoints: int | None,
        memory_budget: Budget | None,
        progress: Progress | None,
    ) -> None:
        super().__init__(steps, loop, progress)
        self.shown_name = "checkpointed_while"
        self.goes_on = goes_on
        self.replay = replay  # not empty: run the condition after every step
        self.slots = num_checkpoints
        self.budget = memory_budget

    def start(self, *, traced: bool) -> Run:
        first: RecordedStep | None = None
        if self.slots is None or self.tales:
            first = self._measure_first(traced=traced)
        assert self.slots is not None
        run: Run = LoopRun(self.steps, self.initial, 0, first=first, watcher=self.watcher)
        self.final, _ = run.forward_while(
            Online(self.slots).forward(), lambda state: self._goes_on(run, state)
        )
        return run

    def _goes_on(self, run: Run, state: Any) -> bool:
        answer = bool(self.goes_on[0](state))
        if run.evaluations == 0:  # a re-run starts after the condition has drawn its numbers
            run.initial = HeldState(self.initial.leaves, self.steps.randomness.moment())
        return answer

    def _measure_first(self, *, traced: bool) -> RecordedStep | None:
        if not traced or not self.goes_on[0](self.steps.resume(self.initial)):
            if self.slots is None:
                assert self.budget is not None
                self.slots = parse_budget(self.budget, whole=0) // _state_bytes(self.initial)
            return None
        first, measured = self.steps.measure(self.initial, exactly=self.slots is None)
        self.weighed(measured)
        if self.slots is None:
            budget = parse_memory(self.budget, 1, measured)
            self.slots = (budget - measured.working_bytes) // measured.state_bytes
        return first

    def finish(self, run: Run, seeds: Gradients) -> Gradients:
        assert self.slots is not None
        way_back = Online(self.slots).backward(run.steps, sorted(run.held))
        if self.steps.randomness.is_used:
            self.replay.append(self.goes_on)
        try:
            return run.backward(seeds, way_back, self.final)
        finally:
            self.replay.clear()


@primitive  # type: ignore[untyped-decorator]
def _just_a_look(leaf: Any, anchor: Any) -> Any:
    return leaf


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
    return found


def _state_bytes(state: HeldState) -> int:
    return max(1, sum(np.asarray(leaf).nbytes for leaf in state.leaves))


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
