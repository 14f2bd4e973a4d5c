import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.schedules import Mixed, Revolve, Sizes, StoreAll, simulate
from tests.schedules import theory
from tests.schedules.brute import cheapest_recordings, fewest_evaluations
from tests.schedules.counting import recordings
from tests.schedules.strategies import slots, steps, thorough, unlike_sizes


@pytest.mark.parametrize("slots", range(21))
def test_predicts_the_closed_form(slots: int) -> None:
    predicted = [Mixed(n, slots).evaluations for n in range(201)]
    assert predicted == [theory.mixed(n, slots) for n in range(201)]


@pytest.mark.parametrize("slots", range(21))
def test_executes_the_closed_form(slots: int) -> None:
    lengths = range(slots % 5, 201, 5)
    executed = [simulate(Mixed(n, slots), n, memory=slots).evaluations for n in lengths]
    assert executed == [theory.mixed(n, slots) for n in lengths]


# Published with the initial state in a slot; as its step is taped at once, that slot is a tape's.
@pytest.mark.parametrize(
    ("slots_with_the_first", "evaluations"), [(5, 6285), (10, 3637), (31, 2440), (50, 1949)]
)
def test_agrees_with_the_published_values(slots_with_the_first: int, evaluations: int) -> None:
    # Step 0 is taped first, and the 999 others are reversed from its output.
    assert 1 + Mixed(999, slots_with_the_first - 1).evaluations == evaluations


SIZES = [
    *[(1, 1, 0), (1, 2, 0), (1, 3, 0), (1, 4, 0), (2, 3, 0), (3, 4, 0)],  # own slot or tape
    *[(1, 2, 1), (1, 3, 1), (2, 5, 2), (3, 4, 3)],  # a tape contains the whole of its input
    *[(2, 3, 1), (2, 2, 1), (3, 5, 2)],  # or a part of it
]


@pytest.mark.parametrize("room", range(11))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_is_the_best_of_all_schedules(sizes: tuple[int, int, int], room: int) -> None:
    predicted = [Mixed(n, room, Sizes(*sizes)).evaluations for n in range(9)]
    assert predicted == [fewest_evaluations(n, room, sizes) for n in range(9)]


def test_gives_up_a_slot_for_a_tape() -> None:
    assert Mixed(7, 3, Sizes(1, 3, 0)).evaluations == 13
    assert fewest_evaluations(7, 3, (1, 3, 0)) == 13


@given(steps, st.integers(0, 60), unlike_sizes())
@thorough
def test_is_at_least_as_good_as_states_alone(steps: int, room: int, sizes: Sizes) -> None:
    states_alone = Revolve(steps, room // sizes.state)
    assert Mixed(steps, room, sizes).evaluations <= states_alone.evaluations


@given(steps, unlike_sizes())
@thorough
def test_where_every_tape_fits_no_step_runs_twice(steps: int, sizes: Sizes) -> None:
    room = max(0, steps - 1) * (sizes.tape - sizes.tape_input)
    assert Mixed(steps, room, sizes).evaluations == StoreAll(steps).evaluations


@given(steps, st.integers(0, 60), st.integers(0, 20), unlike_sizes())
@thorough
def test_more_room_never_costs_more(steps: int, room: int, more: int, sizes: Sizes) -> None:
    less = Mixed(steps, room, sizes)
    assert Mixed(steps, room + more, sizes).evaluations <= less.evaluations


@given(steps, slots, st.integers(2, 1000))
@thorough
def test_the_unit_does_not_matter(steps: int, slots: int, unit: int) -> None:
    bytes_ = Mixed(steps, 3 * slots * unit + unit - 1, Sizes(2 * unit, 3 * unit, unit))
    assert list(bytes_) == list(Mixed(steps, 3 * slots, Sizes(2, 3, 1)))


def test_answers_do_not_depend_on_what_was_asked_before() -> None:
    asked = [(n, room) for n in (20, 21, 22, 23, 24, 25) for room in (9, 4, 12, 9)]
    first = {q: list(Mixed(*q, Sizes(1, 3, 0))) for q in asked}
    again = {q: list(Mixed(*q, Sizes(1, 3, 0))) for q in reversed(asked)}
    assert first == again


# --- where going back costs something each time -------------------------------------------------


@pytest.mark.parametrize("cost", [1, 2, 5])
@pytest.mark.parametrize("room", range(0, 9, 2))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_is_the_best_with_recordings(sizes: tuple[int, int, int], room: int, cost: int) -> None:
    predicted = [Mixed(n, room, Sizes(*sizes), cost).cost for n in range(8)]
    assert predicted == [cheapest_recordings(n, room, sizes, cost) for n in range(8)]


@given(steps, st.integers(0, 60), unlike_sizes(), st.integers(1, 5))
@thorough
def test_does_what_it_says_with_recordings(n: int, room: int, sizes: Sizes, cost: int) -> None:
    schedule = Mixed(n, room, sizes, cost)
    run = simulate(schedule, n, memory=room, sizes=sizes)
    assert run.evaluations == schedule.evaluations
    assert run.evaluations + cost * recordings(schedule) == schedule.cost


@given(steps, st.integers(0, 60), unlike_sizes(), st.integers(1, 5))
@thorough
def test_recordings_are_traded_for_evaluations(n: int, room: int, sizes: Sizes, cost: int) -> None:
    free, dear = Mixed(n, room, sizes), Mixed(n, room, sizes, cost)
    assert free.evaluations <= dear.evaluations
    assert dear.cost <= free.evaluations + cost * recordings(free)


def test_half_the_recordings_for_a_thousandth_of_the_work() -> None:
    free, dear = (Mixed(1000, 36, Sizes(1, 2, 1), cost) for cost in (0, 1))
    assert (free.evaluations, recordings(free)) == (2303, 118)
    assert (dear.evaluations, recordings(dear)) == (2306, 44)
