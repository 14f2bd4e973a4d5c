"""The whole curve of peak memory against time of a recorded pass."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Plan
from .search import search_of
from .trace import Trace

__all__ = ["FrontierCurve", "FrontierPoint", "frontier"]

_POINTS = 20
_FREE, _DEAREST = 0.02, 1.0  # of a plain pass: seconds that nobody notices, and that nobody wants


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A budget that pays: with fewer bytes, recomputation takes longer."""

    peak_bytes: int
    extra_seconds: float
    plan: Plan


@dataclass(frozen=True, slots=True)
class FrontierCurve:
    """Peak bytes against seconds of recomputation; the fewest bytes first."""

    points: tuple[FrontierPoint, ...]
    plain_peak_bytes: int
    plain_seconds: float  # of forward and backward

    @property
    def knee(self) -> FrontierPoint:
        """The point from which on less memory costs much more time.

        Points that cost nothing to speak of (2 % of a plain pass) are one point, the one with the
        fewest bytes; points that more than double the time do not count. Of the rest it is the one
        that lies furthest below the line between the two ends: bytes against seconds.
        """
        free = next(p for p in self.points if self._is_cheap(p, _FREE) or p is self.points[-1])
        first = next(p for p in self.points if self._is_cheap(p, _DEAREST) or p is free)
        width = max(1, free.peak_bytes - first.peak_bytes)
        height = (first.extra_seconds - free.extra_seconds) or 1.0

        def height_above_corner(point: FrontierPoint) -> float:
            across = (point.peak_bytes - first.peak_bytes) / width
            return across + (point.extra_seconds - free.extra_seconds) / height

        between = self.points[self.points.index(first) : self.points.index(free) + 1]
        return min(between, key=height_above_corner)

    def _is_cheap(self, point: FrontierPoint, share: float) -> bool:
        return point.extra_seconds <= share * self.plain_seconds


def frontier(trace: Trace) -> FrontierCurve:
    """Return the curve of peak memory against time of a recorded pass, for all budgets.

    >>> from remat.plans import Kind, Op, Trace, Value, frontier
    >>> values = [Value(8, kind=Kind.INPUT)]
    >>> values += [Value(8, made_by=i, freed_after=i + 1) for i in range(9)] + [Value(8, made_by=9)]
    >>> ops = [Op("sin", (i,), (i + 1,), 0.5, saves=(i,)) for i in range(10)]
    >>> curve = frontier(Trace(tuple(ops), tuple(values)))
    >>> [(point.peak_bytes, point.extra_seconds) for point in curve.points][-3:]
    [(64, 1.0), (72, 0.5), (80, 0.0)]
    >>> curve.knee.plan
    Plan(keeps 4 values, 4 stages, peak 40 B, 2.5 s extra)
    """
    search = search_of(trace)
    least, most = search.smallest_budget, search.plain.peak_bytes
    for n in range(_POINTS + 1):
        search.best(least + (most - least) * n // _POINTS)
    points = [FrontierPoint(plan.peak_bytes, plan.extra_seconds, plan) for plan in search.plans]
    return FrontierCurve(tuple(points), most, trace.seconds + trace.backward_seconds)
