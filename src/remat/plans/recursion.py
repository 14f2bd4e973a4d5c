"""Recomputation in rounds, for budgets below what one round needs.

A group of parts keeps nothing inside. When backward comes to it, the ops are run again from its
start; on the way the values at some cut are held, so that what comes after the cut can be dealt
with first, and what comes before it later, from the start once more (Beaumont, Herrmann, Pallez,
Shilova 2019, for chains of unlike layers). Curves of bytes and seconds are found for all groups,
the short ones first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np

from .facts import Facts
from .long_segments import LongSegments
from .options import Choices, Option, SegmentOptions, best_points, fewer_options
from .plan import Stage

__all__ = ["Groups"]

_MOST_PARTS = 24
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
        self._segments = segments
        parts = {*pairwise(self._coarse), *pairwise(range(len(cuts)))}
        self._passed = {
            part: self._on_the_way(part, options.find(*ops))
            for part in sorted(parts)
            for ops in [(cuts[part[0]], cuts[part[1]])]
            if part[1] - part[0] == 1 or ops[1] - ops[0] <= _PASSED_OPS
        }
        self._sweep = self._sweep_seconds()
        self._live = [self._live_bytes(part) for part in range(len(self._cuts) - 1)]
        self._curves: dict[tuple[int, int], _Points] = {}
        for first, stop in sorted(self._pairs(), key=lambda pair: pair[1] - pair[0]):
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
        row = self._segments.row(first)
        alone = row.need_inside[stop : stop + 1], row.seconds_inside[stop : stop + 1]
        zero = _zeros(1)
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
        held, live = self._segments.row(first).kept[cut], self._live_at(first, cut, stop)
        needs = held + rest.needs
        least = max(live, needs[0], before.needs[0])
        levels = np.concatenate([[least], needs, before.needs])
        levels = levels[levels >= least]
        r = needs.searchsorted(levels, side="right") - 1
        b = before.needs.searchsorted(levels, side="right") - 1
        seconds = rest.seconds[r] + before.seconds[b] + (self._sweep[cut] - self._sweep[first])
        return _Points(levels, seconds, _zeros(len(r)), r, b, [_Way(cut)])

    def _on_the_way(self, part: tuple[int, int], choices: Choices) -> list[Option]:
        """Return the options of a part that hold only what is made when the part is passed.

        Those are the ops that lead to what crosses its end.
        """
        facts, made = self._facts, set(self._segments.keep(*part))
        wanted = set(made)
        for op in range(self._cuts[part[1]] - 1, self._cuts[part[0]] - 1, -1):
            if not wanted.isdisjoint(facts.makes[op]):
                made.update(facts.makes[op])
                wanted.update(facts.reads[op])
        options = fewer_options([choices.take(n) for n in range(len(choices.kept))], _OPTIONS)
        return [option for option in options if made.issuperset(option.keep)]

    def _passing(self, first: int, cut: int, stop: int, option: Option) -> _Points:
        """Hold some of the first part on the way to the rest, so that it need not begin again."""
        rest = self._curves[cut, stop]
        live = self._live_at(first, cut, stop)
        level = max(option.need_bytes, option.kept_bytes + live)
        needs = np.maximum(option.kept_bytes + rest.needs, level)
        seconds = rest.seconds + (self._sweep[cut] - self._sweep[first] + option.seconds)
        zeros = _zeros(len(needs))
        return _Points(needs, seconds, zeros, np.arange(len(needs)), zeros, [_Way(cut, option)])

    def _live_at(self, first: int, cut: int, stop: int) -> int:
        """Return the most bytes while the parts before a cut run again for a later stage."""
        return max(self._live[first:cut]) + self._facts.base_before[self._cuts[stop] - 1]

    def _best(self, found: list[_Points]) -> _Points:
        needs = np.concatenate([points.needs for points in found])
        seconds = np.concatenate([points.seconds for points in found])
        chosen = best_points(needs, seconds, self._unit, _POINTS)
        way = np.repeat(np.arange(len(found)), [len(points.needs) for points in found])
        rest = np.concatenate([points.rest for points in found])
        before = np.concatenate([points.before for points in found])
        ways = [points.ways[0] for points in found]
        return _Points(
            needs[chosen], seconds[chosen], way[chosen], rest[chosen], before[chosen], ways
        )

    # -- what others see --

    def starts(self, first: int) -> Iterator[tuple[int, Choices]]:
        """Yield what can be done with all groups that begin at a cut, and the cut of their end."""
        for stop in range(first + 2, len(self._cuts)):
            curve = self._curves.get((first, stop))
            chosen = np.zeros(0) if curve is None else np.flatnonzero(curve.way)
            if curve is not None and len(chosen):
                chosen = chosen[:: math.ceil(len(chosen) / _OFFERED)]
                yield stop, self._choices(first, stop, curve, chosen)

    def _choices(self, first: int, stop: int, curve: _Points, chosen: Any) -> Choices:
        kept = int(self._segments.row(first).kept[stop])
        needs, seconds = curve.needs[chosen] + kept, curve.seconds[chosen]

        def take(number: int) -> Option:
            stages = self._stages(first, stop, int(chosen[number]), frozenset())
            keep = self._segments.keep(first, stop)
            return Option(keep, kept, int(needs[number]), float(seconds[number]), tuple(stages))

        return Choices(np.array([[kept]]), needs[:, None], seconds[:, None], take)

    def _stages(self, first: int, stop: int, number: int, hold: frozenset[int]) -> list[Stage]:
        curve = self._curves[first, stop]
        way = curve.ways[curve.way[number]]
        if way.cut < 0:
            return [Stage(self._cuts[first], hold)]
        if way.option is not None:
            held = frozenset(way.option.keep)
            before = [Stage(self._cuts[first])]
        else:
            held = frozenset(self._segments.keep(first, way.cut))
            before = self._stages(first, way.cut, int(curve.before[number]), frozenset())
        return before + self._stages(way.cut, stop, int(curve.rest[number]), hold | held)


@functools.cache
def _zeros(count: int) -> Any:
    return np.zeros(count, dtype=np.int64)


def _fewer(facts: Facts, cuts: list[int]) -> list[int]:
    """Return the places of at most so many cuts: in equal stretches those that few bytes cross."""
    inner = range(1, len(cuts) - 1)
    if len(inner) < _MOST_PARTS:
        return list(range(len(cuts)))
    size = math.ceil(len(inner) / (_MOST_PARTS - 1))
    chunks = [inner[n : n + size] for n in range(0, len(inner), size)]
    best = [min(chunk, key=lambda place: facts.crossing[cuts[place]]) for chunk in chunks]
    return [0, *best, len(cuts) - 1]
