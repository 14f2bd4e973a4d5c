"""The actions of a schedule, which a runner carries out: small immutable values.

The runner has one *working state*. Positions count states: state k is the state before step k,
so step k leads from state k to state k + 1. A run starts with the working state at 0 and is over
when it has gone back through every step, from the last to step 0.

The actions are tuples for speed (a schedule of a million steps makes three million of them), but
unlike bare tuples they are equal only to actions of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

__all__ = [
    "Action",
    "Advance",
    "Backward",
    "Drop",
    "Restore",
    "Save",
    "Schedule",
    "Sizes",
    "Tape",
    "Tier",
]


class Tier(Enum):
    """Where a state is held."""

    CALLER = "caller"  # the initial state: it belongs to the caller and takes no slot
    MEMORY = "memory"
    DISK = "disk"
    TAPE = "tape"  # the output that the held tape of the step before contains

    def __repr__(self) -> str:
        return self.name


T = TypeVar("T", bound=type)


def _kind_matters(cls: T) -> T:
    """Make a tuple type equal only to its own kind."""

    def equal(self: object, other: object) -> bool:
        return type(self) is type(other) and bool(tuple.__eq__(self, other))  # type: ignore[operator]

    def unequal(self: object, other: object) -> bool:
        return not equal(self, other)

    def digest(self: object) -> int:
        return hash((cls.__name__, tuple.__hash__(self)))  # type: ignore[arg-type]

    cls.__eq__ = equal  # type: ignore[assignment]
    cls.__ne__ = unequal  # type: ignore[assignment]
    cls.__hash__ = digest  # type: ignore[assignment]
    return cls


@_kind_matters
class Advance(NamedTuple):
    """Run the steps from `start` to `stop - 1` and keep nothing of them."""

    start: int
    stop: int


@_kind_matters
class Save(NamedTuple):
    """Hold the working state, which is before `step`, in a slot of `tier`."""

    step: int
    tier: Tier = Tier.MEMORY


@_kind_matters
class Restore(NamedTuple):
    """Make the held state before `step` the working state; it stays held."""

    step: int
    tier: Tier = Tier.MEMORY


@_kind_matters
class Drop(NamedTuple):
    """Free the slot that holds the state before `step`."""

    step: int
    tier: Tier = Tier.MEMORY


@_kind_matters
class Tape(NamedTuple):
    """Run `step` and hold its tape, which contains the step's output, in memory.

    It runs from the working state, or from whatever holds the state before it. A slot that holds
    that state is freed: with the tape held, it is not needed any more.
    """

    step: int


@_kind_matters
class Backward(NamedTuple):
    """Go back through `step`, and free whatever was held for it: its tape, the state before it.

    Without a held tape the step is run once more, from the working state or from whatever holds
    the state before it, with a tape that lives just for this action.
    """

    step: int


Action = Advance | Save | Restore | Drop | Tape | Backward


class Sizes(NamedTuple):
    """What a held state and a held tape cost, in any unit (bytes, slots).

    A tape contains its step's output. `tape_input` of its bytes are its step's input: where that
    state is held anyway (by a slot, by the tape before, by the caller), they are not paid twice.
    """

    state: int = 1
    tape: int = 1
    tape_input: int = 0


@runtime_checkable
class Schedule(Protocol):
    """Actions that reverse a loop of `steps` steps; iterate it as often as you like."""

    @property
    def steps(self) -> int: ...

    @property
    def evaluations(self) -> int:
        """How often a step is run in all, with or without a tape."""
        ...

    def __iter__(self) -> Iterator[Action]: ...
