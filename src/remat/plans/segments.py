"""The best way to cut a trace into segments, for every budget at once.

Segments are taken from the end: with `need` bytes for what comes at and after a cut, the rest costs
so many seconds. An option that keeps k bytes, needs n itself and stands before a rest that needs m
needs max(n, k + m). All numbers are exact; only how many points a curve may have is limited.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .facts import Facts
from .long_segments import LongSegments
from .options import Choices, Option, SegmentOptions, best_points
from .plan import Plan, Stage
from .recursion import Groups

__all__ = ["Curve", "Segments", "choose_cuts"]

_MOST_CUTS = 144
_POINTS = 512  # of a curve
_MOST_SOLVED = 240  # different segments that are looked at closely, about
_JOINED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)  # how many parts are looked at closely together
_JOINED_OPS = 64


class Curve:
    """Seconds of recomputation against bytes, and the segments of each point."""

    def __init__(self, table: _Table, cuts: list[int]) -> None:
        self._table = table
        self._cuts = cuts
        points = zip(table.needs[0].tolist(), table.seconds[0].tolist(), strict=True)
        # The (bytes, seconds) that no other point beats, the fewest bytes first.
        self.points: list[tuple[int, float]] = list(points)

    def place(self, budget: int) -> int:
        """Return the number of the point for a budget, or -1."""
        return bisect_right(self.points, (budget, math.inf)) - 1

    def plan(self, number: int) -> Plan:
        """Return the plan of a point."""
        keep: set[int] = set()
        stages: list[Stage] = []
        for start, option in self._table.walk(number):
            keep.update(option.keep)
            stages += option.stages or [Stage(self._cuts[start])]
        return Plan(frozenset(keep), tuple(stages))


def choose_cuts(facts: Facts) -> list[int]:
    """Return the ops before which few bytes cross, the first and the end included."""
    score = _crossing_score(facts)
    inner = [c for c in range(1, facts.count) if _is_low(score, c)]
    if len(inner) > _MOST_CUTS:
        window = math.ceil(facts.count / _MOST_CUTS)
        best: dict[int, int] = {}
        for c in inner:
            other = best.get(c // window)
            if other is None or score[c] < score[other]:
                best[c // window] = c
        inner = list(best.values())
    return [0, *inner, facts.count]


def _crossing_score(facts: Facts) -> list[int]:
    """Return the bytes that cross each cut; what backward does not use anyway counts twice."""
    change = [0] * (facts.count + 1)
    for value, readers in enumerate(facts.readers):
        last = max(readers[-1:] + facts.users[value][-1:], default=-1)
        if not facts.is_external[value] and last > facts.made_by[value]:
            weight = facts.nbytes[value] * (1 if facts.users[value] else 2)
            change[facts.made_by[value] + 1] += weight
            change[last + 1] -= weight
    return np.cumsum(change).tolist()  # type: ignore[no-any-return]


def _is_low(score: list[int], cut: int) -> bool:
    return score[cut] <= score[cut - 1] and score[cut] <= score[cut + 1]


class Segments:
    """Finds what segments can do: short ones in many ways, long ones as a whole."""

    def __init__(self, facts: Facts, cuts: list[int]) -> None:
        self.cuts = cuts
        self._facts = facts
        self._options = SegmentOptions(facts)
        self._long = LongSegments(facts, cuts)
        for start, stop in pairwise(cuts):
            self._options.find(start, stop)
        # Where all parts are different, fewer of them are looked at together.
        most = max(2, _MOST_SOLVED // max(1, self._options.solved))
        self._joined = _JOINED[:most]

    @functools.cached_property
    def curve(self) -> Curve:
        """The best of all ways to cut a trace at some of the cuts."""
        return self._solve(lambda start: ())

    def curve_with_rounds(self) -> Curve:
        """Return the same where segments may run again in rounds, which small budgets need."""
        return self._solve(Groups(self._facts, self.cuts, self._options, self._long).starts)

    def _solve(self, more: Callable[[int], Iterable[tuple[int, Choices]]]) -> Curve:
        table = _Table(self.cuts, self._facts.trace.saved_bytes)
        for start in range(len(self.cuts) - 2, -1, -1):
            table.close(start, [*self._choices_from(start), *more(start)])
        return Curve(table, self.cuts)

    def _choices_from(self, start: int) -> Iterator[tuple[int, Choices]]:
        """Yield what can be done with the segments that begin at a cut, and where they end."""
        cuts, first = self.cuts, self.cuts[start]
        for size in self._joined:
            stop = start + size
            if stop < len(cuts) and (size == 1 or cuts[stop] - first <= _JOINED_OPS):
                yield stop, self._options.find(first, cuts[stop])
        for stop in self._long.stops(start):
            yield stop, self._long.choices(start, stop)


class _Came(NamedTuple):
    """How the points of a curve are reached: which offer is taken, and which entry of it."""

    offers: list[tuple[int, Choices]]
    which: Any
    entry: Any


class _Table:
    """The curve of each cut: bytes that the rest needs, and what it costs then."""

    def __init__(self, cuts: list[int], saved_bytes: int) -> None:
        self._cuts = cuts
        self._unit = max(1, saved_bytes)
        last = len(cuts) - 1
        self.needs: dict[int, Any] = {last: np.zeros(1, dtype=np.int64)}
        self.seconds: dict[int, Any] = {last: np.zeros(1)}
        self._came: dict[int, _Came] = {}

    def close(self, start: int, offers: list[tuple[int, Choices]]) -> None:
        """Take the best of what can be done from a cut on, in every small range of bytes."""
        needs = [np.maximum(c.need, c.kept + self.needs[s]).ravel() for s, c in offers]
        seconds = [(c.seconds + self.seconds[s]).ravel() for s, c in offers]
        ends = np.cumsum([len(need) for need in needs])
        need, second = np.concatenate(needs), np.concatenate(seconds)
        chosen = best_points(need, second, self._unit, _POINTS)
        self.needs[start], self.seconds[start] = need[chosen], second[chosen]
        which = np.searchsorted(ends, chosen, side="right")
        self._came[start] = _Came(offers, which, chosen - np.concatenate([[0], ends])[which])

    def walk(self, point: int) -> list[tuple[int, Option]]:
        """Return the segments of a point: where they begin, and what is done with them."""
        segments, cut = [], 0
        while cut < len(self._cuts) - 1:
            offers, which, entry = self._came[cut]
            stop, choices = offers[which[point]]
            number, point = divmod(int(entry[point]), len(self.needs[stop]))
            segments.append((cut, choices.take(number)))
            cut = stop
        return segments
