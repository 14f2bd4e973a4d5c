"""Drops values when a pass that nobody has planned yet outgrows its budget: the cheapest first."""

from __future__ import annotations

import math
from weakref import ref

from ..plans.eviction import cheapest_first, ops_again
from .engine import Engine
from .meter import Meter
from .records import Op, Value
from .retention import drop, is_available

__all__ = ["Evictor"]

_SLACK = 0.9  # of the limit, down to which values are dropped at a time


class Evictor:
    """Holds what autograd saves as long as there is room, then drops what is cheapest to redo."""

    def __init__(self, meter: Meter, engine: Engine) -> None:
        self._meter = meter
        self._engine = engine
        self._kept: dict[ref[Value], int] = {}  # bytes
        self._seconds: dict[int, float] = {}  # by the numbers of ops

    def ran(self, number: int, seconds: float) -> None:
        self._seconds[number] = seconds

    def keeps(self, value: Value, nbytes: int) -> None:
        """Note a value that is held and could be dropped."""
        if nbytes:  # to drop an empty tensor frees nothing
            self._kept[ref(value)] = nbytes

    def shrink(self, limit: int) -> None:
        """Drop values until the pass holds less than the limit, if it holds more."""
        if self._meter.live <= limit:
            return
        candidates = []
        for reference, nbytes in list(self._kept.items()):
            value = reference()
            if value is None or value.op is None:
                del self._kept[reference]
            elif value.tensor() is None:  # or the program holds it, and to drop it frees nothing
                least = self._seconds.get(value.op.number, 0.0) / nbytes
                candidates.append((_rounded(least), reference))
        for reference in cheapest_first(candidates, self._price):
            del self._kept[reference]
            if (value := reference()) is not None:
                drop(value)
            if self._meter.live <= limit * _SLACK:
                break

    def _price(self, reference: ref[Value]) -> float:
        """Return the seconds per byte to compute a value from what is held."""
        value = reference()
        if value is None:
            return 0.0
        recorded: dict[int, Op] = {}

        def maker(value: Value) -> int:
            if value.op is None:
                return -1
            recorded[value.op.number] = value.op
            return value.op.number

        def reads(number: int) -> list[Value]:
            return recorded[number].reads if number >= 0 else []

        ops = ops_again([value], maker, reads, self._has)
        seconds = sum(self._seconds.get(number, 0.0) for number in ops)
        return _rounded(seconds / self._kept[reference])

    def _has(self, value: Value) -> bool:
        """Return whether a value need not be computed."""
        return is_available(value, self._engine) or any(
            holder.tensor is not None for holder in value.living_holders()
        )


def _rounded(price: float) -> float:
    """Round to a power of two: seconds of a first pass say no more, and what is oldest goes first.

    Backward comes to that last, so that what it recomputes is spread over its stages.
    """
    return 2.0 ** round(math.log2(price)) if price > 0 else 0.0
