from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remat.errors import BudgetTooSmallError
from remat.schedules import (
    Blocks,
    Disk,
    Mixed,
    Multistage,
    Revolve,
    ScheduleOption,
    Sizes,
    Tier,
    plan_loop,
    simulate,
)
from remat.schedules.choose import default_checkpoints
from tests.schedules.counting import recordings
from tests.schedules.strategies import disks, thorough

# ---- which class is chosen, and why


@pytest.mark.parametrize(
    ("steps", "options", "name", "why"),
    [
        (
            *(100, {"memory_bytes": "1GB", "state_bytes": "1MB", "tape_bytes": "3MB"}),
            *("all", "every tape fits, so no step runs twice: 1.00 evaluations a step"),
        ),
        (100, {"slots": 10}, "revolve", "the fewest evaluations for slots that hold states"),
        (
            *(6000, {"memory_bytes": "300MB", "state_bytes": "1MB", "tape_bytes": "3MB"}),
            *("blocks", "states at block starts and the tapes of one block at a time"),
        ),
        (
            *(1000, {"memory_bytes": "64MB", "state_bytes": "1MB", "tape_bytes": "3MB"}),
            *("mixed", "optimal for states and tapes"),
        ),
        (
            *(100, {"slots": 2, "disk": Disk(20, 0.5, 0.5)}),
            *("multistage", "the disk holds what memory cannot"),
        ),
        (100, {"slots": 2, "disk": Disk(20, 1e6, 1e6)}, "revolve", "the fewest evaluations"),
    ],
)
def test_chooses_and_says_why(steps: int, options: dict, name: str, why: str) -> None:
    plan = plan_loop(steps, **options)
    assert plan.name == plan.best.name == name
    assert plan.reason.startswith(why)
    assert "next is " + plan.alternatives[0].name in plan.reason


def test_says_that_the_bytes_of_a_tape_would_help() -> None:
    assert "with tape_bytes there may be better" in plan_loop(100, slots=10).reason
    tight = plan_loop(100, memory_bytes=110, state_bytes=1, tape_bytes=100)
    assert tight.name == "revolve"
    assert "tape_bytes" not in tight.reason


def test_a_loop_of_no_steps_has_nothing_to_run() -> None:
    plan = plan_loop(0, memory_bytes=0, state_bytes=8)
    assert plan.evaluations == 0
    assert "nothing to run" in plan.reason


def test_the_plan_of_the_documented_example() -> None:
    plan = plan_loop(1000, memory_bytes="64MB", state_bytes="1MB", tape_bytes="3MB")
    # 60 MB beside the working set of a state and a tape; the plan's own table may take of them
    least = Mixed(1000, 60, Sizes(1, 3, 0)).evaluations
    assert (plan.steps, plan.name) == (1000, "mixed")
    assert least <= plan.evaluations <= 1.01 * least
    assert plan.schedule is plan.best.schedule
    assert plan.peak_bytes == plan.best.peak_bytes <= 64_000_000


def test_slots_are_room_for_checkpoints_alone() -> None:
    assert plan_loop(1000, slots=30).schedule == Revolve(1000, 30)
    assert plan_loop(1000, slots=30, state_bytes=8).peak_bytes == 8 + 30 * 8


def test_memory_is_the_peak_of_the_whole_pass() -> None:
    tight = plan_loop(1000, memory_bytes=3000, state_bytes=100, working_bytes=500)
    assert tight.schedule == Revolve(1000, 25)


def test_a_tape_is_never_smaller_than_the_state_it_contains() -> None:
    plan = plan_loop(100, slots=10, state_bytes=10, tape_bytes=3)
    assert plan.best.sizes == Sizes(10, 10, 0)


def test_alternatives_are_sorted_by_cost_and_are_not_the_best_one() -> None:
    plan = plan_loop(
        *(500,), memory_bytes="60MB", state_bytes="1MB", tape_bytes="3MB", disk=Disk(5, 2.0, 2.0)
    )
    costs = [plan.best.cost, *(option.cost for option in plan.alternatives)]
    assert costs == sorted(costs)
    names = [plan.name, *(option.name for option in plan.alternatives)]
    assert sorted(names) == ["blocks", "mixed", "revolve", "staged", "uniform"]


def test_the_disk_programme_is_left_out_where_it_cannot_be_the_best() -> None:
    room = {"slots": 5, "state_bytes": 1, "tape_bytes": 2, "tape_input_bytes": 1}
    plan = plan_loop(100, **room, disk=Disk(20, 0.5, 0.5))
    assert "multistage" not in [option.name for option in options_of(plan)]
    assert plan.best.cost <= Multistage(100, 5, 20, 0.5, 0.5).cost


