"""Schedules of users: checked before they run, and run as they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch

import remat
from remat.schedules import (
    Action,
    Advance,
    Backward,
    Drop,
    Given,
    IllegalMoveError,
    Multistage,
    Restore,
    Save,
    Tape,
    Tier,
)

from .both import both


@dataclass
class Listed:
    """A schedule as a user writes one."""

    steps: int
    actions: Iterable[Action]
    evaluations: int = 0

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)


def expected(x: float, steps: int) -> tuple[float, float]:
    """Return the value and the derivative of `steps` sines of x."""
    gradient = 1.0
    for _ in range(steps):
        x, gradient = math.sin(x), gradient * math.cos(x)
    return x, gradient


def value_and_grad(on, schedule, steps: int = 10, **options) -> tuple[float, float]:
    def loss(x):
        final, _ = remat.checkpointed_loop(on.sin, x, steps, schedule=schedule, **options)
        return on.sum(final)

    value, (gradient,) = on.value_and_grad(loss, [0.5])
    return value, gradient


BACK = [action for step in range(8, -1, -1) for action in (Restore(0, Tier.CALLER), Backward(step))]


@both
@pytest.mark.parametrize(
    ("actions", "why"),
    [
        ([Advance(0, 9), Backward(9)], "stops with steps 0 to 8 still ahead"),
        ([Advance(0, 9), Backward(9), Backward(0)], r"action 2, .*: the next step back is 8"),
        ([Advance(0, 8), Backward(8)], "action 1, .*: the next step back is 9"),
        ([Advance(0, 9), Backward(9), *BACK], "neither its tape nor the state"),
        ([Advance(0, 10)], "stops with steps 0 to 9"),
        ([Advance(0, 4), Save(3)], "action 1, .*: the working state is at 4"),
        ([Advance(0, 2.5), Advance(2.5, 9), Backward(9)], "must be whole numbers"),
        ([Advance(0, 9), ("Backward", 9)], "this is no action"),
        ([Advance(0, 9), 7], "this is no action"),
        ([Save(0), *map(Tape, range(10)), *map(Backward, range(9, 0, -1))], "steps 0 to 0 still"),
        ([], "stops with steps 0 to 9"),
    ],
)
def test_a_schedule_that_skips_steps_is_refused(on, actions, why: str) -> None:
    with pytest.raises(ValueError, match=f"schedule must go back through every step.*{why}"):
        value_and_grad(on, Listed(10, actions))
    with pytest.raises(ValueError, match="schedule must go back through every step"):
        remat.checkpointed_loop(on.sin, on.array([0.5]), 10, schedule=Listed(10, actions))


@both
def test_a_schedule_of_a_user_is_run(on) -> None:
    runs = []

    def step(x):
        runs.append(1)
        return on.sin(x)

    actions = [Advance(0, 1), Save(1), Tape(1), Tape(2), Backward(2), Backward(1), Backward(0)]

    def loss(x):
        final, held = remat.checkpointed_loop(step, x, 3, schedule=Listed(3, actions))
        assert list(held) in ([1], [])
        return on.sum(final)

    value, (gradient,) = on.value_and_grad(loss, [0.5])
    assert (value, gradient) == pytest.approx(expected(0.5, 3), rel=1e-12)
    assert len(runs) == 4


@both
def test_a_detour_before_backward_changes_nothing(on) -> None:
    """It goes back to the beginning first, as no good schedule does."""
    actions = [
        *(Advance(0, 2), Save(2), Advance(2, 3), Save(3), Drop(3)),
        *(Restore(0, Tier.CALLER), Advance(0, 1), Save(1), Restore(2), Tape(2)),
        *(Backward(2), Backward(1), Backward(0)),
    ]
    schedule = Listed(3, actions)
    assert value_and_grad(on, schedule, 3) == pytest.approx(expected(0.5, 3), rel=1e-12)
    final, held = remat.checkpointed_loop(on.sin, on.array([0.5]), 3, schedule=schedule)
    assert float(final[0]) == pytest.approx(expected(0.5, 3)[0], rel=1e-12)
    assert list(held) in ([1], [2])


@both
def test_a_schedule_that_can_be_iterated_only_once_never_gives_a_gradient(on) -> None:
    once = Listed(4, iter([Advance(0, 3), *map(Backward, [3])]))
    with pytest.raises(ValueError, match="steps 0 to 2 still ahead"):
        value_and_grad(on, once, 4)
    once = Listed(4, iter(list(Given(4, (2,)))))
    with pytest.raises(IllegalMoveError, match="same actions every time"):
        value_and_grad(on, once, 4)
    once = Listed(4, iter(list(Given(4, (2,)))))
    with pytest.raises(IllegalMoveError, match="same actions every time"):
        remat.checkpointed_loop(on.sin, on.array([0.5]), 4, schedule=once)


class Forgetful:
    """A schedule that ends early, or leaves steps out, from its second iteration on."""

    steps, evaluations = 6, 12

    def __init__(self, leave_out: slice) -> None:
        self.iterated, self.leave_out = 0, leave_out

    def __iter__(self) -> Iterator[Action]:
        self.iterated += 1
        actions = list(Given(6, (2, 4)))
        if self.iterated > 1:
            del actions[self.leave_out]
        return iter(actions)


@both
@pytest.mark.parametrize("leave_out", [slice(-1, None), slice(-2, -1), slice(-3, None)])
def test_a_schedule_that_changes_never_gives_a_gradient(on, leave_out: slice) -> None:
    if leave_out == slice(-1, None) and on.sin is torch.sin:  # goes back through 0 and 1 at once
        found = value_and_grad(on, Forgetful(leave_out), 6)
        assert found == pytest.approx(expected(0.5, 6), rel=1e-12)
        return
    with pytest.raises(IllegalMoveError, match="same actions every time"):
        value_and_grad(on, Forgetful(leave_out), 6)


@both
def test_disk_slots_of_a_schedule_are_on_disk(on, tmp_path) -> None:
    schedule = Multistage(12, 1, 3, write_cost=0.1, read_cost=0.1)
    assert any(isinstance(action, Save) and action.tier is Tier.DISK for action in schedule)
    with pytest.raises(ValueError, match=r'store must be "disk" or a DiskStore, got MemoryStore'):
        value_and_grad(on, schedule, 12)
    store = remat.DiskStore(tmp_path)
    found = value_and_grad(on, schedule, 12, store=store)
    assert found == pytest.approx(expected(0.5, 12), rel=1e-12)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("room", [{"num_checkpoints": 3}, {"memory_budget": "1MB"}])
def test_a_schedule_says_itself_what_is_held(room) -> None:
    with pytest.raises(ValueError, match=f"schedule says what is held: leave {next(iter(room))}"):
        remat.checkpointed_loop(abs, 1.0, 4, schedule=Given(4, (2,)), **room)


def test_what_is_no_schedule_is_refused() -> None:
    for wrong in (list(Given(4, (2,))), None, 7, Given):
        with pytest.raises((TypeError, ValueError), match="schedule must be one of 'auto'"):
            remat.checkpointed_loop(abs, 1.0, 4, schedule=wrong)
    with pytest.raises(ValueError, match="got 'revlove'; did you mean 'revolve'"):
        remat.checkpointed_loop(abs, 1.0, 4, schedule="revlove")
    with pytest.raises(TypeError, match=r"schedule.steps must be a whole number, got 4.0"):
        remat.checkpointed_loop(abs, 1.0, 4, schedule=Listed(4.0, []))
