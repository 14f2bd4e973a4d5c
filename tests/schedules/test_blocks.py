import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.schedules import Blocks, Revolve, Sizes, StoreAll, simulate
from remat.schedules.blocks import best_blocks
from tests.schedules.strategies import blocks, slots, steps, thorough, unlike_sizes


@given(steps, slots)
@thorough
def test_blocks_of_one_step_are_revolve(steps: int, slots: int) -> None:
    assert list(Blocks(steps, 1, slots)) == list(Revolve(steps, slots))


@given(steps, slots, st.integers(0, 5))
@thorough
def test_a_single_block_holds_every_tape(steps: int, slots: int, more: int) -> None:
    assert list(Blocks(steps, max(1, steps + more), slots)) == list(StoreAll(steps))


@given(blocks())
@thorough
def test_holds_no_more_than_it_says(limited) -> None:
    schedule, _, _, sizes = limited
    held = simulate(schedule, schedule.steps, sizes=sizes).peak_memory
    assert held <= schedule.peak(sizes)


@given(unlike_sizes(), st.integers(1, 8), st.integers(2, 8), slots)
@thorough
def test_holds_just_what_it_says_where_all_blocks_are_equal(
    sizes: Sizes, block: int, number: int, slots: int
) -> None:
    schedule = Blocks(block * number, block, slots)
    assert simulate(schedule, schedule.steps, sizes=sizes).peak_memory == schedule.peak(sizes)


@pytest.mark.parametrize("sizes", [Sizes(1, 1, 0), Sizes(1, 3, 0), Sizes(2, 5, 2), Sizes(3, 4, 1)])
@pytest.mark.parametrize("room", [0, 1, 2, 3, 5, 8, 13, 30, 60])
@pytest.mark.parametrize("steps", [2, 3, 7, 20, 40])
def test_the_best_blocks_are_the_best_of_all_that_fit(steps: int, room: int, sizes: Sizes) -> None:
    every = [Blocks(steps, b, s) for b in range(2, steps + 1) for s in range(room + 1)]
    fit = [b.evaluations for b in every if b.peak(sizes) <= room]
    best = best_blocks(steps, room, sizes)
    assert min(fit, default=None) == (best.evaluations if best else None)


@pytest.mark.parametrize("steps", [0, 1])
def test_there_are_no_blocks_of_a_single_step(steps: int) -> None:
    assert best_blocks(steps, 100, Sizes()) is None


@given(st.integers(2, 3000), st.integers(0, 300), st.integers(0, 300), unlike_sizes())
@thorough
def test_more_room_never_costs_more(steps: int, room: int, more: int, sizes: Sizes) -> None:
    less = best_blocks(steps, room, sizes)
    best = best_blocks(steps, room + more, sizes)
    assert less is None or (best is not None and best.evaluations <= less.evaluations)
