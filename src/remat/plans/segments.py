"""The best way to cut a trace into segments, for every budget at once.

Segments are taken from the end: with `need` bytes for what comes at and after a cut, the rest costs
so many seconds. An option that keeps k bytes, needs n itself and stands before a rest that needs m
needs max(n, k + m). All numbers are exact; only how many points a curve may have is limited.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from .facts import Facts
from .long_segments import LongSegments
from .options import Option, SegmentOptions
from .plan import Plan, Stage
from .recursion import Groups

__all__ = ["Curve", "choose_cuts", "solve_segments"]

_MOST_CUTS = 144
_POINTS = 512  # of a curve
_MOST_SOLVED = 240  # different segments that are looked at closely, about
_JOINED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)  # how many parts are looked at closely together
_JOINED_OPS = 64


class Curve:
    """Seconds of recomputation against bytes, and the segments of each point."""

    def __init__(self, table: _Table, groups: Groups) -> None:
        self._table = table
        self._groups = groups
        points = zip(table.needs[0].tolist(), table.seconds[0].tolist(), strict=True)
        # The (bytes, seconds) that no other point beats, the fewest bytes first.
        self.points: list[tuple[int, float]] = list(points)

    def plan(self, number: int) -> Plan:
        """Return the plan of a point."""
        keep: set[int] = set()
        stages: list[Stage] = []
        for start, option in self._table.walk(number):
            keep.update(option.keep)
            group = option.group
            stages += [Stage(start)] if group is None else self._groups.stages(group)
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


def solve_segments(facts: Facts, cuts: list[int]) -> Curve:
    """Return the curve of all ways to cut a trace at some of the cuts."""
    table = _Table(cuts, facts.trace.saved_bytes)
    finder = _Finder(facts, cuts)
    places = {cut: place for place, cut in enumerate(cuts)}
    for start in range(len(cuts) - 2, -1, -1):
        for stop, option in finder.options_from(start):
            table.offer(stop, option)
        for stop, option in finder.groups.starts(cuts[start]):
            table.offer(places[stop], option)
        table.close(start)
    return Curve(table, finder.groups)


class _Finder:
    """Finds what segments can do: short ones in many ways, long ones as a whole."""

    def __init__(self, facts: Facts, cuts: list[int]) -> None:
        self._cuts = cuts
        self._options = SegmentOptions(facts)
        self._long = LongSegments(facts)
        for start, stop in pairwise(cuts):
            self._options.find(start, stop)
        # Where all parts are different, fewer of them are looked at together.
        most = max(2, _MOST_SOLVED // max(1, self._options.solved))
        self._joined = range(1, 1 + most) if self._options.solved < 40 else _JOINED[:most]
        self.groups = Groups(facts, cuts, self._options, self._long)

    def options_from(self, start: int) -> list[tuple[int, Option]]:
        """Return the options of all segments that begin at a cut, with the cut where they end."""
        cuts, found = self._cuts, []
        first = cuts[start]
        for size in self._joined:
            stop = start + size
            if stop < len(cuts) and (size == 1 or cuts[stop] - first <= _JOINED_OPS):
                found += [(stop, o) for o in self._options.find(first, cuts[stop])]
        for stop in range(start + 2, len(cuts)):
            if not self._long.fits(first, cuts[stop]):
                break
            found.append((stop, self._long.option(first, cuts[stop])))
        return found


class _Table:
    """The curve of each cut: bytes that the rest needs, and what it costs then."""

    def __init__(self, cuts: list[int], saved_bytes: int) -> None:
        self._cuts = cuts
        self._unit = max(1, saved_bytes)
        last = len(cuts) - 1
        self.needs: dict[int, Any] = {last: np.zeros(1, dtype=np.int64)}
        self.seconds: dict[int, Any] = {last: np.zeros(1)}
        self._came: dict[int, list[tuple[int, Option, int]]] = {}
        self._offers: list[tuple[int, Option]] = []

    def offer(self, stop: int, option: Option) -> None:
        self._offers.append((stop, option))

    def close(self, start: int) -> None:
        """Take the best of what was offered for a cut, in every small range of bytes."""
        needs = [np.maximum(o.need_bytes, o.kept_bytes + self.needs[s]) for s, o in self._offers]
        seconds = [o.seconds + self.seconds[s] for s, o in self._offers]
        sizes = [len(need) for need in needs]
        which = np.repeat(np.arange(len(sizes)), sizes)
        at = np.concatenate([np.arange(size) for size in sizes])
        need, second = np.concatenate(needs), np.concatenate(seconds)
        chosen = self._best(need, second)
        self.needs[start], self.seconds[start] = need[chosen], second[chosen]
        self._came[start] = [
            (*self._offers[w], int(p)) for w, p in zip(which[chosen], at[chosen], strict=True)
        ]
        self._offers = []

    def _best(self, need: Any, seconds: Any) -> Any:
        # Why a root? It makes the ranges of small budgets finer, where a byte is worth more.
        ranges = (np.sqrt(need / self._unit) * _POINTS).astype(np.int64)
        least = np.full(int(ranges.max()) + 1, np.inf)
        np.minimum.at(least, ranges, seconds)
        good = np.flatnonzero(seconds <= least[ranges])
        order = good[np.lexsort((need[good], ranges[good]))]
        firsts = order[np.unique(ranges[order], return_index=True)[1]]
        running = np.minimum.accumulate(seconds[firsts])
        is_better = np.ones(len(firsts), dtype=bool)
        is_better[1:] = seconds[firsts][1:] < running[:-1]
        return firsts[is_better]

    def walk(self, point: int) -> list[tuple[int, Option]]:
        segments, cut = [], 0
        while cut < len(self._cuts) - 1:
            stop, option, point = self._came[cut][point]
            segments.append((self._cuts[cut], option))
            cut = stop
        return segments