@given(
    st.integers(0, 60),
    st.integers(0, 20),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.none() | st.just(Disk(8, 0.5, 0.5)),
)
@thorough
def test_recordings_are_part_of_the_cost(
    steps: int, slots: int, cost: int, state: int, more: int, disk: Disk | None
) -> None:
    room = {"slots": slots, "state_bytes": state, "tape_bytes": state + more}
    plan = plan_loop(
        steps, **room, tape_input_bytes=state, recording_cost=cost, disk=disk, tolerance=0.02
    )
    for option in options_of(plan):
        work = simulate(option.schedule, steps)
        on_disk = work.reads[Tier.DISK] + work.writes[Tier.DISK]
        expected = work.evaluations + 0.5 * on_disk
        assert option.cost == expected + cost * recordings(option.schedule)


def test_only_a_plan_for_the_disk_asks_for_disk_slots() -> None:
    plan = plan_loop(100, slots=2, disk=Disk(20, 0.5, 0.5))
    assert plan.best.disk_slots == 20
    used = {option.name: option.disk_slots for option in plan.alternatives}
    assert used == {"staged": 18, "revolve": 0, "uniform": 0}


def test_a_loop_too_long_for_the_disk_programme_is_planned_without() -> None:
    plan = plan_loop(20_000, slots=20, disk=Disk(500, 0.0, 0.0))
    assert "multistage" not in [plan.name, *(option.name for option in plan.alternatives)]
    assert plan.name == "staged"


def test_a_plan_says_that_it_uses_few_of_the_disk_slots() -> None:
    plan = plan_loop(4000, slots=3, disk=Disk(4000, 500.0, 500.0))
    assert plan.name == "multistage"
    assert "of 4000 disk slots are planned" in plan.reason


def test_the_default_number_of_checkpoints_is_the_root() -> None:
    assert [default_checkpoints(n) for n in (0, 1, 99, 100, 1000)] == [0, 1, 9, 10, 31]


# ---- what is predicted is what is executed

loops = st.integers(0, 60)
# Why so large? Where a state is a few bytes, the table of the optimal schedule is not worth it.
MB = 10**6
budgets = st.integers(0, 6000 * MB)


@st.composite
def byte_sizes(draw: st.DrawFn) -> dict:
    state = draw(st.integers(1 * MB, 120 * MB))
    return {
        "state_bytes": state,
        "tape_bytes": draw(st.none() | st.integers(0, 500 * MB)),
        "tape_input_bytes": draw(st.sampled_from([0, state]) | st.integers(0, state)),
        "working_bytes": draw(st.integers(0, 300 * MB)),
    }


def a_tape_of(tape: int, *, state: int, shared: int = 0) -> dict:
    return {
        **{"state_bytes": state, "tape_bytes": tape, "tape_input_bytes": shared},
        "working_bytes": 0,
    }


def options_of(plan) -> list[ScheduleOption]:
    return [plan.best, *plan.alternatives]


@given(loops, budgets, byte_sizes(), st.none() | disks)
@thorough
def test_every_option_executes_what_it_predicts(
    steps: int, room: int, sizes: dict, disk: Disk | None
) -> None:
    plan = plan_loop(steps, memory_bytes=room + sizes["working_bytes"], disk=disk, **sizes)
    for option in options_of(plan):
        account = simulate(option.schedule, steps, sizes=option.sizes)
        assert account.evaluations == option.evaluations
        reads, writes = account.reads[Tier.DISK], account.writes[Tier.DISK]
        transfers = reads * disk.read_cost + writes * disk.write_cost if disk else 0
        assert option.cost == pytest.approx(option.evaluations + transfers)


@given(loops, budgets, byte_sizes(), st.none() | disks)
@example(102, 5040 * MB, a_tape_of(151 * MB, state=100 * MB, shared=100 * MB), None)
@example(27, 1288 * MB, a_tape_of(103 * MB, state=25 * MB, shared=25 * MB), None)
@thorough
def test_every_option_keeps_to_the_budget_and_to_its_predicted_peak(
    steps: int, room: int, sizes: dict, disk: Disk | None
) -> None:
    working = sizes["working_bytes"]
    for option in options_of(plan_loop(steps, memory_bytes=room + working, disk=disk, **sizes)):
        account = simulate(option.schedule, steps, sizes=option.sizes)
        assert account.peak_memory <= option.peak_bytes - working <= room
        assert account.peak_disk <= option.disk_slots * option.sizes.state


@given(loops, budgets, byte_sizes(), st.none() | disks)
@thorough
def test_the_best_is_the_cheapest(steps: int, room: int, sizes: dict, disk: Disk | None) -> None:
    plan = plan_loop(steps, memory_bytes=room + sizes["working_bytes"], disk=disk, **sizes)
    assert plan.best.cost == min(option.cost for option in options_of(plan))


# ---- more memory never predicts more time

tolerances = st.sampled_from([0.001, 0.01, 0.05, 0.1, 0.5, 2.0])


