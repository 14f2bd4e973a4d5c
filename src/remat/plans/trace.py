"""What a forward pass did, as plain data that planners can work on.

A `Value` is the content of a piece of memory between two writes; views of it are not values of
their own, and an in-place op makes a new value of the same memory. An `Op` reads values and makes
values. A `Trace` is a list of each, with what a backward pass needs of them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Op", "Trace", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """The content of a piece of memory: its bytes, and the op that wrote it."""

    nbytes: int
    made_by: int | None = None  # the number of an op; None if it comes from outside
    overwrites: int | None = None  # the value that was in the same memory before, if any
    fixed: bool = False  # it cannot be computed again, or belongs to somebody else


@dataclass(frozen=True, slots=True)
class Op:
    """A call: values in, values out, and the seconds that it took."""

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float
    place: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Ops in the order they ran, the values they are about, and what a backward pass needs.

    `saved` are the values that autograd keeps for the way back, in the order it saved them;
    `used` is the order in which a backward pass asked for them, as far as it has come.

    >>> values = (Value(8), Value(8, made_by=0), Value(8, made_by=1))
    >>> ops = (Op("exp", (0,), (1,), 1e-6), Op("sin", (1,), (2,), 1e-6))
    >>> trace = Trace(ops, values, saved=(1,))
    >>> trace.saved_bytes, trace.seconds
    (8, 2e-06)
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    saved: tuple[int, ...] = ()
    used: tuple[int, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """The bytes that a plain pass keeps of what it made: every value once."""
        made = {number for number in self.saved if self.values[number].made_by is not None}
        return sum(self.values[number].nbytes for number in made)

    @property
    def seconds(self) -> float:
        """The time of all ops together."""
        return sum(op.seconds for op in self.ops)
