"""States on disk at equal distances, checked by running them on integers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remat.schedules import (
    Blocks,
    Disk,
    Multistage,
    Revolve,
    Sizes,
    Staged,
    Tape,
    Tier,
    plan_loop,
    simulate,
)
from remat.schedules.staged import best_staged
from tests.schedules.strategies import steps, thorough, unlike_sizes

UNLIKE = [Sizes(1, 1, 0), Sizes(1, 2, 1), Sizes(1, 4, 1), Sizes(2, 5, 2), Sizes(3, 4, 1)]


@given(steps, st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), unlike_sizes())
@example(3, 2, 3, 1, Sizes(2, 3, 2))  # a block longer than a part
@thorough
def test_it_costs_what_it_says(steps, part, block, slots, sizes) -> None:
    schedule = Staged(steps, part, block, slots, 2.0, 3.0)
    cost = simulate(schedule, steps, memory=schedule.peak(sizes), sizes=sizes)
    reads, writes = cost.reads[Tier.DISK], cost.writes[Tier.DISK]
    assert cost.evaluations == schedule.evaluations
    assert schedule.cost == cost.evaluations + 2 * writes + 3 * reads
    assert writes == reads == schedule.disk_slots
    assert cost.peak_disk == schedule.disk_slots * sizes.state


@given(steps, st.integers(0, 5), st.integers(1, 9), st.integers(1, 4))
@thorough
def test_one_part_is_blocks_in_memory(steps, more, block, slots) -> None:
    part = max(1, steps + more)
    assert list(Staged(steps, part, block, slots)) == list(Blocks(steps, block, slots))
    assert list(Staged(steps, part, 1, slots)) == list(Revolve(steps, slots))


@given(st.integers(1, 300), st.integers(1, 40))
@thorough
def test_with_parts_of_one_block_no_step_runs_more_than_twice(steps: int, block: int) -> None:
    schedule = Staged(steps, part=block, block=block)
    # All but the last block are run once to get on, and every one is run once with its tapes.
    assert schedule.evaluations == 2 * steps - min(steps, block)
    assert simulate(schedule, steps).writes[Tier.MEMORY] == 0


@pytest.mark.parametrize("block", range(1, 8))
@pytest.mark.parametrize("part", range(1, 8))
def test_it_stays_inside_its_peak(part: int, block: int) -> None:
    for length, slots, sizes in itertools.product(range(12), (1, 2), UNLIKE):
        schedule = Staged(length, part, block, slots)
        assert simulate(schedule, length, sizes=sizes).peak_memory <= schedule.peak(sizes)


@pytest.mark.parametrize(("part", "block"), [(2, 3), (2, 9), (4, 5), (5, 5)])
def test_a_part_within_one_block_holds_the_tapes_of_the_part(part: int, block: int) -> None:
    # Its first tape brings its own input; the last tape lives just in passing.
    sizes = Sizes(2, 3, 2)
    schedule = Staged(20, part, block, slots=1)
    assert schedule.peak(sizes) == simulate(schedule, 20, sizes=sizes).peak_memory == part - 1 + 2


# ---- the best parts and blocks


@pytest.mark.parametrize("sizes", UNLIKE)
@pytest.mark.parametrize("room", [0, 1, 2, 3, 5, 8, 13, 30])
@pytest.mark.parametrize("steps", [3, 7, 20, 40])
def test_the_best_is_near_the_best_of_all_that_fit(steps: int, room: int, sizes: Sizes) -> None:
    for disk in (Disk(3, 1.0, 1.0), Disk(steps, 0.0, 0.0), Disk(steps, 3.0, 2.0)):
        costs = disk.write_cost, disk.read_cost
        every = [
            Staged(steps, part, block, slots, *costs)
            for block in range(1, steps)
            for part in range(block, steps)
            for slots in (range(int(part > block), room + 1) if part > block else (0,))
        ]
        fit = [s.cost for s in every if s.peak(sizes) <= room and 0 < s.disk_slots <= disk.slots]
        best = best_staged(steps, room, disk.slots, sizes, *costs, tapes=True)
        assert (best is None) == (not fit)
        if best is not None:
            assert best.peak(sizes) <= room
            assert 0 < best.disk_slots <= disk.slots
            assert min(fit) <= best.cost <= 1.15 * min(fit)


@given(
    *(st.integers(2, 3000), st.integers(0, 300), st.integers(0, 300), unlike_sizes()),
    *(st.integers(0, 1000), st.booleans()),
)
@thorough
def test_more_room_never_costs_more(steps, room, more, sizes, disk, tapes) -> None:
    less = best_staged(steps, room, disk, sizes, 1.0, 1.0, tapes=tapes)
    best = best_staged(steps, room + more, disk, sizes, 1.0, 1.0, tapes=tapes)
    assert less is None or (best is not None and best.cost <= less.cost)


def test_without_tapes_it_is_near_the_optimum() -> None:
    staged = best_staged(1000, 10, 20, Sizes(), 2.0, 2.0, tapes=False)
    optimum = Multistage(1000, 10, 20, 2.0, 2.0)
    assert staged.disk_slots <= 20
    assert not any(isinstance(action, Tape) for action in staged)
    assert optimum.cost <= staged.cost < 1.25 * optimum.cost


def test_a_disk_that_costs_nothing_and_tapes_run_each_step_twice_in_little_memory() -> None:
    plan = plan_loop(
        *(1000,), slots=10, state_bytes=8, tape_bytes=16, tape_input_bytes=8, disk=Disk(1000, 0, 0)
    )
    assert plan.name == "staged"
    assert plan.evaluations == 2 * 1000 - 10
    assert plan.evaluations < 0.7 * Multistage(1000, 10, 50, 0.0, 0.0).evaluations


def test_a_slow_disk_is_used_less() -> None:
    room = {"slots": 10, "state_bytes": 8, "tape_bytes": 16, "tape_input_bytes": 8}
    plans = [plan_loop(1000, **room, disk=Disk(1000, cost, cost)) for cost in (0.1, 5, 50, 5000)]
    used = [plan.best.disk_slots for plan in plans]
    assert used == sorted(used, reverse=True)
    assert used[0] == 98
    assert used[-1] == 0


def test_a_long_loop_uses_the_disk() -> None:
    plan = plan_loop(100_000, slots=10, disk=Disk(500, 2.0, 2.0))
    assert plan.name == "staged"
    assert 0 < plan.schedule.disk_slots <= 500
    assert plan.best.cost < 0.7 * Revolve(100_000, 10).evaluations
    assert plan.best.disk_slots == plan.schedule.disk_slots
    assert "parts" in plan.reason


@pytest.mark.parametrize("name", ["slots", "part", "block", "steps"])
def test_bad_arguments_are_named(name: str) -> None:
    arguments = {"steps": 10, "part": 3, "block": 2, "slots": 1}
    with pytest.raises(ValueError, match=name):
        Staged(**{**arguments, name: -1})
    with pytest.raises(TypeError, match=f"{name} must be a whole number"):
        Staged(**{**arguments, name: 1.5})


def test_a_part_of_several_blocks_needs_a_slot() -> None:
    Staged(10, part=2, block=2)
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        Staged(10, part=3, block=2)