def plan_in(room: int, steps: int, sizes: dict, **options):
    return plan_loop(steps, memory_bytes=room + sizes["working_bytes"], **sizes, **options)


@given(loops, budgets, st.integers(0, 2000 * MB), byte_sizes(), st.none() | disks)
@thorough
def test_more_memory_never_predicts_more_time(
    steps: int, room: int, more: int, sizes: dict, disk: Disk | None
) -> None:
    less = plan_in(room, steps, sizes, disk=disk).best.cost
    assert plan_in(room + more, steps, sizes, disk=disk).best.cost <= less


@given(loops, budgets, st.integers(0, 2000 * MB), byte_sizes(), tolerances)
@example(60, 22_760 * MB, 1095 * MB, a_tape_of(1880 * MB, state=1114 * MB), 2.0)
@settings(thorough, max_examples=60)
def test_more_memory_never_predicts_more_time_with_a_tolerance(
    steps: int, room: int, more: int, sizes: dict, tolerance: float
) -> None:
    less = plan_in(room, steps, sizes, tolerance=tolerance).best.cost
    assert plan_in(room + more, steps, sizes, tolerance=tolerance).best.cost <= less


@given(st.integers(0, 30), budgets, st.integers(0, 2000 * MB), byte_sizes(), disks)
@settings(thorough, max_examples=60)
def test_more_memory_never_predicts_more_time_with_a_tolerance_and_a_disk(
    steps: int, room: int, more: int, sizes: dict, disk: Disk
) -> None:
    less = plan_in(room, steps, sizes, disk=disk, tolerance=0.1).best.cost
    assert plan_in(room + more, steps, sizes, disk=disk, tolerance=0.1).best.cost <= less


@given(st.integers(1000, 6000), st.integers(0, 200), st.integers(0, 200), st.integers(1, 3))
@settings(thorough, max_examples=8)
def test_more_memory_never_predicts_more_time_for_long_loops(
    steps: int, slots: int, more: int, tape: int
) -> None:
    def cost(slots: int) -> float:
        return plan_loop(steps, slots=slots, state_bytes=1, tape_bytes=tape).best.cost

    assert cost(slots + more) <= cost(slots)


@pytest.mark.parametrize("disk_slots", [100, 300, 10**9])
def test_more_disk_never_predicts_more_time(disk_slots: int) -> None:
    less = plan_loop(1000, slots=10, disk=Disk(20)).best.cost
    assert plan_loop(1000, slots=10, disk=Disk(disk_slots)).best.cost <= less


# ---- tolerance


@given(loops, budgets, byte_sizes(), st.none() | disks, tolerances)
@settings(thorough, max_examples=60)
def test_a_tolerance_buys_a_lower_peak_for_a_little_time(
    steps: int, room: int, sizes: dict, disk: Disk | None, tolerance: float
) -> None:
    best = plan_in(room, steps, sizes, disk=disk)
    thrifty = plan_in(room, steps, sizes, disk=disk, tolerance=tolerance)
    assert thrifty.best.cost <= best.best.cost * (1 + tolerance)
    assert thrifty.peak_bytes <= best.peak_bytes


def test_a_tolerance_is_worth_its_while() -> None:
    options = {"state_bytes": 100, "tape_bytes": 300, "memory_bytes": 20_000}
    best, thrifty = plan_loop(500, **options), plan_loop(500, **options, tolerance=0.1)
    assert best.evaluations < thrifty.evaluations <= 1.1 * best.evaluations
    assert thrifty.peak_bytes < 0.9 * best.peak_bytes


def test_with_a_tolerance_the_best_is_not_among_the_alternatives() -> None:
    options = {"state_bytes": 100, "tape_bytes": 300, "memory_bytes": 20_000}
    plan = plan_loop(500, **options, tolerance=0.1)
    assert plan.name not in [option.name for option in plan.alternatives]


