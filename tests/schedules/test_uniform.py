from itertools import pairwise

import pytest
from hypothesis import given

from remat.schedules import Advance, Backward, Revolve, Save, Uniform, simulate
from tests.schedules.brute import fewest_evaluations
from tests.schedules.strategies import slots, steps, thorough


@pytest.mark.parametrize("slots", range(5))
@pytest.mark.parametrize("steps", range(2, 10))
def test_the_way_back_is_the_best_from_its_checkpoints(steps: int, slots: int) -> None:
    schedule = Uniform(steps, slots)
    sweep = max(schedule.positions, default=0)
    way_back = fewest_evaluations(
        steps, slots, tapes=False, placed=schedule.positions, working=sweep
    )
    assert schedule.evaluations == sweep + way_back


@given(steps, slots)
@thorough
def test_parts_differ_by_at_most_one_step(steps: int, slots: int) -> None:
    edges = [0, *Uniform(steps, slots).positions, steps]
    parts = [b - a for a, b in pairwise(edges)]
    assert max(parts) - min(parts) <= 1
    assert parts == sorted(parts)


@given(steps, slots)
@thorough
def test_the_first_sweep_saves_at_the_positions(steps: int, slots: int) -> None:
    schedule = Uniform(steps, slots)
    saved = []
    for action in schedule:
        if isinstance(action, Backward):
            break
        assert isinstance(action, Advance | Save)
        saved += [action.step] if isinstance(action, Save) else []
    assert saved == schedule.positions


@given(steps, slots)
@thorough
def test_is_never_better_than_revolve(steps: int, slots: int) -> None:
    assert Uniform(steps, slots).evaluations >= Revolve(steps, slots).evaluations


@pytest.mark.parametrize("slots", range(21))
def test_executes_what_it_predicts(slots: int) -> None:
    executed = [simulate(Uniform(n, slots), n, memory=slots).evaluations for n in range(0, 201, 7)]
    assert executed == [Uniform(n, slots).evaluations for n in range(0, 201, 7)]


def test_the_last_state_is_not_worth_a_slot() -> None:
    assert Uniform(4, 10).positions == [1, 2]
    assert Uniform(4, 10).evaluations == 7
