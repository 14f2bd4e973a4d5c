"""States on disk at equal distances, judged by running them on integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.schedules import Disk, Multistage, Revolve, Staged, Tier, plan_loop, simulate
from remat.schedules.actions import Restore, Save
from remat.schedules.staged import best_staged

from .strategies import thorough


@given(st.integers(0, 120), st.integers(1, 5), st.integers(1, 20))
@thorough
def test_it_runs_as_often_as_it_says(steps, slots, parts) -> None:
    schedule = Staged(steps, slots, parts, 2.0, 3.0)
    judged = simulate(schedule, steps, memory=slots, disk=schedule.disk_slots)
    actions = list(schedule)
    writes = sum(isinstance(a, Save) and a.tier is Tier.DISK for a in actions)
    reads = sum(isinstance(a, Restore) and a.tier is Tier.DISK for a in actions)
    assert judged.evaluations == schedule.evaluations
    assert schedule.cost == judged.evaluations + 2 * writes + 3 * reads
    assert writes == schedule.disk_slots


def test_one_part_is_revolve() -> None:
    assert list(Staged(50, 3, 1)) == list(Revolve(50, 3))


def test_the_best_number_of_parts_is_near_the_optimum() -> None:
    staged = best_staged(1000, 10, 20, 2.0, 2.0)
    optimum = Multistage(1000, 10, 20, 2.0, 2.0)
    assert staged.disk_slots <= 20
    assert optimum.cost <= staged.cost < 1.25 * optimum.cost


def test_a_long_loop_uses_the_disk() -> None:
    plan = plan_loop(100_000, slots=10, disk=Disk(500, 2.0, 2.0))
    assert plan.name == "staged"
    assert 0 < plan.schedule.disk_slots <= 500
    assert plan.best.cost < 0.7 * Revolve(100_000, 10).evaluations
    assert plan.best.disk_slots == plan.schedule.disk_slots
    assert "parts" in plan.reason


@pytest.mark.parametrize(("name", "value"), [("slots", 0), ("parts", 0), ("steps", -1)])
def test_bad_arguments_are_named(name, value) -> None:
    with pytest.raises(ValueError, match=name):
        Staged(**{"steps": 10, "slots": 2, "parts": 3, name: value})
