from itertools import pairwise

import pytest
from hypothesis import given

from remat.schedules import (
    Backward,
    Revolve,
    compute_checkpoint_positions,
    estimate_checkpoint_savings,
    get_memory_savings,
    should_checkpoint,
    simulate,
)
from tests.schedules import strategies, theory
from tests.schedules.brute import fewest_evaluations

SCHEDULES = ["uniform", "revolve"]


def test_positions_of_the_documented_example() -> None:
    positions = compute_checkpoint_positions(1000, 31)
    assert positions[:4] == [31, 62, 93, 124]
    assert len(positions) == 31


@given(strategies.steps, strategies.slots)
@strategies.thorough
def test_uniform_segments_differ_by_at_most_one(steps: int, slots: int) -> None:
    edges = [0, *compute_checkpoint_positions(steps, slots), steps]
    segments = [stop - start for start, stop in pairwise(edges)]
    assert max(segments) - min(segments) <= 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("slots", range(12))
def test_there_are_as_many_positions_as_checkpoints(slots: int, schedule: str) -> None:
    for steps in range(slots + 2, 60):
        positions = compute_checkpoint_positions(steps, slots, schedule)
        assert len(positions) == slots
        assert positions == sorted(set(positions))
        assert set(positions) <= set(range(1, steps))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("number", [9, 10, 11, 1000])
def test_enough_checkpoints_hold_every_state(number: int, schedule: str) -> None:
    assert compute_checkpoint_positions(10, number, schedule) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_initial_state_is_the_callers_and_has_no_position(schedule: str) -> None:
    assert compute_checkpoint_positions(5, 10, schedule) == [1, 2, 3, 4]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "number"), [(0, 0), (0, 5), (1, 0), (1, 5), (2, 0), (1000, 0)])
def test_no_positions_where_there_are_none(steps: int, number: int, schedule: str) -> None:
    assert compute_checkpoint_positions(steps, number, schedule) == []


@pytest.mark.parametrize("slots", range(1, 21))
def test_revolve_positions_let_its_count_be_reached(slots: int) -> None:
    for steps in range(slots + 2, 201, 3):
        edges = [0, *compute_checkpoint_positions(steps, slots, "revolve"), steps]
        parts = [stop - start for start, stop in pairwise(edges)]
        # The first sweep, then each part with the slots that are free by then and its own start.
        advances = edges[-2] + sum(theory.t(p, slots - i + 1) for i, p in enumerate(parts))
        assert advances + steps == theory.revolve(steps, slots)


@pytest.mark.parametrize("slots", range(1, 4))
@pytest.mark.parametrize("steps", range(5, 10))
def test_no_positions_are_better_than_those_of_revolve(steps: int, slots: int) -> None:
    placed = compute_checkpoint_positions(steps, slots, "revolve")
    way_back = fewest_evaluations(steps, slots, tapes=False, placed=placed, working=placed[-1])
    assert placed[-1] + way_back == fewest_evaluations(steps, slots, tapes=False)


@given(strategies.steps, strategies.slots)
@strategies.thorough
def test_revolve_positions_are_those_of_its_first_sweep(steps: int, slots: int) -> None:
    sweep = []
    for action in Revolve(steps, slots):
        if isinstance(action, Backward):
            break
        sweep.append(action)
    saved = {action.step for action in sweep if hasattr(action, "step")}
    assert saved <= set(compute_checkpoint_positions(steps, slots, "revolve"))


@pytest.mark.parametrize(
    ("steps", "checkpoints", "percent"),
    [(100, 10, 90.0), (500, 22, 95.6), (1000, 31, 96.9), (5000, 70, 98.6)],
)
def test_savings_of_the_documented_lengths(steps: int, checkpoints: int, percent: float) -> None:
    savings = get_memory_savings(steps)
    assert savings["num_checkpoints"] == checkpoints
    assert round(savings["savings_percent"], 1) == percent
    assert savings["without_checkpointing"] == steps
    assert savings["with_checkpointing"] == checkpoints
    assert round(savings["savings_ratio"], 3) == round(percent / 100, 3)


def test_segment_length_of_the_documented_length() -> None:
    assert round(get_memory_savings(1000)["segment_length"], 1) == 32.3


@pytest.mark.parametrize(("steps", "number"), [(1, 0), (10, 3), (100, None), (500, 22), (50, 49)])
def test_the_recomputation_factor_is_what_is_executed(steps: int, number: int | None) -> None:
    savings = get_memory_savings(steps, number)
    slots = savings["num_checkpoints"]
    executed = simulate(Revolve(steps, slots), steps, memory=slots).evaluations
    assert savings["recomputation_factor"] == executed / steps - 1


def test_a_given_number_of_checkpoints_is_used() -> None:
    assert get_memory_savings(1000, 50)["savings_percent"] == 95.0


