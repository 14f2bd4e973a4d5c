"""Which values to drop when a pass that nobody has planned yet outgrows its budget.

As in DTR (Kirisame et al. 2021): the value whose recomputation costs least per byte and per time
since it was last used. The cost counts the ops that lead to it from values still held.
"""

from __future__ import annotations

from weakref import ref

from .engine import Engine
from .meter import Meter
from .records import Value
from .retention import drop, is_available

__all__ = ["Evictor"]

_SLACK = 0.9  # of the limit, down to which values are dropped at a time


class Evictor:
    """Holds what autograd saves as long as there is room, then drops what is cheapest to redo."""

    def __init__(self, meter: Meter, engine: Engine) -> None:
        self._meter = meter
        self._engine = engine
        self._kept: dict[ref[Value], tuple[int, int]] = {}  # bytes, and the op that used it last
        self._seconds: dict[int, float] = {}  # by the numbers of ops
        self._now = 0

    def ran(self, number: int, seconds: float) -> None:
        self._seconds[number] = seconds
        self._now = number

    def keeps(self, value: Value, nbytes: int) -> None:
        """Note a value that is held and could be dropped."""
        if nbytes:  # to drop an empty tensor frees nothing
            self._kept[ref(value)] = nbytes, self._now

    def shrink(self, limit: int) -> None:
        """Drop values until the pass holds less than the limit, if it holds more."""
        if self._meter.live <= limit:
            return
        aim = limit * _SLACK
        costs: dict[Value, float] = {}
        candidates = []
        for reference, (nbytes, used) in list(self._kept.items()):
            value = reference()
            if value is None or value.op is None:
                del self._kept[reference]
            elif value.tensor() is None:  # or the program holds it, and to drop it frees nothing
                age = self._now - used + 1
                candidates.append((self._cost(value, costs) / (nbytes * age), used, reference))
        for _, _, reference in sorted(candidates, key=lambda c: c[:2]):
            if self._meter.live <= aim:
                break
            del self._kept[reference]
            if (value := reference()) is not None:
                drop(value)

    def _cost(self, value: Value, costs: dict[Value, float]) -> float:
        """Return the seconds that it takes to compute a value from what is held.

        Ops that lead to several of its inputs are counted for each: this is an estimate.
        """
        stack = [value]
        while stack:
            top = stack[-1]
            op = top.op
            if op is None:
                costs[top] = 0.0
                stack.pop()
                continue
            missing = [read for read in op.reads if read not in costs and not self._has(read)]
            if missing:
                stack += missing
                continue
            reads = sum(costs.get(read, 0.0) for read in op.reads if not self._has(read))
            costs[top] = self._seconds.get(op.number, 0.0) + reads
            stack.pop()
        return costs[value]

    def _has(self, value: Value) -> bool:
        """Return whether a value need not be computed."""
        return is_available(value, self._engine) or any(
            holder.tensor is not None for holder in value.living_holders()
        )
