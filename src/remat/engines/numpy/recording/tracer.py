"""Records what a pass does, as a `Trace` for planners.

Views are no values of their own: what reads a view reads the value whose memory it is in.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from ....core.tracing import Key
from ....plans.trace import Kind, Trace
from ....plans.trace import Op as TracedOp
from ....plans.trace import Value as TracedValue
from ..array_function import memory_of
from ..source_location import location_of_caller
from .constants import Constant, constants_in
from .records import Value
from .region import drop

__all__ = ["Tracer"]

_WORKSPACE = 2  # arrays of the size of the largest operand that a rule computes on its way


class Tracer:
    """Numbers the ops and values of a pass; holds none of the arrays."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.seconds: list[float] = []
        self.numbered: list[weakref.ref[Value]] = []
        self._ops: list[TracedOp] = []
        self._values: list[TracedValue] = []
        self._freed: dict[int, int] = {}
        self._deaths: list[weakref.ref[Any]] = []
        self._last = time.perf_counter()
        self._pinned: set[int] = set()
        self._late: set[int] = set()  # that only a plan has held until the end of forward
        self._ends_forward = False
        self.is_forward = True

    def __len__(self) -> int:
        return len(self._ops)

    def ran(self, value: Value, array: Any, needs: list[Value]) -> int:
        """Note the op that made a value; return its number. A view is no op."""
        now = time.perf_counter()
        seconds, op = now - self._last, value.op
        if value.base is not None:
            return max(len(self._ops) - 1, 0)
        number = len(self._ops)
        reads = op.reads if op is not None else ()
        name = op.name if op is not None else "opaque"
        self._add(
            value,
            TracedValue(
                value.nbytes,
                number,
                kind=Kind.COMPUTED if op is not None and value.held is None else Kind.FIXED,
                requires_grad=True,
                name=value.name,
            ),
        )
        self._await_death(value.number, array)
        numbers = tuple(dict.fromkeys(self.number(read) for read in reads))
        saves = tuple(dict.fromkeys(self.number(need) for need in needs))
        largest = max([value.nbytes, *(self._values[read].nbytes for read in numbers)])
        self._ops.append(
            TracedOp(
                name,
                numbers,
                (value.number,),
                seconds,
                place=f"{name}, {location_of_caller()}",
                saves=saves,
                workspace_bytes=_WORKSPACE * largest,
            )
        )
        self.keys.append((name, tuple(read.shape for read in reads), value.nbytes))
        self.seconds.append(seconds)
        return number

    def went_on(self) -> None:
        """The time since the last op was ours."""
        self._last = time.perf_counter()

    def number(self, value: Value) -> int:
        """Return the number of the value whose memory a value is in."""
        while value.base is not None:
            value = value.base
        if not self._knows(value):
            self._add(value, TracedValue(value.nbytes, kind=Kind.INPUT, requires_grad=True))
        return value.number

    def pin(self, value: Value) -> None:
        """No plan drops this value."""
        number = self.number(value)
        if self._values[number].made_by is not None:
            self._pinned.add(number)

    def _knows(self, value: Value) -> bool:
        known = 0 <= value.number < len(self.numbered)
        return known and self.numbered[value.number]() is value

    def _add(self, value: Value, traced: TracedValue) -> None:
        value.number = len(self._values)
        self._values.append(traced)
        self.numbered.append(weakref.ref(value))

    def _await_death(self, number: int, array: Any) -> None:
        owner = memory_of(array)
        try:
            self._deaths.append(weakref.ref(owner, partial(_died, weakref.ref(self), number)))
        except TypeError:  # a number, or a list of arrays
            self._freed[number] = len(self._ops)  # the op that is being noted

    def died(self, number: int) -> None:
        if self.is_forward:
            self._freed[number] = max(len(self._ops) - 1, 0)
        elif self._ends_forward:
            self._late.add(number)

    def let_go(self, held: list[Value]) -> None:
        """Drop what a plan has held that is not followed: the program has freed it long ago."""
        self._ends_forward = True
        for value in held:
            drop(value)
        self._ends_forward = False
        for number in self._late:
            reads = [i for i, op in enumerate(self._ops) if number in op.reads]
            self._freed[number] = max([*reads, self._values[number].made_by or 0])

    def living(self, numbers: Iterable[int]) -> list[Value]:
        """Return the values with these numbers, without those that are gone and plain arrays."""
        known = len(self.numbered)
        found = (self.numbered[number]() for number in numbers if number < known)
        return [value for value in found if value is not None]

    def trace(self, needed: set[int], backward_share: float = 0.0) -> Trace:
        """Return all of it. `needed` are the ops that backward may come to.

        The backward of an op takes `backward_share` of its forward.
        """
        values = [
            replace(
                value,
                kind=Kind.FIXED if number in self._pinned else value.kind,
                freed_after=self._freed.get(number),
            )
            for number, value in enumerate(self._values)
        ]
        ops = [
            replace(
                op,
                backward_seconds=op.seconds * backward_share,
                saves=op.saves if number in needed else (),
            )
            for number, op in enumerate(self._ops)
        ]
        for number, constant in self._plain_arrays():
            ops[number] = replace(
                ops[number],
                makes=(*ops[number].makes, len(values)),
                saves=(*ops[number].saves, len(values)),
            )
            nbytes, kind = constant.nbytes, Kind.FIXED
            values.append(TracedValue(nbytes, number, kind=kind, freed_after=number, name="plain"))
        return Trace(tuple(ops), tuple(values))

    def _plain_arrays(self) -> list[tuple[int, Constant]]:
        """Return the plain arrays that only the recording holds, with the first op that reads each.

        What the program holds, too, belongs to it and is no part of a budget.
        """
        found: dict[int, tuple[int, Constant]] = {}
        for value in self.living(range(len(self.numbered))):
            made_by = self._values[value.number].made_by
            if made_by is not None and value.op is not None:
                for constant in constants_in([value.op.args, value.op.keywords]):
                    found.setdefault(id(constant), (made_by, constant))
        return [(made_by, constant) for made_by, constant in found.values() if constant.is_alone]


def _died(tracer: weakref.ref[Tracer], number: int, _: Any) -> None:
    tracing = tracer()
    if tracing is not None:
        tracing.died(number)
