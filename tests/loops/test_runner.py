"""The loop runner on integers: a step adds one, so every state says how often it was stepped."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat import RecomputeMismatchError
from remat.loops import LoopRun
from remat.schedules import Mixed, Multistage, Online, Revolve, StoreAll, Uniform

from ..schedules.strategies import Limited, any_schedule, thorough


class Counter:
    """StepOperations over numbers; notes every evaluation as (kind, step)."""

    def __init__(self, spoil: int | None = None, *, records_runs: bool = False) -> None:
        self.log: list[tuple[str, int]] = []
        self.records_runs = records_runs
        self.spoil = spoil  # the evaluation whose result is off by 1000

    def _step(self, state: int, step: int, kind: str) -> int:
        assert state % 1000 == step
        self.log.append((kind, step))
        return state + 1 + 1000 * (len(self.log) - 1 == self.spoil)

    def advance(self, state, start, stop):
        assert isinstance(state, list)
        for step in range(start, stop):
            state = [self._step(state[0], step, "run")]
        return state

    def hold(self, state):
        assert isinstance(state, list)
        return state[0]

    def hold_final(self, state):
        return state[0]

    def resume(self, held):
        assert isinstance(held, int)
        return [held]

    def record(self, held, start, stop):
        state = held
        for step in range(start, stop):
            state = self._step(state, step, "tape")
        assert self.records_runs or stop == start + 1
        return held, state

    def backward_steps(self, tape, gradient, start, stop):
        assert tape % 1000 == start
        return [*gradient, *reversed(range(start, stop))]

    def difference(self, one, other):
        return None if one == other else f"{one} is not {other}"


class Watch:
    def __init__(self) -> None:
        self.counts = {"forward": 0, "recompute": 0, "backward": 0}
        self.held: set[tuple[str, int]] = set()

    def forward(self, steps):
        self.counts["forward"] += steps

    def recompute(self, steps):
        self.counts["recompute"] += steps

    def backward(self, steps):
        self.counts["backward"] += steps

    def holds_state(self, step, state, nbytes):
        assert state == step
        self.held.add(("state", step))

    def frees_state(self, step):
        self.held.discard(("state", step))

    def holds_tape(self, step):
        self.held.add(("tape", step))

    def frees_tape(self, step):
        self.held.remove(("tape", step))


@given(any_schedule, st.booleans())
@thorough
def test_any_schedule_goes_back_through_every_step_once(drawn: Limited, records_runs) -> None:
    steps = drawn.schedule.steps
    operations, watch = Counter(records_runs=records_runs), Watch()
    run = LoopRun(operations, 0, steps, observer=watch)
    final = run.forward(drawn.schedule)
    assert final == steps
    # (The last tape is at work, and not among the held ones.)
    runs = [(tape.start, last + 1) for last, tape in run._tapes.items()]
    runs += [(run._last.start, steps)] if steps else []
    tapes = {step for start, stop in runs for step in range(start, stop)}
    assert watch.held == {*(("state", p) for p in run.positions), *(("tape", k) for k in tapes)}
    assert run.backward([]) == list(reversed(range(steps)))
    assert watch.held == set()
    assert run.evaluations == drawn.schedule.evaluations == len(operations.log)
    assert run.positions == []
    assert watch.counts == {
        "forward": steps,
        "recompute": run.evaluations - steps,
        "backward": steps,
    }


@given(any_schedule, st.booleans())
@thorough
def test_a_first_step_that_was_recorded_is_not_run_again(drawn: Limited, records_runs) -> None:
    steps = drawn.schedule.steps
    if steps == 0:
        return
    operations = Counter(records_runs=records_runs)
    first = operations.record(0, 0, 1)
    run = LoopRun(operations, 0, steps, first=first)
    assert run.forward(drawn.schedule) == steps
    assert run.backward([]) == list(reversed(range(steps)))
    assert len(operations.log) == run.evaluations == drawn.schedule.evaluations


@pytest.mark.parametrize(
    "schedule", [Revolve(9, 2), Uniform(9, 3), Mixed(9, 3), Multistage(9, 1, 1, 1, 1)]
)
def test_one_evaluation_that_differs_is_caught_or_is_the_truth(schedule) -> None:
    """Spoil each evaluation in turn: either the runner raises, or all recordings fit together."""
    for spoiled in range(schedule.evaluations):
        operations = Counter(spoiled)
        run = LoopRun(operations, 0, 9)
        final = run.forward(schedule)
        try:
            run.backward([])
        except RecomputeMismatchError:
            continue
        # Nobody raised: then the step was run just once, and its result is the truth.
        step = operations.log[spoiled][1]
        assert sum(1 for _, other in operations.log if other == step) == 1
        assert final == 1009


def test_the_error_names_the_steps_that_were_run_again() -> None:
    operations = Counter(spoil=9)  # the first evaluation after the sweep
    run = LoopRun(operations, 0, 9)
    run.forward(Uniform(9, 2))
    with pytest.raises(RecomputeMismatchError, match=r"steps 6 to 7 .* before step 8"):
        run.backward([])


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 10, 57])
@pytest.mark.parametrize("slots", [0, 1, 2, 5])
def test_a_loop_of_unknown_length(steps, slots) -> None:
    operations = Counter()
    run = LoopRun(operations, 0, 0)
    online = Online(slots)
    final, found = run.forward_while(online.forward(), lambda state: state[0] < steps)
    assert (final, found) == (steps, steps)
    assert [step for _, step in operations.log] == list(range(steps))
    assert len(run.positions) <= slots
    assert all(run.held(position) == position for position in run.positions)
    way_back = online.backward(steps, run.positions)
    assert run.backward([], way_back, final) == list(reversed(range(steps)))
    assert run.evaluations == len(operations.log)


def test_a_change_after_the_sweep_of_a_loop_of_unknown_length_is_caught() -> None:
    for spoiled in itertools.count(12):
        operations = Counter(spoiled)
        run = LoopRun(operations, 0, 0)
        final, _ = run.forward_while(Online(2).forward(), lambda state: state[0] < 12)
        way_back = Online(2).backward(12, run.positions)
        try:
            run.backward([], way_back, final)
        except RecomputeMismatchError:
            continue
        assert spoiled >= len(operations.log)  # nothing was spoiled
        break


def test_the_golden_order_of_a_small_run() -> None:
    operations = Counter()
    run = LoopRun(operations, 0, 4)
    run.forward(Revolve(4, 1))
    assert operations.log == [("run", 0), ("run", 1), ("run", 2), ("tape", 3)]
    assert run.positions == [2]
    assert run.held(2) == 2
    run.backward([])
    assert operations.log[4:] == [("tape", 2), ("run", 0), ("tape", 1), ("tape", 0)]


def test_holding_everything_runs_everything_once() -> None:
    operations = Counter()
    run = LoopRun(operations, 0, 5)
    run.forward(StoreAll(5))
    run.backward([])
    assert operations.log == [("tape", step) for step in range(5)]
