"""Recomputation in rounds, for budgets below what one round needs.

A group of parts keeps nothing inside. When backward comes to it, the ops are run again from its
start; on the way the values at some cut are held, so that what comes after the cut can be dealt
with first, and what comes before it later, from the start once more (Beaumont, Herrmann, Pallez,
Shilova 2019, for chains of unlike layers). Curves of bytes and seconds are found for all groups,
the short ones first.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np

from .facts import Facts
from .long_segments import LongSegments
from .options import Option, SegmentOptions
from .plan import Stage

__all__ = ["Groups"]

_MOST_PARTS = 32
_POINTS = 96  # of a curve
_OPTIONS = 5  # of a part that is passed
_PASSED_OPS = 64  # of a longer part nothing is held but what crosses
_OFFERED = 12  # points of a group that are offered to others


class _Points(NamedTuple):
    """A curve: bytes and seconds, and how each point is reached."""

    needs: Any
    seconds: Any
    way: Any  # which of the `ways`
    rest: Any  # the point of the group after the cut
    before: Any  # the point of the group before it
    ways: list[_Way]


class _Way(NamedTuple):
    """How a group is dealt with: as one stage, or what comes after a cut first."""

    cut: int  # the part where the rest begins; -1 if it is one stage
    option: Option | None = None  # what is held of the part before the cut, if it is not a group


class Groups:
    """The curves of all groups of consecutive parts."""

    def __init__(
        self, facts: Facts, cuts: list[int], options: SegmentOptions, segments: LongSegments
    ) -> None:
        self._facts = facts
        self._cuts = cuts
        self._coarse = _fewer(facts, cuts)
        self._unit = max(1, facts.trace.saved_bytes)
        ends = {pair: (self._cuts[pair[0]], self._cuts[pair[1]]) for pair in self._pairs()}
        self._as_one = {pair: segments.option(*ops) for pair, ops in ends.items()}
        self._inside = {pair: segments.inside(*ops) for pair, ops in ends.items()}
        parts = {*pairwise(self._coarse), *pairwise(range(len(cuts)))}
        self._passed = {
            part: self._on_the_way(part, options.find(*ends[part], _OPTIONS))
            for part in sorted(parts)
            if part[1] - part[0] == 1 or ends[part][1] - ends[part][0] <= _PASSED_OPS
        }
        self._sweep = self._sweep_seconds()
        self._live = [self._live_bytes(part) for part in range(len(self._cuts) - 1)]
        self._curves: dict[tuple[int, int], _Points] = {}
        for first, stop in sorted(ends, key=lambda pair: pair[1] - pair[0]):
            self._solve(first, stop)

    def _pairs(self) -> list[tuple[int, int]]:
        """Return the groups to look at: those between coarse cuts, and those inside of one part."""
        pairs = set(combinations(self._coarse, 2))
        for first, stop in pairwise(self._coarse):
            pairs.update(combinations(range(first, stop + 1), 2))
        return sorted(pairs)

    # -- what parts are like --

    def _sweep_seconds(self) -> list[float]:
        """Return the seconds of all ops before each cut whose results are read."""
        facts = self._facts
        is_read = [any(facts.readers[v] for v in made) for made in facts.makes]
        sums = np.cumsum([0.0, *(s * r for s, r in zip(facts.seconds, is_read, strict=True))])
        return [float(sums[cut]) for cut in self._cuts]

    def _live_bytes(self, part: int) -> int:
        """Return the most bytes that are alive when a part runs and nothing of it is held."""
        facts, first, stop = self._facts, self._cuts[part], self._cuts[part + 1]
        change = [0] * (stop - first + 1)
        for op in range(first, stop):
            for v in facts.makes[op]:
                end = min(stop, 1 + max([op, *facts.readers[v][-1:]]))
                change[op - first] += facts.nbytes[v]
                change[end - first] -= facts.nbytes[v]
        crossing = facts.crossing[first] if first else 0
        return int(np.max(np.cumsum(change))) + crossing

    # -- the curves --

    def _solve(self, first: int, stop: int) -> None:
        need, seconds = self._inside[first, stop]
        zero = np.zeros(1, dtype=np.int64)
        alone = np.array([need]), np.array([seconds])
        found = [_Points(*alone, zero, zero, zero, [_Way(-1)])]
        for cut in range(first + 1, stop):
            if (first, cut) in self._curves and (cut, stop) in self._curves:
                found.append(self._in_rounds(first, cut, stop))
                found += [
                    self._passing(first, cut, stop, o) for o in self._passed.get((first, cut), [])
                ]
        self._curves[first, stop] = self._best(found)

    def _in_rounds(self, first: int, cut: int, stop: int) -> _Points:
        """Deal with what comes after a cut first; then begin once more."""
        rest, before = self._curves[cut, stop], self._curves[first, cut]
        held, live = self._as_one[first, cut].kept_bytes, self._live_at(first, cut, stop)
        levels = np.unique(np.concatenate([np.maximum(held + rest.needs, live), before.needs]))
        r = np.searchsorted(held + rest.needs, levels, side="right") - 1
        b = np.searchsorted(before.needs, levels, side="right") - 1
        is_enough = (r >= 0) & (b >= 0) & (levels >= live)
        r, b = r[is_enough], b[is_enough]
        seconds = rest.seconds[r] + before.seconds[b] + (self._sweep[cut] - self._sweep[first])
        zero = np.zeros(len(r), dtype=np.int64)
        return _Points(levels[is_enough], seconds, zero, r, b, [_Way(cut)])

    def _on_the_way(self, part: tuple[int, int], options: list[Option]) -> list[Option]:
        """Return the options of a part that hold only what is made when the part is passed.

        Those are the ops that lead to what crosses its end.
        """
        facts, made = self._facts, set(self._as_one[part].keep)
        wanted = set(made)
        for op in range(self._cuts[part[1]] - 1, self._cuts[part[0]] - 1, -1):
            if not wanted.isdisjoint(facts.makes[op]):
                made.update(facts.makes[op])
                wanted.update(facts.reads[op])
        return [option for option in options if made.issuperset(option.keep)]

    def _passing(self, first: int, cut: int, stop: int, option: Option) -> _Points:
        """Hold some of the first part on the way to the rest, so that it need not begin again."""
        rest = self._curves[cut, stop]
        live = self._live_at(first, cut, stop)
        level = max(option.need_bytes, option.kept_bytes + live)
        needs = np.maximum(option.kept_bytes + rest.needs, level)
        seconds = rest.seconds + (self._sweep[cut] - self._sweep[first] + option.seconds)
        numbers = np.arange(len(needs))
        return _Points(needs, seconds, 0 * numbers, numbers, 0 * numbers, [_Way(cut, option)])

    def _live_at(self, first: int, cut: int, stop: int) -> int:
        """Return the most bytes while the parts before a cut run again for a later stage."""
        return max(self._live[first:cut]) + self._facts.base_before[self._cuts[stop] - 1]

    def _best(self, found: list[_Points]) -> _Points:
        needs = np.concatenate([points.needs for points in found])
        seconds = np.concatenate([points.seconds for points in found])
        ranges = (np.sqrt(needs / self._unit) * _POINTS).astype(np.int64)
        order = np.lexsort((needs, seconds, ranges))
        order = order[np.unique(ranges[order], return_index=True)[1]]
        least = np.minimum.accumulate(seconds[order])
        is_better = np.ones(len(order), dtype=bool)
        is_better[1:] = seconds[order][1:] < least[:-1]
        chosen = order[is_better]
        way = np.repeat(np.arange(len(found)), [len(points.needs) for points in found])
        rest = np.concatenate([points.rest for points in found])
        before = np.concatenate([points.before for points in found])
        ways = [points.ways[0] for points in found]
        return _Points(
            needs[chosen], seconds[chosen], way[chosen], rest[chosen], before[chosen], ways
        )

    # -- what others see --

    def starts(self, op: int) -> list[tuple[int, Option]]:
        """Return the options of all groups that begin at an op, with the op where they end."""
        first, found = self._cuts.index(op), []
        for stop in range(first + 2, len(self._cuts)):
            if (first, stop) not in self._curves:
                continue
            as_one, curve = self._as_one[first, stop], self._curves[first, stop]
            chosen = [n for n in range(len(curve.needs)) if curve.ways[curve.way[n]].cut >= 0]
            for number in chosen[:: math.ceil(len(chosen) / _OFFERED) or 1]:
                need = int(curve.needs[number]) + as_one.kept_bytes
                group = first, stop, number
                cost = float(curve.seconds[number])
                option = Option(as_one.keep, as_one.kept_bytes, need, cost, group)
                found.append((self._cuts[stop], option))
        return found

    def stages(self, group: tuple[int, int, int]) -> list[Stage]:
        """Return the stages of a group, in forward order."""
        return self._stages(*group, frozenset())

    def _stages(self, first: int, stop: int, number: int, hold: frozenset[int]) -> list[Stage]:
        curve = self._curves[first, stop]
        way = curve.ways[curve.way[number]]
        if way.cut < 0:
            return [Stage(self._cuts[first], hold)]
        if way.option is not None:
            held = frozenset(way.option.keep)
            before = [Stage(self._cuts[first])]
        else:
            held = frozenset(self._as_one[first, way.cut].keep)
            before = self._stages(first, way.cut, int(curve.before[number]), frozenset())
        return before + self._stages(way.cut, stop, int(curve.rest[number]), hold | held)


def _fewer(facts: Facts, cuts: list[int]) -> list[int]:
    """Return the places of at most so many cuts: in equal stretches those that few bytes cross."""
    inner = range(1, len(cuts) - 1)
    if len(inner) < _MOST_PARTS:
        return list(range(len(cuts)))
    size = math.ceil(len(inner) / (_MOST_PARTS - 1))
    chunks = [inner[n : n + size] for n in range(0, len(inner), size)]
    best = [min(chunk, key=lambda place: facts.crossing[cuts[place]]) for chunk in chunks]
    return [0, *best, len(cuts) - 1]
