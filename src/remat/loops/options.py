"""From the options of a loop and the measured sizes of a step to the schedule to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from ..errors import BudgetTooSmallError
from ..schedules import (
    Action,
    Advance,
    Backward,
    Blocks,
    Disk,
    Drop,
    Given,
    IllegalMoveError,
    Mixed,
    Multistage,
    Restore,
    Revolve,
    Save,
    Schedule,
    ScheduleCost,
    Staged,
    StoreAll,
    Tape,
    Tier,
    Uniform,
    compute_checkpoint_positions,
    plan_loop,
    simulate,
)
from ..schedules.check import one_of, whole_number
from ..schedules.choose import default_checkpoints
from ..sizes import format_bytes, parse_budget
from ..stores import DiskStore, MemoryStore, Store

__all__ = ["LoopOptions", "Measured", "MemorySize", "ScheduleName"]

ScheduleName = Literal["auto", "revolve", "uniform", "all"]
MemorySize = int | float | str

# Up to 2 % more forward work is accepted for a lower peak: the last percents are dear.
_TOLERANCE = 0.02


class Measured(NamedTuple):
    """What one recorded step takes."""

    state_bytes: int  # as it is held
    tape_bytes: int  # with the step's input and output
    working_bytes: int  # what a pass needs beside its checkpoints
    input_bytes: int = 0  # of a step, on its tape; 0: as many as those of a state that is held
    recording_cost: int = 0  # of one call of autograd, in steps, for any number of tapes
    unseen_bytes: int = 0  # that other tapes may take beyond those that were measured

    def to_plan_with(self, nbytes: int) -> Measured:
        """Return what to plan with, for states that take `nbytes` in their store."""
        tape = self.tape_bytes + self.unseen_bytes
        return self._replace(state_bytes=nbytes, tape_bytes=tape, input_bytes=self.state_bytes)


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """What a user asked of a loop, checked."""

    steps: int
    num_checkpoints: int | None
    memory_budget: MemorySize | None
    schedule: ScheduleName | Schedule  # a schedule: to be run as it is, whatever a step takes
    store: Store = field(default_factory=MemoryStore)
    _is_on_disk: bool = field(default=False, init=False)  # whether a given schedule uses disk slots

    def __post_init__(self) -> None:
        whole_number(self.steps, "seq_length")
        if self.num_checkpoints is not None:
            whole_number(self.num_checkpoints, "num_checkpoints")
        check_budget(self.num_checkpoints, self.memory_budget)
        if isinstance(self.schedule, Schedule) and not isinstance(self.schedule, type):
            self._check_given(self.schedule)
            return
        one_of(self.schedule, "schedule", get_args(ScheduleName), other=", or a schedule object")
        if self.schedule == "all" and not isinstance(self.store, MemoryStore):
            raise ValueError(
                f'schedule="all" holds tapes, which stay in memory, and no states; store is '
                f'{self.store!r}: leave it out, or use schedule="auto"'
            )

    def _check_given(self, schedule: Schedule) -> None:
        """Refuse a schedule that does not go back through every step of this loop."""
        for name in ("num_checkpoints", "memory_budget"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"schedule says what is held: leave {name} out, got {getattr(self, name)!r}"
                )
        steps = whole_number(schedule.steps, "schedule.steps")
        if steps != self.steps:
            raise ValueError(f"schedule must be for {self.steps} steps, got one for {steps}")
        try:
            own = type(schedule) in _OWN
            account = _simulated(schedule) if own else simulate(schedule, steps)  # type: ignore[arg-type]
        except IllegalMoveError as error:
            raise ValueError(
                f"schedule must go back through every step from the last to the first: {error}; "
                "remat.schedules.simulate checks one"
            ) from error
        on_disk = account.writes[Tier.DISK] > 0
        if on_disk and not isinstance(self.store, DiskStore):
            raise ValueError(
                'schedule holds states on disk (Tier.DISK), so store must be "disk" or a '
                f"DiskStore, got {self.store!r}"
            )
        object.__setattr__(self, "_is_on_disk", on_disk)

    @property
    def is_planned(self) -> bool:
        """Whether the schedule was given, with the positions of its checkpoints."""
        return isinstance(self.schedule, Schedule)

    @property
    def has_two_tiers(self) -> bool:
        """Whether states are held in memory and on disk; a fixed schedule has all on disk.

        A given schedule says it itself.
        """
        if self.is_planned:
            return self._is_on_disk
        return isinstance(self.store, DiskStore) and self.schedule == "auto"

    @property
    def needs_measuring(self) -> bool:
        if self.is_planned:
            return False
        return self.steps > 0 and (self.schedule == "auto" or self.memory_budget is not None)

    @property
    def slots(self) -> int:
        if self.num_checkpoints is None:
            return default_checkpoints(self.steps)
        return self.num_checkpoints

    def room(self, measured: Measured) -> int:
        """Return the bytes that checkpoints and tapes may take in memory."""
        if self.memory_budget is not None:
            return parse_memory(self.memory_budget, self.steps, measured)
        return self.slots * measured.state_bytes

    def choose(self, measured: Measured | None, disk: Disk | None = None) -> Schedule:
        """Return the schedule to differentiate by."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        if self.memory_budget is not None and measured is not None:
            return self._within_budget(measured, disk)
        if self.schedule == "auto" and measured is not None:
            return _plan(
                self.steps,
                slots=self.slots,
                state_bytes=measured.state_bytes,
                tape_bytes=measured.tape_bytes,
                tape_input_bytes=measured.input_bytes or measured.state_bytes,
                tolerance=0.0 if disk else _TOLERANCE,
                disk=disk,
                recording_cost=measured.recording_cost,
            )
        return self._fixed(self.slots)

    def sweep(self, state_bytes: int) -> Iterator[Action]:
        """Generate the actions of a loop without gradients: hold states, end at the last step."""
        if isinstance(self.schedule, Schedule):
            yield from _forward_actions(self.schedule)
            return
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

    def _within_budget(self, measured: Measured, disk: Disk | None) -> Schedule:
        state, tape, working, given, recording_cost, _ = measured
        budget = parse_memory(self.memory_budget, self.steps, measured)
        everything = working + (self.steps - 1) * (tape - (given or state))
        if self.schedule == "auto" and everything <= budget:
            return StoreAll(self.steps)
        if self.schedule == "auto":
            # Of the exact dynamic program.
            table = (8 if recording_cost else 4) * (self.steps + 1) * (budget // state + 1)
            exact = table <= budget // 10
            return _plan(
                self.steps,
                memory_bytes=budget,
                state_bytes=state,
                tape_bytes=tape,
                tape_input_bytes=given or state,
                working_bytes=min(budget, working + table * exact),
                exact=exact,
                disk=disk,
                recording_cost=recording_cost,
            )
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


def _forward_actions(schedule: Schedule) -> Iterator[Action]:
    """Generate what a schedule does before backward, without tapes: each step runs once.

    What it does after it has gone back to an earlier state is left out.
    """
    at, reached = 0, 0
    held: set[tuple[int, Tier]] = set()
    for action in schedule:
        match action:
            case Advance(_, stop):
                at = stop
            case Tape(step) | Backward(step):
                at = step + 1
            case Restore(step):
                at = step
            case Save(step, tier) if step == reached:
                held.add((step, tier))
                yield action
            case Drop(step, tier) if (step, tier) in held:
                held.remove((step, tier))
                yield action
        if at > reached:
            yield Advance(reached, at)
            reached = at
        if isinstance(action, Backward):
            return


# Immutable, so that they are simulated once.
_OWN = (Blocks, Given, Mixed, Multistage, Revolve, Staged, StoreAll, Uniform)


@lru_cache(maxsize=32)
def _simulated(schedule: Schedule) -> ScheduleCost:
    return simulate(schedule, schedule.steps)


@lru_cache(maxsize=32)
def _plan(steps: int, **room: Any) -> Schedule:
    """Plan a loop; one that is run repeatedly, as in training, is planned once."""
    return plan_loop(steps, **room).schedule


def check_budget(num_checkpoints: int | None, memory_budget: MemorySize | None) -> None:
    if num_checkpoints is not None and memory_budget is not None:
        raise ValueError(
            "give either num_checkpoints or memory_budget, got "
            f"num_checkpoints={num_checkpoints!r} and memory_budget={memory_budget!r}"
        )
    if memory_budget is not None:
        parse_budget(memory_budget, whole=1)


def parse_memory(budget: MemorySize | None, steps: int, measured: Measured) -> int:
    """Return a budget in bytes, and say so if not even one step fits into it."""
    state, tape, working, given, *_ = measured
    assert budget is not None
    size = parse_budget(budget, whole=working + max(0, steps - 1) * (tape - (given or state)))
    if size < working:
        raise BudgetTooSmallError(
            f"backward through one step alone needs {format_bytes(working)}, the budget is "
            f"{format_bytes(size)} (memory_budget={budget!r}); pass memory_budget={working} or more"
        )
    return size
