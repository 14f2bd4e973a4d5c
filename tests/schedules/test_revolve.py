import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.schedules import Revolve, simulate
from tests.schedules import theory
from tests.schedules.brute import fewest_evaluations
from tests.schedules.strategies import slots, steps, thorough


@pytest.mark.parametrize("slots", range(21))
def test_predicts_the_closed_form(slots: int) -> None:
    predicted = [Revolve(n, slots).evaluations for n in range(201)]
    assert predicted == [theory.revolve(n, slots) for n in range(201)]


@pytest.mark.parametrize("slots", range(21))
def test_executes_the_closed_form(slots: int) -> None:
    lengths = range(slots % 3, 201, 3)
    executed = [simulate(Revolve(n, slots), n, memory=slots).evaluations for n in lengths]
    assert executed == [theory.revolve(n, slots) for n in lengths]


@pytest.mark.parametrize(
    ("steps", "slots_with_the_first", "advances"),
    [(1000, 31, 2439), (10_000, 100, 24_747), (100_000, 20, 534_220), (1_000_000, 30, 5_623_008)],
)
def test_predicts_the_published_values(
    steps: int, slots_with_the_first: int, advances: int
) -> None:
    assert theory.t(steps, slots_with_the_first) == advances
    assert Revolve(steps, slots_with_the_first - 1).evaluations == advances + steps


@pytest.mark.parametrize(("steps", "slots"), [(1000, 30), (10_000, 99), (10_000, 3), (3000, 1)])
def test_executes_the_closed_form_of_long_loops(steps: int, slots: int) -> None:
    account = simulate(Revolve(steps, slots), steps, memory=slots)
    assert account.evaluations == theory.revolve(steps, slots)
    assert account.peak_memory == slots


@pytest.mark.parametrize("slots", range(5))
@pytest.mark.parametrize("steps", range(10))
def test_is_the_best_of_all_schedules_that_hold_states(steps: int, slots: int) -> None:
    assert Revolve(steps, slots).evaluations == fewest_evaluations(steps, slots, tapes=False)


@given(steps, slots)
@thorough
def test_one_more_slot_never_costs_more(steps: int, slots: int) -> None:
    assert Revolve(steps, slots + 1).evaluations <= Revolve(steps, slots).evaluations


@given(steps, st.integers(0, 200))
@thorough
def test_it_takes_no_more_slots_than_are_of_use(steps: int, slots: int) -> None:
    useful = min(slots, max(0, steps - 2))
    assert simulate(Revolve(steps, slots), steps).peak_memory == useful


@pytest.mark.parametrize("slots", [8, 9, 100])
def test_with_a_slot_for_every_state_each_step_runs_at_most_twice(slots: int) -> None:
    assert Revolve(10, slots).evaluations == 19


@pytest.mark.parametrize("integer", [np.int32, np.int64, np.uint8])
def test_counts_numpy_integers_like_python_ones(integer: type) -> None:
    assert Revolve(integer(200), integer(3)).evaluations == Revolve(200, 3).evaluations
    assert list(Revolve(integer(200), integer(3))) == list(Revolve(200, 3))


def test_numpy_integers_do_not_overflow() -> None:
    assert Revolve(np.int32(1_000_000), 0).evaluations == 1_000_000 * 1_000_001 // 2