def test_more_checkpoints_than_states_are_not_counted() -> None:
    assert get_memory_savings(10, 50)["num_checkpoints"] == 9


def test_savings_without_checkpoints() -> None:
    savings = get_memory_savings(8, 0)
    assert savings["savings_percent"] == 100
    assert savings["savings_ratio"] == 1
    assert savings["segment_length"] == 8
    assert savings["recomputation_factor"] == 36 / 8 - 1


def test_a_loop_of_no_steps_saves_nothing() -> None:
    assert get_memory_savings(0) == {
        "without_checkpointing": 0,
        "with_checkpointing": 0,
        "savings_percent": 0.0,
        "savings_ratio": 0.0,
        "num_checkpoints": 0,
        "segment_length": 0.0,
        "recomputation_factor": 0.0,
    }


@pytest.mark.parametrize("number", [None, 0, 1, 7])
def test_a_loop_of_one_step_saves_nothing(number: int | None) -> None:
    assert get_memory_savings(1, number) == {
        "without_checkpointing": 1,
        "with_checkpointing": 1,
        "savings_percent": 0.0,
        "savings_ratio": 0.0,
        "num_checkpoints": 0,
        "segment_length": 1.0,
        "recomputation_factor": 0.0,
    }


@given(strategies.steps, strategies.slots)
def test_the_ratio_is_the_share_saved(steps: int, slots: int) -> None:
    savings = get_memory_savings(steps, slots)
    held = savings["without_checkpointing"] * (1 - savings["savings_ratio"])
    assert held == pytest.approx(savings["with_checkpointing"])
    assert savings["savings_percent"] == pytest.approx(100 * savings["savings_ratio"])


def test_the_second_name_gives_the_same() -> None:
    assert estimate_checkpoint_savings(1000) == get_memory_savings(1000)


@pytest.mark.parametrize(
    ("steps", "threshold", "worth_it"),
    [
        (0, 0.0, False),
        (1, 0.0, False),
        (2, 0.5, True),
        (2, 0.51, False),
        (100, 0.9, True),
        (100, 0.91, False),
        (1000, 0.5, True),
        (1000, 1, False),
        (1000, 0, True),
    ],
)
def test_should_checkpoint(steps: int, threshold: float, worth_it: bool) -> None:
    assert should_checkpoint(steps, threshold) is worth_it


def test_by_default_half_of_the_states_must_be_saved() -> None:
    assert should_checkpoint(2) is True
    assert should_checkpoint(1) is False


@pytest.mark.parametrize("value", [2.5, 10.0, True, "10", None], ids=repr)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda v: compute_checkpoint_positions(v, 3), "seq_length"),
        (lambda v: compute_checkpoint_positions(10, v), "num_checkpoints"),
        (lambda v: get_memory_savings(v), "seq_length"),  # noqa: PLW0108  (as the others)
        (lambda v: should_checkpoint(v), "seq_length"),  # noqa: PLW0108
    ],
)
def test_what_is_no_whole_number_is_refused_by_name(call, name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a whole number, got {value!r}"):
        call(value)


@pytest.mark.parametrize("value", [2.5, True, "10"], ids=repr)
def test_a_number_of_checkpoints_that_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=f"num_checkpoints must be a whole number, got {value!r}"):
        get_memory_savings(10, value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compute_checkpoint_positions(-1, 3), "seq_length must be at least 0, got -1"),
        (
            lambda: compute_checkpoint_positions(10, -3),
            "num_checkpoints must be at least 0, got -3",
        ),
        (lambda: get_memory_savings(-1), "seq_length must be at least 0, got -1"),
        (lambda: get_memory_savings(10, -3), "num_checkpoints must be at least 0, got -3"),
        (lambda: should_checkpoint(-1), "seq_length must be at least 0, got -1"),
        (lambda: should_checkpoint(10, -0.1), "threshold must be a fraction .* got -0.1"),
        (lambda: should_checkpoint(10, 50), "threshold must be a fraction .* got 50"),
        (lambda: should_checkpoint(10, float("nan")), "threshold must be a fraction .* got nan"),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("threshold", [True, "0.5", None], ids=repr)
def test_a_threshold_that_is_no_number_is_refused(threshold: object) -> None:
    with pytest.raises(TypeError, match=f"threshold must be a fraction .* got {threshold!r}"):
        should_checkpoint(10, threshold)


@pytest.mark.parametrize("number", [3, 50], ids=["few", "more than enough"])
def test_an_unknown_schedule_is_refused(number: int) -> None:
    with pytest.raises(
        ValueError, match="schedule must be one of 'uniform', 'revolve', got 'binary'"
    ):
        compute_checkpoint_positions(10, number, "binary")
