"""From options and measurements to a schedule."""

from __future__ import annotations

import pytest

from remat import BudgetTooSmallError
from remat.loops import LoopOptions, Measured
from remat.schedules import (
    Advance,
    Given,
    Mixed,
    Revolve,
    Save,
    Schedule,
    StoreAll,
    Uniform,
    simulate,
)
from remat.schedules.actions import Sizes

MEASURED = Measured(state_bytes=100, tape_bytes=500, working_bytes=1500)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("revolve", Revolve(50, 4)), ("uniform", Uniform(50, 4)), ("all", StoreAll(50))],
)
def test_fixed_schedules(name, expected) -> None:
    assert list(LoopOptions(50, 4, None, name).choose(None)) == list(expected)


def test_a_schedule_is_run_as_it_is() -> None:
    schedule = Given(5, (2,))
    options = LoopOptions(5, None, None, schedule)
    assert not options.needs_measuring
    assert options.choose(MEASURED) is options.choose(None) is schedule


def test_a_schedule_for_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule must be for 6 steps, got one for 5"):
        LoopOptions(6, None, None, Given(5, (2,)))


@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        (Given(7, (1, 4)), [1, 4]),
        (Given(7, ()), []),
        (Given(7, (6,)), [6]),
        (Given(1, ()), []),
        (Given(0, ()), []),
        (StoreAll(5), []),
        (Revolve(10, 2), [4, 7]),
        (Mixed(10, 4), None),
    ],
    ids=repr,
)
def test_the_sweep_of_a_schedule(schedule: Schedule, held: list[int] | None) -> None:
    at, saved = 0, []
    for action in LoopOptions(schedule.steps, None, None, schedule).sweep(8):
        if isinstance(action, Advance):
            assert action.start == at
            at = action.stop
        else:
            assert action == Save(at)
            saved.append(at)
    assert at == schedule.steps
    assert held is None or saved == held


@pytest.mark.parametrize("slots", [0, 1, 4, 20])
def test_auto_takes_no_more_room_than_the_checkpoints_would(slots) -> None:
    schedule = LoopOptions(50, slots, None, "auto").choose(MEASURED)
    sizes = Sizes(state=100, tape=500, tape_input=100)
    account = simulate(schedule, 50, memory=slots * 100, sizes=sizes)
    assert account.evaluations == schedule.evaluations
    assert schedule.evaluations <= Revolve(50, slots).evaluations * 1.01


@pytest.mark.parametrize("budget", [1500, 2000, 5000, "10KB", 0.3, 1.0])
@pytest.mark.parametrize("name", ["auto", "revolve", "uniform"])
def test_schedules_fit_their_budget(budget, name) -> None:
    whole = 1500 + 49 * 400
    limit = {"10KB": 10_000, 0.3: int(0.3 * whole), 1.0: whole}.get(budget, budget)
    schedule = LoopOptions(50, None, budget, name).choose(MEASURED)
    sizes = Sizes(state=100, tape=500, tape_input=100)
    account = simulate(schedule, 50, memory=max(0, limit - 1500), sizes=sizes)
    assert account.evaluations == schedule.evaluations


@pytest.mark.parametrize("name", ["auto", "revolve", "uniform", "all"])
def test_not_even_one_step_fits(name) -> None:
    with pytest.raises(BudgetTooSmallError, match=r"1\.5 KB"):
        LoopOptions(50, None, 1499, name).choose(MEASURED)


def test_not_everything_fits() -> None:
    with pytest.raises(BudgetTooSmallError, match='schedule="all" holds'):
        LoopOptions(50, None, 5000, "all").choose(MEASURED)


@pytest.mark.parametrize("name", ["auto", "revolve", "uniform"])
@pytest.mark.parametrize(("steps", "slots"), [(0, 3), (1, 3), (10, 0), (10, 3), (10, 40)])
def test_a_sweep_ends_at_the_end_and_holds_as_many_states_as_asked_for(name, steps, slots) -> None:
    at, held = 0, []
    for action in LoopOptions(steps, slots, None, name).sweep(8):
        if isinstance(action, Advance):
            assert action.start == at
            assert action.stop > at
            at = action.stop
        else:
            assert isinstance(action, Save)
            assert action.step == at
            held.append(at)
    assert at == steps
    assert len(held) == min(slots, max(0, steps - 1))


def test_a_sweep_within_bytes() -> None:
    actions = list(LoopOptions(100, None, 80, "uniform").sweep(8))
    assert sum(isinstance(action, Save) for action in actions) == 10


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (LoopOptions(5, None, None, "auto"), True),
        (LoopOptions(0, None, None, "auto"), False),
        (LoopOptions(5, 2, None, "revolve"), False),
        (LoopOptions(5, None, "1MB", "revolve"), True),
    ],
)
def test_when_a_step_is_measured(options, needed) -> None:
    assert options.needs_measuring is needed
