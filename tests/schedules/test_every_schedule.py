"""What all schedules have in common: legal, counted right, re-iterable, lazy."""

import inspect
import sys
import tracemalloc
from collections import deque
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.schedules import (
    Backward,
    Blocks,
    Given,
    Mixed,
    Multistage,
    Online,
    Revolve,
    Schedule,
    Sizes,
    Staged,
    StoreAll,
    Uniform,
    simulate,
)
from tests.schedules.counting import recordings
from tests.schedules.strategies import (
    Limited,
    any_schedule,
    blocks,
    in_memory,
    staged,
    thorough,
)

LONG = [
    Revolve(50_000, 20),
    Uniform(50_000, 20),
    StoreAll(50_000),
    Blocks(50_000, block=20, slots=20),
    Given(50_000, tuple(range(100, 50_000, 100))),
    Mixed(50_000, 20),
    Mixed(1_000, 30, Sizes(1, 2, 1)),
    Multistage(1_000, slots=5, disk_slots=20),
    Staged(50_000, part=400, block=20, slots=5),
    Online(20).run(20_000),
]


@given(any_schedule)
@thorough
def test_runs_as_many_evaluations_as_predicted_in_the_room_it_was_given(limited: Limited) -> None:
    schedule, memory, disk, sizes = limited
    account = simulate(
        schedule, schedule.steps, memory=memory, disk=disk * sizes.state, sizes=sizes
    )
    assert account.evaluations == schedule.evaluations


@given(in_memory)
@thorough
def test_never_needs_more_than_no_slots_at_all(limited: Limited) -> None:
    steps = limited.schedule.steps
    # Why + steps? The end of an online loop shows only when its last step has run.
    assert steps <= limited.schedule.evaluations <= steps * (steps + 1) // 2 + steps


@given(any_schedule)
@thorough
def test_gives_the_same_actions_each_time(limited: Limited) -> None:
    schedule = limited.schedule
    assert list(schedule) == list(schedule)


@given(any_schedule)
@thorough
def test_two_iterations_do_not_disturb_each_other(limited: Limited) -> None:
    assert all(a == b for a, b in zip(limited.schedule, limited.schedule, strict=True))


@pytest.mark.parametrize("schedule", LONG, ids=repr)
def test_is_a_schedule(schedule: Schedule) -> None:
    assert isinstance(schedule, Schedule)
    assert isinstance(iter(schedule), Iterator)


@pytest.mark.parametrize("schedule", LONG, ids=repr)
def test_has_no_recursion_that_grows_with_the_steps(schedule: Schedule) -> None:
    next(iter(schedule))  # imports and tables are not what is tested
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 60)
    try:
        (last,) = deque(schedule, maxlen=1)
    finally:
        sys.setrecursionlimit(limit)
    assert last == Backward(0)


