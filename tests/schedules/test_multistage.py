import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.schedules import Multistage, Revolve, Tier, simulate
from tests.schedules import theory
from tests.schedules.brute import cheapest_two_tiers
from tests.schedules.strategies import costs, multistage, slots, steps, thorough

COSTS = [(0, 0), (1, 1), (0.5, 0.25), (0.25, 0.5), (2, 0), (0, 1), (0, 2), (3, 1), (1.5, 4)]


@pytest.mark.parametrize(("write", "read"), COSTS)
@pytest.mark.parametrize("disk_slots", range(3))
@pytest.mark.parametrize("slots", range(3))
def test_is_the_cheapest_of_all_two_tier_schedules(
    slots: int, disk_slots: int, write: float, read: float
) -> None:
    predicted = [Multistage(n, slots, disk_slots, write, read).cost for n in range(8)]
    assert predicted == [cheapest_two_tiers(n, slots, disk_slots, write, read) for n in range(8)]


@given(multistage())
@thorough
def test_executes_the_cost_that_it_predicts(limited) -> None:
    schedule = limited.schedule
    account = simulate(schedule, schedule.steps, memory=limited.memory, disk=limited.disk)
    reads, writes = account.reads[Tier.DISK], account.writes[Tier.DISK]
    executed = account.evaluations + reads * schedule.read_cost + writes * schedule.write_cost
    assert executed == pytest.approx(schedule.cost, abs=1e-9)


@given(steps, slots, costs, costs)
@thorough
def test_without_disk_slots_it_is_revolve(
    steps: int, slots: int, write: float, read: float
) -> None:
    schedule = Multistage(steps, slots, 0, write, read)
    assert list(schedule) == list(Revolve(steps, slots))
    assert schedule.cost == theory.revolve(steps, slots)


@given(steps, slots, slots)
@thorough
def test_a_disk_that_costs_nothing_is_as_good_as_memory(
    steps: int, slots: int, disk_slots: int
) -> None:
    assert Multistage(steps, slots, disk_slots, 0, 0).cost == theory.revolve(
        steps, slots + disk_slots
    )


@given(steps, slots, slots)
@thorough
def test_a_disk_that_is_too_slow_is_not_used(steps: int, slots: int, disk_slots: int) -> None:
    schedule = Multistage(steps, slots, disk_slots, write_cost=1e6, read_cost=1e6)
    assert list(schedule) == list(Revolve(steps, slots))


@given(st.integers(0, 40), st.integers(0, 4), st.integers(0, 4), costs, costs)
@thorough
def test_one_more_slot_of_either_kind_never_costs_more(
    steps: int, slots: int, disk_slots: int, write: float, read: float
) -> None:
    cost = Multistage(steps, slots, disk_slots, write, read).cost
    assert Multistage(steps, slots + 1, disk_slots, write, read).cost <= cost
    assert Multistage(steps, slots, disk_slots + 1, write, read).cost <= cost
    assert Multistage(steps, slots + 1, disk_slots, write, read).cost <= (
        Multistage(steps, slots, disk_slots + 1, write, read).cost
    )


def test_there_may_be_far_more_slots_than_steps() -> None:
    schedule = Multistage(6, slots=10**6, disk_slots=10**6)
    assert schedule.cost == schedule.evaluations == 11
