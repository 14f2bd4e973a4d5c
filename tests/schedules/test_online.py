from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.schedules import Advance, Backward, Drop, Online, Restore, Save, simulate
from tests.schedules import theory
from tests.schedules.brute import fewest_evaluations
from tests.schedules.strategies import slots, steps, thorough


# theory.md, "online placement with binomial reversal"; and with one slot less, as the initial
# state takes none of ours.
@pytest.mark.parametrize(
    ("steps", "slots", "evaluations"),
    [
        *[(1000, 31, 3465), (10_000, 31, 45_949), (10_000, 100, 34_950)],
        *[(1000, 30, 3465), (10_000, 30, 45_949), (10_000, 99, 34_950)],
    ],
)
def test_is_no_worse_than_the_known_placement(steps: int, slots: int, evaluations: int) -> None:
    assert Online(slots).run(steps).evaluations <= evaluations


@pytest.mark.parametrize(("steps", "slots"), [(1000, 30), (10_000, 30), (3000, 3), (2000, 1)])
def test_executes_what_it_predicts_over_long_loops(steps: int, slots: int) -> None:
    run = Online(slots).run(steps)
    assert simulate(run, steps, memory=slots).evaluations == run.evaluations


def worse_than_offline(steps: int, slots: int) -> float:
    """The last step's extra run, which shows that the loop has ended, is not counted."""
    return (Online(slots).run(steps).evaluations - 1) / theory.revolve(steps, slots)


@given(st.integers(1, 3000), st.integers(5, 40))
@thorough
def test_with_five_slots_or_more_it_loses_little_to_a_known_length(steps: int, slots: int) -> None:
    assert 1 <= worse_than_offline(steps, slots) <= 1.08


@given(st.integers(1, 1000), st.integers(0, 4))
@thorough
def test_with_few_slots_it_loses_no_more_than_a_third(steps: int, slots: int) -> None:
    assert 1 <= worse_than_offline(steps, slots) <= 4 / 3


@pytest.mark.parametrize(
    ("slots", "bound"), [(1, 1.2), (2, 1.143), (3, 1.112), (4, 1.1), (5, 1.077), (10, 1.05)]
)
def test_the_more_slots_the_less_it_loses(slots: int, bound: float) -> None:
    assert max(worse_than_offline(n, slots) for n in range(1, 300)) <= bound


@pytest.mark.parametrize("slots", range(5))
@pytest.mark.parametrize("steps", range(1, 11))
def test_the_way_back_is_the_best_from_its_checkpoints(steps: int, slots: int) -> None:
    run = Online(slots).run(steps)
    placed: list[int] = []
    for action in run:
        if isinstance(action, Backward | Restore):
            break
        placed += [action.step] if isinstance(action, Save) else []
        placed.remove(action.step) if isinstance(action, Drop) else None
    way_back = fewest_evaluations(steps, slots, tapes=False, placed=placed, working=steps)
    assert run.evaluations == steps + way_back


@given(st.integers(1, 200), st.integers(1, 200), slots)
@thorough
def test_the_way_ahead_does_not_depend_on_where_the_loop_ends(
    steps: int, more: int, slots: int
) -> None:
    def ahead(length: int) -> list:
        actions = []
        for action in Online(slots).run(length):
            if isinstance(action, Advance) and action.stop >= steps:
                break
            actions.append(action)
        return actions

    assert ahead(steps) == ahead(steps + more)


@given(steps, slots)
@thorough
def test_forward_and_backward_make_up_the_run(steps: int, slots: int) -> None:
    online, actions, held = Online(slots), [], []
    for action in online.forward() if steps else ():
        if isinstance(action, Advance) and action.stop >= steps:
            actions.append(Advance(action.start, steps))
            break
        actions.append(action)
        held += [action.step] if isinstance(action, Save) else []
        held.remove(action.step) if isinstance(action, Drop) else None
    assert [*actions, *online.backward(steps, held)] == list(online.run(steps))


def test_without_slots_it_goes_on_for_ever_and_saves_nothing() -> None:
    ahead = Online(0).forward()
    first = [next(ahead) for _ in range(4)]
    assert all(isinstance(action, Advance) for action in first)
    assert all(one.stop == other.start for one, other in pairwise(first))
