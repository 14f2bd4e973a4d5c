"""Loops of known length, and loops that end when a condition is false: how each is run.

Both run forward to a final state, and backward, over the steps of any engine. They run forward
again for a second backward pass, because the first one uses up what was held.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from ..schedules import Disk, Online, Schedule, Tier
from ..sizes import parse_budget
from ..stores import Checkpoints, DiskStore, MemoryStore, Store
from .options import LoopOptions, Measured, MemorySize, parse_memory
from .protocols import LoopObserver, Progress
from .runner import LoopRun
from .steps import AnySteps, HeldState

__all__ = ["AnyRun", "KnownLength", "Length", "UnknownLength"]

Held = HeldState[Any]
Recorded = tuple[Any, Held]  # the tape of step 0, and the state after it
AnyRun = LoopRun[Any, Held, Any, list[Any]]

_TRIALS = 3  # steps that are timed
_POSITION_BYTES = 768  # that the online schedule needs for a checkpoint


class Length(Protocol):
    """How a loop is run ahead and back."""

    def forward(
        self,
        steps: AnySteps,
        initial: Held,
        *,
        traced: bool,
        on_measured: Callable[[Measured], None] | None,
        observer: LoopObserver | None,
    ) -> tuple[AnyRun, Held]:
        """Run to the final state; return a run that can go backward, if `traced`, and the state."""
        ...

    def backward(
        self, steps: AnySteps, run: AnyRun, final: Held | None, seeds: list[Any]
    ) -> list[Any]:
        """Go backward through a run; return the gradient of the initial state."""
        ...


class KnownLength:
    """A loop of known length."""

    def __init__(self, options: LoopOptions, progress: Progress | None) -> None:
        self._options = options
        self._progress = progress
        self._schedule: Schedule | None = None
        self._early: dict[int, Held] = {}  # states that were reached before the schedule was chosen

    def forward(
        self,
        steps: AnySteps,
        initial: Held,
        *,
        traced: bool,
        on_measured: Callable[[Measured], None] | None,
        observer: LoopObserver | None,
    ) -> tuple[AnyRun, Held]:
        options, first = self._options, None
        if not traced:
            stores = (
                _open_stores(options.store, steps, two_tiers=False) if options.is_planned else {}
            )
            run: AnyRun = LoopRun(steps, initial, options.steps, observer=observer, stores=stores)
            return run, run.forward(options.sweep(steps.state_bytes(initial)))
        if self._schedule is None:
            first = self._choose(steps, initial, on_measured)
        assert self._schedule is not None
        # (In a chain of layers steps differ: the first one proves nothing.)
        if not steps.needs_gradients and not options.is_planned:
            run = LoopRun(steps, initial, options.steps, first=first, observer=observer)
            return run, run.forward(options.sweep(steps.state_bytes(initial)))
        stores = _open_stores(options.store, steps, two_tiers=options.has_two_tiers)
        run = LoopRun(
            steps,
            initial,
            options.steps,
            first=first,
            early=self._early,
            observer=observer,
            stores=stores,
        )
        self._early = {}
        return run, _closing(run, lambda: run.forward(self._schedule))  # type: ignore[arg-type]

    def backward(
        self, steps: AnySteps, run: AnyRun, final: Held | None, seeds: list[Any]
    ) -> list[Any]:
        return _closing(run, lambda: run.backward(seeds), anyway=True)

    def _choose(
        self,
        steps: AnySteps,
        initial: Held,
        on_measured: Callable[[Measured], None] | None,
    ) -> Recorded | None:
        """Choose the schedule; return step 0, which was recorded to measure it."""
        options = self._options
        first, measured, disk = None, None, None
        # Step 0 is always recorded first: this shows what the step closes over.
        if options.needs_measuring or (on_measured and options.steps):
            exactly = options.memory_budget is not None
            first, measured = steps.measure(initial, exactly=exactly)
            if on_measured:
                on_measured(measured)
            if options.needs_measuring:
                measured = measured.to_plan_with(_stored_bytes(options.store, steps, initial))
            if options.has_two_tiers:
                disk = self._measure_disk(steps, first, measured)
        elif options.steps:
            first = steps.record(initial, 0, 1)
        steps.settle()
        self._schedule = options.choose(measured, disk)
        if self._progress:
            self._progress.expect(self._schedule.evaluations - options.steps)
        return first

    def _measure_disk(self, steps: AnySteps, first: Recorded, measured: Measured) -> Disk:
        """Measure what the disk costs, in steps.

        No step is run for that alone: the steps after the first are run as they come, and the
        states between them are handed to the run. Only if so few steps follow that they may all be
        taped, which would be a second run, the time of the recorded one has to do.
        """
        store, count = self._options.store, self._options.steps
        assert isinstance(store, DiskStore)
        (_, after), seconds = first, steps.seconds
        tape = max(1, measured.tape_bytes - (measured.input_bytes or measured.state_bytes))
        taped = self._options.room(measured) // tape + 1
        if count - taped > _TRIALS:
            self._early, seconds = _run_early(steps, after)
        write, read = store.measure(steps.arrays, steps.split(after)[0])
        slots = min(count, store.free_bytes() // (measured.state_bytes + 1))
        return Disk(slots, _about(write / seconds), _about(read / seconds))


def _run_early(steps: AnySteps, after_first: Held) -> tuple[dict[int, Held], float]:
    """Run the first steps after step 0; return the states that they lead to, and the least time."""
    held, seconds = {1: after_first}, float("inf")
    for step in range(1, 1 + _TRIALS):
        state = steps.resume(held[step])
        started = time.perf_counter()
        state = steps.advance(state, step, step + 1)
        seconds = min(seconds, time.perf_counter() - started)
        held[step + 1] = steps.hold_final(state)
    return held, seconds


class UnknownLength:
    """A loop that ends when its condition says so.

    `goes_on` is called before every step. If it draws random numbers it has to in every run:
    `replay` is not empty while steps are run again.
    """

    def __init__(
        self,
        goes_on: Callable[[Any], Any],
        replay: list[Any],
        num_checkpoints: int | None,
        memory_budget: MemorySize | None,
        store: Store,
    ) -> None:
        self._goes_on = goes_on
        self._replay = replay
        self._slots = num_checkpoints
        self._budget = memory_budget
        self._store = store
        self._steps: int | None = None  # after the first pass

    def forward(
        self,
        steps: AnySteps,
        initial: Held,
        *,
        traced: bool,
        on_measured: Callable[[Measured], None] | None,
        observer: LoopObserver | None,
    ) -> tuple[AnyRun, Held]:
        first, begins = None, None
        if traced and (self._slots is None or on_measured):
            begins = self._begins(steps, initial)
            initial = steps.now(initial)
            first = self._measure_first(steps, initial, on_measured) if begins else None
        if self._slots is None:
            self._slots = self._slots_without_tapes(steps, initial)
        stores = _open_stores(self._store, steps, two_tiers=False) if traced else None
        run: AnyRun = LoopRun(
            steps,
            initial,
            0,
            first=first,
            observer=observer,
            stores=stores,
        )

        def goes_on(state: Any) -> bool:
            answer = self._ask(steps, state, run.steps)
            if run.evaluations == 0:  # re-runs start after the condition has drawn its numbers
                run.initial = steps.now(initial)
            return answer

        placement = Online(self._slots).forward()
        final, self._steps = _closing(run, lambda: run.forward_while(placement, goes_on, begins))
        return run, final

    def _begins(self, steps: AnySteps, initial: Held) -> bool:
        """Ask about the initial state, before step 0 is measured: it is asked once."""
        return self._ask(steps, steps.resume(initial), 0)

    def _ask(self, steps: AnySteps, state: Any, done: int) -> bool:
        """Ask whether the loop goes on; in a second pass the length is known.

        Then the condition is only called if it may draw random numbers.
        """
        if self._steps is None:
            return bool(self._goes_on(state))
        if steps.is_random:
            self._goes_on(state)
        return done < self._steps

    def backward(
        self, steps: AnySteps, run: AnyRun, final: Held | None, seeds: list[Any]
    ) -> list[Any]:
        assert self._slots is not None
        backward_schedule = Online(self._slots).backward(run.steps, run.positions)
        if steps.is_random:
            self._replay.append(self._goes_on)
        try:
            return _closing(run, lambda: run.backward(seeds, backward_schedule, final), anyway=True)
        finally:
            self._replay.clear()

    def _measure_first(
        self,
        steps: AnySteps,
        initial: Held,
        on_measured: Callable[[Measured], None] | None,
    ) -> Recorded:
        """Record step 0; if there is a budget, find out how many states fit into it."""
        first, measured = steps.measure(initial, exactly=self._slots is None)
        if on_measured:
            on_measured(measured)
        if self._slots is None:
            budget = parse_memory(self._budget, 1, measured)
            state_bytes = _stored_bytes(self._store, steps, initial) + _POSITION_BYTES
            self._slots = (budget - measured.working_bytes) // state_bytes
        return first

    def _slots_without_tapes(self, steps: AnySteps, initial: Held) -> int:
        assert self._budget is not None
        return parse_budget(self._budget, whole=0) // _stored_bytes(self._store, steps, initial)


def _open_stores(store: Store, steps: AnySteps, *, two_tiers: bool) -> Mapping[Tier, Checkpoints]:
    if isinstance(store, MemoryStore):
        return {}  # states are held as they are
    return {Tier.DISK if two_tiers else Tier.MEMORY: store.open(steps.arrays)}


def _stored_bytes(store: Store, steps: AnySteps, held: Held) -> int:
    """Return the bytes of a state in the store."""
    if isinstance(store, MemoryStore) or store.on_disk:
        return steps.state_bytes(held)
    stored = store.open(steps.arrays)
    try:
        stored.put(0, steps.split(held)[0])
        return max(1, stored.nbytes)
    finally:
        stored.close()


def _about(cost: float) -> float:
    """Round a cost to a power of sqrt(2), so that measuring again leads to the same plan."""
    return math.pow(2.0, round(2 * math.log2(max(cost, 1e-6))) / 2)


Result = TypeVar("Result")


def _closing(run: AnyRun, call: Callable[[], Result], *, anyway: bool = False) -> Result:
    """Close a run if a call fails; with `anyway`, also if it does not."""
    try:
        result = call()
    except BaseException:
        run.close()
        raise
    if anyway:
        run.close()
    return result