@pytest.mark.parametrize(
    "schedule",
    [
        Revolve(60_000, 30),
        Revolve(30_000, 2),
        Uniform(30_000, 30),
        StoreAll(30_000),
        Blocks(30_000, block=20, slots=30),
        Given(30_000, tuple(range(1000, 30_000, 1000))),
        Mixed(30_000, 30),
        Staged(30_000, part=400, block=20, slots=5),
        Online(30).run(10_000),
    ],
    ids=repr,
)
def test_keeps_no_list_of_its_actions(schedule: Schedule) -> None:
    next(iter(schedule))
    tracemalloc.start()
    try:
        deque(schedule, maxlen=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 500_000


@pytest.mark.parametrize(
    "schedule",
    [
        Revolve(10**9, 30),
        Revolve(10**9, 0),
        Revolve(10**9, 1),
        Uniform(10**9, 30),
        StoreAll(10**9),
        Blocks(10**9, block=1000, slots=30),
        Given(10**9, (10**8, 5 * 10**8)),
        Mixed(10**9, 30),
        Staged(10**9, part=10**6, block=1000, slots=30),
        Online(30).run(10**9),
    ],
    ids=repr,
)
def test_starts_at_once_however_long_it_is(schedule: Schedule) -> None:
    assert len(list(islice(schedule, 5))) == 5


@pytest.mark.parametrize(
    "schedule",
    [
        Revolve(0, 3),
        Uniform(0, 3),
        StoreAll(0),
        Blocks(0, 2, 3),
        Given(0, ()),
        Mixed(0, 3),
        Mixed(0, 3, Sizes(1, 2, 0)),
        Multistage(0, 3, 3),
        Staged(0, 3, 2, 1),
        Online(3).run(0),
    ],
    ids=repr,
)
def test_a_loop_of_no_steps_has_no_actions(schedule: Schedule) -> None:
    assert list(schedule) == []
    assert schedule.evaluations == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Revolve(-1, 3), "steps must be at least 0, got -1"),
        (lambda: Revolve(5, -2), "slots must be at least 0, got -2"),
        (lambda: Uniform(-1, 3), "steps must be at least 0, got -1"),
        (lambda: Uniform(5, -2), "slots must be at least 0, got -2"),
        (lambda: StoreAll(-3), "steps must be at least 0, got -3"),
        (lambda: Blocks(-1, 2, 3), "steps must be at least 0, got -1"),
        (lambda: Blocks(5, 0, 3), "block must be at least 1, got 0"),
        (lambda: Blocks(5, 2, -1), "slots must be at least 0, got -1"),
        (lambda: Given(-1, ()), "steps must be at least 0, got -1"),
        (lambda: Given(5, (0, 2)), "a position must be at least 1, got 0"),
        (lambda: Given(5, (2, 2)), r"positions must rise and lie before the end, 5, got \(2, 2"),
        (lambda: Given(5, (3, 5)), r"positions must rise and lie before the end, 5, got \(3, 5"),
        (lambda: Given(0, (1,)), r"positions must rise and lie before the end, 0, got \(1"),
        (lambda: Mixed(-1, 3), "steps must be at least 0, got -1"),
        (lambda: Mixed(5, -3), "room must be at least 0, got -3"),
        (lambda: Mixed(5, 3, recording_cost=-1), "recording_cost must be at least 0, got -1"),
        (lambda: Mixed(5, 3, recording_cost=2**30), "at most 1,073,741,823 for all 5 steps"),
        (lambda: Mixed(5, 3, Sizes(0, 1, 0)), "sizes.state must be at least 1, got 0"),
        (lambda: Mixed(5, 3, Sizes(3, 2, 0)), "sizes.tape must be at least 3, got 2"),
        (lambda: Mixed(5, 3, Sizes(3, 4, -1)), "sizes.tape_input must be at least 0, got -1"),
        (lambda: Mixed(5, 3, Sizes(2, 4, 3)), "sizes.tape_input must be a part of the tape"),
        (lambda: Mixed(5, 3, Sizes(2, 2, 2)), "sizes.tape_input must be a part of the tape"),
        (lambda: Multistage(-1, 1, 1), "steps must be at least 0, got -1"),
        (lambda: Multistage(5, -1, 1), "slots must be at least 0, got -1"),
        (lambda: Multistage(5, 1, -1), "disk_slots must be at least 0, got -1"),
        (lambda: Multistage(5, 1, 1, -0.5), "write_cost must be a number .* got -0.5"),
        (lambda: Multistage(5, 1, 1, 1, float("nan")), "read_cost must be a number .* got nan"),
        (lambda: Multistage(5, 1, 1, float("inf")), "write_cost must be a number .* got inf"),
        (lambda: Online(-1), "slots must be at least 0, got -1"),
        (lambda: Online(2).run(-1), "steps must be at least 0, got -1"),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("value", [2.0, True, "5", None], ids=repr)
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda v: Revolve(v, 3), "steps"),
        (lambda v: Revolve(5, v), "slots"),
        (lambda v: Uniform(v, 3), "steps"),
        (StoreAll, "steps"),
        (lambda v: Blocks(5, v, 3), "block"),
        (lambda v: Given(v, ()), "steps"),
        (lambda v: Given(5, (v,)), "a position"),
        (lambda v: Mixed(5, v), "room"),
        (lambda v: Multistage(5, 1, v), "disk_slots"),
        (Online, "slots"),
        (lambda v: Online(2).run(v), "steps"),
    ],
)
def test_what_is_no_whole_number_is_refused_by_name(build, name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a whole number, got {value!r}"):
        build(value)


@pytest.mark.parametrize("value", ["1", None], ids=repr)
@pytest.mark.parametrize("name", ["write_cost", "read_cost"])
def test_a_disk_cost_that_is_no_number_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        Multistage(5, 1, 1, **{name: value})


@given(st.one_of(blocks(), staged()))
@thorough
def test_blocks_make_as_many_recordings_as_they_say(limited: Limited) -> None:
    assert recordings(limited.schedule) == limited.schedule.recordings
