"""What a pass did, as plain data that planners can work on.

A `Value` is the content of a piece of memory between two writes; views of it are not values of
their own, and an in-place op makes a new value of the same memory. An `Op` reads values and makes
values. A `Trace` is a list of each, with what a backward pass needs of them. Ops and values are
named by their numbers: their positions in the lists.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from enum import Enum

from .order import backward_order

__all__ = ["Kind", "Op", "Trace", "Value"]


class Kind(Enum):
    """Where a value comes from, and whether it can be computed again."""

    PARAMETER = "parameter"  # belongs to the caller: always there, not counted
    INPUT = "input"  # belongs to the caller, too
    COMPUTED = "computed"
    FIXED = "fixed"  # computed, but not again: opaque, read by control flow, a collective

    @property
    def is_external(self) -> bool:
        """Whether it belongs to the caller."""
        return self is Kind.PARAMETER or self is Kind.INPUT


@dataclass(frozen=True, slots=True)
class Value:
    """The content of a piece of memory: its bytes, and the op that wrote it."""

    nbytes: int
    made_by: int | None = None  # the number of an op; None if it comes from outside
    overwrites: int | None = None  # the value that was in the same memory before, if any
    kind: Kind = Kind.COMPUTED
    requires_grad: bool = False  # it has a gradient of as many bytes
    # The op after which the program alone, without what autograd saves, would free it; None if it
    # outlives the forward pass, as an output does.
    freed_after: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """A call: values in, values out, and the seconds that it took."""

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float
    place: str = ""  # the line of the program
    module: str = ""  # the path of the module
    saves: tuple[int, ...] = ()  # what autograd saves for its backward: of `reads` and `makes`
    backward_seconds: float = 0.0
    workspace_bytes: int = 0  # that its backward takes besides saved values and gradients


@dataclass(frozen=True, slots=True)
class Trace:
    """Ops in the order they ran, the values they are about, and what a backward pass needs.

    `used` are the numbers of the ops whose backward asked for saved values, in the order in which
    it did, as far as it has come; without it, backward goes through the ops in reverse.

    >>> values = (
    ...     Value(8, kind=Kind.INPUT),
    ...     Value(8, made_by=0, freed_after=1),
    ...     Value(8, made_by=1),
    ... )
    >>> ops = (Op("exp", (0,), (1,), 1e-6, saves=(1,)), Op("sin", (1,), (2,), 1e-6, saves=(1,)))
    >>> trace = Trace(ops, values)
    >>> trace.saved, trace.saved_bytes, trace.seconds
    ((1,), 8, 2e-06)
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    used: tuple[int, ...] = ()
    _plain_peak: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def saved(self) -> tuple[int, ...]:
        """The values that autograd saves, each once, in the order it saves them."""
        return tuple(dict.fromkeys(number for op in self.ops for number in op.saves))

    @property
    def saved_bytes(self) -> int:
        """The bytes that a plain pass keeps of what it made: every value once."""
        values = (self.values[number] for number in self.saved)
        return sum(value.nbytes for value in values if not value.kind.is_external)

    @property
    def seconds(self) -> float:
        """The time of all ops together, forward."""
        return sum(op.seconds for op in self.ops)

    @property
    def backward_seconds(self) -> float:
        """The time of the backward of all ops together."""
        return sum(op.backward_seconds for op in self.ops)

    @property
    def backward_order(self) -> tuple[int, ...]:
        """The ops that have a backward, in the order in which it runs."""
        return backward_order(self)

    @property
    def plain_peak(self) -> int:
        """The most bytes that a pass without checkpointing holds at a time."""
        from .simulate import simulate_plain  # noqa: PLC0415  # it reads traces

        if self._plain_peak is None:  # once: it is asked for in every pass
            object.__setattr__(self, "_plain_peak", simulate_plain(self).peak_bytes)
        assert self._plain_peak is not None
        return self._plain_peak

    @property
    def signature(self) -> str:
        """The same text for passes that do the same: names, structure and bytes, not seconds."""
        ops = [(op.name, op.reads, op.makes, op.saves) for op in self.ops]
        values = [
            (value.nbytes, value.made_by, value.overwrites, value.kind.value, value.requires_grad)
            for value in self.values
        ]
        return hashlib.sha256(repr((ops, values)).encode()).hexdigest()[:32]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, as JSON."""
        from .files import save_trace  # noqa: PLC0415  # it makes traces

        save_trace(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace from a file that `save` wrote; a ValueError says what is wrong with it."""
        from .files import load_trace  # noqa: PLC0415  # it makes traces

        return load_trace(path)

    def __repr__(self) -> str:
        return (
            f"Trace({len(self.ops)} ops, {len(self.values)} values, "
            f"{len(self.saved)} saved: {self.saved_bytes} bytes)"
        )