# ---- bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1, "slots": 3}, "steps must be at least 0, got -1"),
        ({"slots": -3}, "slots must be at least 0, got -3"),
        ({}, "slots"),
        (
            {"state_bytes": 8},
            "give either slots or memory_bytes, got slots=None and memory_bytes=None",
        ),
        (
            {"slots": 3, "memory_bytes": 100, "state_bytes": 8},
            "give either slots or memory_bytes, got slots=3 and memory_bytes=100",
        ),
        ({"memory_bytes": 100}, "memory_bytes needs state_bytes"),
        ({"memory_bytes": -100, "state_bytes": 8}, "memory_bytes must be at least 0, got -100"),
        ({"memory_bytes": "lots", "state_bytes": 8}, "memory_bytes must be a number .* got 'lots'"),
        ({"memory_bytes": 100, "state_bytes": 0}, "state_bytes must be at least 1, got 0"),
        ({"memory_bytes": 100, "state_bytes": -8}, "state_bytes must be at least 0, got -8"),
        ({"slots": 3, "tape_bytes": -1}, "tape_bytes must be at least 0, got -1"),
        ({"slots": 3, "tape_input_bytes": -1}, "tape_input_bytes must be at least 0, got -1"),
        ({"slots": 3, "working_bytes": -1}, "working_bytes must be at least 0, got -1"),
        ({"slots": 3, "tolerance": -0.1}, "tolerance must be .* at least 0, got -0.1"),
        ({"slots": 3, "tolerance": float("nan")}, "tolerance must be .* at least 0, got nan"),
        ({"slots": 3, "tolerance": float("inf")}, "tolerance must be .* at least 0, got inf"),
        ({"slots": 3, "disk": Disk(-1)}, "disk_slots must be at least 0, got -1"),
        ({"slots": 3, "disk": Disk(2, -1.0)}, "write_cost must be a number .* got -1.0"),
        ({"slots": 3, "disk": Disk(2, 1.0, -1.0)}, "read_cost must be a number .* got -1.0"),
        ({"slots": 3, "disk": Disk(10**9, -1.0)}, "write_cost must be a number .* got -1.0"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_loop(**{"steps": 10} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 2.5, "slots": 3}, "steps must be a whole number, got 2.5"),
        ({"steps": True, "slots": 3}, "steps must be a whole number, got True"),
        ({"slots": 2.5}, "slots must be a whole number, got 2.5"),
        ({"slots": "3"}, "slots must be a whole number, got '3'"),
        (
            {"memory_bytes": 10.5, "state_bytes": 8},
            "memory_bytes must be bytes as an int or text .* got 10.5",
        ),
        (
            {"memory_bytes": 100, "state_bytes": 8.5},
            "state_bytes must be bytes as an int or text .* got 8.5",
        ),
        ({"slots": 3, "tape_bytes": 8.5}, "tape_bytes must be bytes as an int or text .* got 8.5"),
        (
            {"slots": 3, "tape_input_bytes": None},
            "tape_input_bytes must be bytes as an int or text .* got None",
        ),
        (
            {"slots": 3, "working_bytes": True},
            "working_bytes must be bytes as an int or text .* got True",
        ),
        ({"slots": 3, "tolerance": "0.1"}, "tolerance"),
        ({"slots": 3, "disk": Disk(2.5)}, "disk_slots must be a whole number, got 2.5"),
        ({"slots": 3, "disk": Disk("2")}, "slots must be a whole number, got '2'"),
        ({"slots": 3, "disk": Disk(2, "1")}, "write_cost"),
        ({"slots": 3, "disk": 5}, "disk"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        plan_loop(**{"steps": 10} | options)


def test_a_budget_below_one_step_says_what_is_needed() -> None:
    with pytest.raises(
        BudgetTooSmallError,
        match=r"needs 4.0 MB .* the budget is 3.0 MB; raise memory_bytes to at least 4000000",
    ):
        plan_loop(1000, memory_bytes="3MB", state_bytes="1MB", tape_bytes="3MB")


def test_a_budget_of_just_one_step_is_enough() -> None:
    plan = plan_loop(20, memory_bytes=4, state_bytes=1, tape_bytes=3)
    assert plan.evaluations == 20 * 21 // 2
    assert plan.peak_bytes == 4


def test_blocks_are_no_option_where_no_tape_fits() -> None:
    plan = plan_loop(20, memory_bytes=5, state_bytes=1, tape_bytes=3)
    assert not any(isinstance(option.schedule, Blocks) for option in options_of(plan))


def test_a_plan_shows_itself() -> None:
    plan = plan_loop(1000, slots=31)
    assert repr(plan) == (
        "<LoopPlan: 1,000 steps by revolve, 3,405 evaluations, peak 32 states; "
        "alternatives: uniform>"
    )
    assert "peak 0 states; alternatives" not in repr(plan_loop(1, slots=0, state_bytes=1000))
    page = ElementTree.fromstring(f"<p>{plan._repr_html_()}</p>")
    rows = [[cell.text for cell in row] for row in page.iter("tr")]
    assert rows[0] == ["schedule", "evaluations", "per step", "cost", "peak"]
    assert rows[1] == ["* revolve", "3,405", "3.40", "3,405", "32 states"]
    assert len(rows) == 3
    assert plan.reason in "".join(page.itertext())


def test_slots_that_are_not_planned_are_said() -> None:
    plan = plan_loop(2000, slots=60, state_bytes=1, tape_bytes=2)
    assert plan.best.name == "mixed"
    assert "only 50 of 60 slots are planned: more would take too long" in plan.reason
    assert "slots are planned" not in plan_loop(2000, slots=40, state_bytes=1, tape_bytes=2).reason
