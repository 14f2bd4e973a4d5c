"""From what a user asks of a loop, and what a step turned out to take, to the schedule to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ..errors import BudgetTooSmallError
from ..schedules import (
    Action,
    Advance,
    Revolve,
    Save,
    Schedule,
    StoreAll,
    Uniform,
    compute_checkpoint_positions,
    plan_loop,
)
from ..schedules.check import whole_number
from ..schedules.choose import default_checkpoints
from ..sizes import format_bytes, parse_budget

__all__ = ["Budget", "LoopOptions", "Measured", "ScheduleName"]

ScheduleName = Literal["auto", "revolve", "uniform", "all"]
Budget = int | float | str

# Up to 2 % more forward work is accepted for a lower peak: the last percents are dear.
_TOLERANCE = 0.02


class Measured(NamedTuple):
    """What one recorded step takes."""

    state_bytes: int
    tape_bytes: int  # with the step's input and output
    working_bytes: int  # what a pass needs beside its checkpoints


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """What a user asked of a loop, checked."""

    steps: int
    num_checkpoints: int | None
    memory_budget: Budget | None
    schedule: ScheduleName

    def __post_init__(self) -> None:
        whole_number(self.steps, "seq_length")
        if self.num_checkpoints is not None:
            whole_number(self.num_checkpoints, "num_checkpoints")
        check_budget(self.num_checkpoints, self.memory_budget)
        if self.schedule not in get_args(ScheduleName):
            names = ", ".join(map(repr, get_args(ScheduleName)))
            raise ValueError(f"schedule is one of {names}, got {self.schedule!r}")

    @property
    def needs_measuring(self) -> bool:
        return self.steps > 0 and (self.schedule == "auto" or self.memory_budget is not None)

    @property
    def slots(self) -> int:
        if self.num_checkpoints is None:
            return default_checkpoints(self.steps)
        return self.num_checkpoints

    def choose(self, measured: Measured | None) -> Schedule:
        """Return the schedule to differentiate by."""
        if self.memory_budget is not None and measured is not None:
            return self._within_budget(measured)
        if self.schedule == "auto" and measured is not None:
            state, tape, _ = measured
            return plan_loop(
                self.steps,
                slots=self.slots,
                state_bytes=state,
                tape_bytes=tape,
                tape_input_bytes=state,
                tolerance=_TOLERANCE,
            ).schedule
        return self._fixed(self.slots)

    def sweep(self, state_bytes: int) -> Iterator[Action]:
        """Generate the way ahead of a loop that nobody differentiates: hold states, end at n."""
        slots = self.slots
        if self.memory_budget is not None:
            whole = self.steps * state_bytes
            slots = parse_budget(self.memory_budget, whole=whole) // state_bytes
        if self.schedule == "all":
            slots = self.steps
        placed: Literal["revolve", "uniform"] = (
            "revolve" if self.schedule == "revolve" else "uniform"
        )
        at = 0
        for position in compute_checkpoint_positions(self.steps, slots, placed):
            yield Advance(at, position)
            yield Save(position)
            at = position
        if at < self.steps:
            yield Advance(at, self.steps)

    def _within_budget(self, measured: Measured) -> Schedule:
        state, tape, working = measured
        budget = parse_memory(self.memory_budget, self.steps, measured)
        everything = working + (self.steps - 1) * (tape - state)
        if self.schedule == "auto" and everything <= budget:
            return StoreAll(self.steps)
        if self.schedule == "auto":
            table = 4 * (self.steps + 1) * (budget // state + 1)  # of the exact programme
            exact = table <= budget // 10
            return plan_loop(
                self.steps,
                memory_bytes=budget,
                state_bytes=state,
                tape_bytes=tape,
                tape_input_bytes=state,
                working_bytes=min(budget, working + table * exact),
                exact=exact,
            ).schedule
        if self.schedule == "all" and everything > budget:
            raise BudgetTooSmallError(
                f'schedule="all" holds {format_bytes(everything)} for {self.steps} steps, the '
                f'budget is {format_bytes(budget)}; raise it or use schedule="auto"'
            )
        return self._fixed(max(0, budget - working) // state)

    def _fixed(self, slots: int) -> Schedule:
        if self.schedule == "all":
            return StoreAll(self.steps)
        if self.schedule == "uniform":
            return Uniform(self.steps, slots)
        return Revolve(self.steps, slots)


def check_budget(num_checkpoints: int | None, memory_budget: Budget | None) -> None:
    if num_checkpoints is not None and memory_budget is not None:
        raise ValueError(
            "give either num_checkpoints or memory_budget, got "
            f"num_checkpoints={num_checkpoints!r} and memory_budget={memory_budget!r}"
        )
    if memory_budget is not None:
        parse_budget(memory_budget, whole=1)


def parse_memory(budget: Budget | None, steps: int, measured: Measured) -> int:
    """Return a budget in bytes, and say so if not even one step fits into it."""
    state, tape, working = measured
    assert budget is not None
    size = parse_budget(budget, whole=working + max(0, steps - 1) * (tape - state))
    if size < working:
        raise BudgetTooSmallError(
            f"going back through one step alone needs {format_bytes(working)}, the budget is "
            f"{format_bytes(size)}; raise memory_budget to at least {format_bytes(working)}"
        )
    return size
