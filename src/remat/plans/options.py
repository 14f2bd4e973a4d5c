"""What can be done with one segment of a trace, if all that it reads from before is held.

A segment is a run of ops that becomes one stage. What later ops read of it is kept. Of the rest a
subset is kept; the fewer bytes, the more seconds of recomputation. The options of a segment are
the subsets that no other one beats in both.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .facts import Facts
from .plan import Stage

__all__ = ["Choices", "Option", "SegmentOptions", "best_points", "columns", "fewer_options"]

_MOST_BITS = 13  # up to 8,192 subsets are looked at one by one
_WINDOW = 10  # of more values, so many at a time
_OVERLAP = 4
_SMALL = (
    300  # what is smaller than this part of a segment is kept, or comes with what is recomputed
)
_MOST_OPTIONS = 16
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Option:
    """A subset to keep, the bytes that it takes from then on, and what the segment itself needs."""

    keep: tuple[int, ...]
    kept_bytes: int
    need_bytes: int  # while the segment runs forward, is recomputed, or runs backward
    seconds: float  # of recomputation
    stages: tuple[Stage, ...] = ()  # if it is recomputed in rounds


class Choices(NamedTuple):
    """What can be done with one segment, in columns: an entry for each option."""

    kept: Any  # bytes
    need: Any
    seconds: Any
    take: Callable[[int], Option]  # the option of an entry


@dataclass(frozen=True, slots=True)
class _Subset:
    nbytes: int
    seconds: float
    keep: set[int]


class SegmentOptions:
    """Finds the options of segments; segments that look the same are solved once."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._solved: dict[tuple[int, ...], tuple[Choices, int]] = {}
        self._idle = _idle_bytes(facts)
        self._outlived = _outlived_bytes(facts)
        # A number that goes up with the ops: those of their values are told from it.
        self._firsts = list(accumulate((max(m, default=0) for m in facts.makes), max))
        self._looks = self._find_looks()

    @property
    def solved(self) -> int:
        """How many different segments there were."""
        return len(self._solved)

    def find(self, start: int, stop: int) -> Choices:
        """Return the options of ops `start` up to `stop`, the fewest bytes first."""
        key, first = tuple(self._looks[start:stop]), self._firsts[start]
        solved = self._solved.get(key)
        if solved is None:
            segment = _Segment(self._facts, start, stop)
            found = [self._measure(segment, keep) for keep in segment.solve(_MOST_OPTIONS)]
            options = _best_options(found, _MOST_OPTIONS)
            solved = self._solved[key] = columns(options), first
        choices, origin = solved
        return choices._replace(take=lambda number: _moved(choices.take(number), first - origin))

    def _find_looks(self) -> list[int]:
        """Return a number for each op: ops with the same number look the same in any segment."""
        facts, numbers = self._facts, dict[Any, int]()
        levels = [facts.base_at, facts.base_before, self._idle, self._outlived]

        def look(op: int) -> Any:
            first = self._firsts[op]
            made = tuple((v - first, facts.nbytes[v], self._uses(v, op)) for v in facts.makes[op])
            reads = tuple(r - first for r in facts.reads[op])
            saves = tuple(s - first for s in facts.saves[op])
            step = first - self._firsts[op - 1] if op else 0
            return step, made, reads, saves, facts.seconds[op], *(level[op] for level in levels)

        return [numbers.setdefault(look(op), len(numbers)) for op in range(facts.count)]

    def _uses(self, value: int, op: int) -> Any:
        facts = self._facts
        is_bound = facts.is_fixed[value] or facts.outlives[value]
        readers, users = facts.readers[value], facts.users[value]
        last = max(readers[-1:] + users[-1:], default=op) - op
        overwriter = facts.overwriter.get(value, op) - op
        return is_bound, last, facts.forward_end[value] - op, overwriter

    def _measure(self, segment: _Segment, keep: set[int]) -> Option:
        facts = self._facts
        needed = segment.needed_ops(keep)
        made_again = {v for op in needed for v in facts.makes[op]}
        keep = {v for v in keep if v not in made_again or v in segment.forced}
        kept_bytes = sum(facts.nbytes[v] for v in keep if not facts.outlives[v])
        need = max(
            segment.forward_need(keep, self._idle, self._outlived),
            segment.backward_need(keep, needed),
        )
        seconds = sum(facts.seconds[op] for op in needed)
        return Option(tuple(sorted(keep)), kept_bytes, need, seconds)


def _idle_bytes(facts: Facts) -> list[int]:
    """Return for each op the bytes that the program holds although no later op reads them."""
    change = [0] * (facts.count + 1)
    for value, nbytes in enumerate(facts.nbytes):
        if facts.is_external[value] or facts.outlives[value]:
            continue
        last = max([*facts.readers[value][-1:], facts.made_by[value]])
        if last < facts.forward_end[value]:
            change[last + 1] += nbytes
            change[facts.forward_end[value] + 1] -= nbytes
    return _sums(change)


def _outlived_bytes(facts: Facts) -> list[int]:
    """Return for each op the bytes made so far that outlive the forward pass."""
    change = [0] * (facts.count + 1)
    for value in facts.free_to_keep:
        change[facts.made_by[value]] += facts.nbytes[value]
    return _sums(change)


def _sums(change: list[int]) -> list[int]:
    return np.cumsum(change).tolist()  # type: ignore[no-any-return]


class _Segment:
    def __init__(self, facts: Facts, start: int, stop: int) -> None:
        self._facts = facts
        self._ops = range(start, stop)
        self._own = [v for op in self._ops for v in facts.makes[op]]
        own = set(self._own)
        self._targets: dict[int, int] = {}  # what backward uses here, with the first op that does
        self._last_use: dict[int, int] = {}  # and with the last one
        for op in self._ops:
            for saved in facts.saves[op]:
                if saved in own:
                    self._targets.setdefault(saved, op)
                    self._last_use[saved] = op
        self.forced = {v for v in self._own if self._must_keep(v, stop)}

    def _must_keep(self, value: int, stop: int) -> bool:
        facts = self._facts
        uses = facts.readers[value] + facts.users[value]
        return bool(uses) and (facts.is_fixed[value] or facts.outlives[value] or max(uses) >= stop)

    # -- which subsets --

    def solve(self, most: int) -> list[set[int]]:
        """Return at most so many subsets to keep, from all to nothing but what is forced."""
        facts = self._facts
        total = sum(facts.nbytes[v] for v in self._targets)
        loose = [v for v in self._targets if v not in self.forced]
        small = {v for v in loose if facts.nbytes[v] * _SMALL < total}
        large = [v for v in loose if v not in small]
        between = [v for v in self._own if self._is_between(v)]
        always = small | self.forced
        if len(large) <= _MOST_BITS:
            found = self._try_all([*large, *between][:_MOST_BITS], always)
        else:
            found = self._try_windows(large, between, always)
        return [*(subset.keep for subset in _best(found, most)), set(self.forced)]

    def _try_windows(self, large: list[int], between: list[int], always: set[int]) -> list[_Subset]:
        """Return the best subsets of many values: near those of evicting one by one."""
        rest, order = always | set(large), []
        found: list[_Subset] = []
        for smaller in self._evict_one_by_one(rest)[1:]:
            order += sorted((rest - smaller) - always)
            rest = smaller
        order += between
        for start in range(0, max(1, len(order) - _OVERLAP), _WINDOW - _OVERLAP):
            later = set(order[start + _WINDOW :]).difference(between)
            found += self._try_all(order[start : start + _WINDOW], always | later)
        return found

    def _is_between(self, value: int) -> bool:
        """Tell whether a value that backward does not use may be worth keeping all the same."""
        facts, readers = self._facts, self._facts.readers[value]
        if value in self._targets or value in self.forced or not readers:
            return False
        results = facts.makes[readers[0]]
        # What its only reader makes of it is better to keep, unless it is larger.
        return len(readers) > 1 or sum(facts.nbytes[v] for v in results) > facts.nbytes[value]

    def _try_all(self, choice: list[int], always: set[int]) -> list[_Subset]:
        """Return the best of all subsets of a few values, in bytes and seconds."""
        facts = self._facts
        count = 1 << len(choice)
        subsets = np.arange(count)
        keeps = {v: (subsets >> place) & 1 == 1 for place, v in enumerate(choice)}
        wanted = {v: np.full(count, v in self._targets) for v in self._own}
        seconds = np.zeros(count)
        nbytes = np.full(count, sum(facts.nbytes[v] for v in always), dtype=np.int64)
        for op in reversed(self._ops):
            needed = np.zeros(count, dtype=bool)
            for made in facts.makes[op]:
                if made not in always:
                    needed |= wanted[made] & ~keeps[made] if made in keeps else wanted[made]
            seconds += needed * facts.seconds[op]
            for read in facts.reads[op]:
                if read in wanted:
                    wanted[read] = wanted[read] | needed
            for made in facts.makes[op]:  # what comes with an op that runs again need not be kept
                if made in keeps:
                    nbytes += facts.nbytes[made] * (keeps[made] & ~needed)
                elif made in always and made not in self.forced:
                    nbytes -= facts.nbytes[made] * needed
        return [
            _Subset(
                int(nbytes[number]),
                float(seconds[number]),
                always | {v for place, v in enumerate(choice) if number >> place & 1},
            )
            for number in _pareto(nbytes, seconds)
        ]

    def _evict_one_by_one(self, keep: set[int]) -> list[set[int]]:
        """Return a row of subsets: each drops the value that costs the least seconds per byte."""
        found, needed = [set(keep)], set(self.needed_ops(keep))
        heap = [(0.0, v) for v in sorted(keep - self.forced)]
        while heap:
            _, best = heapq.heappop(heap)
            if best not in keep:
                continue
            chain = self._chain(best, keep, needed)
            price = self._price(chain) / max(1, self._facts.nbytes[best])
            if heap and price > heap[0][0]:  # it has become dearer than the next one may be
                heapq.heappush(heap, (price, best))
                continue
            needed |= chain
            made_again = {v for op in chain for v in self._facts.makes[op]}
            keep = keep - {best} - (made_again - self.forced)
            found.append(set(keep))
        return found

    def _price(self, ops: set[int]) -> float:
        return sum(self._facts.seconds[op] for op in ops)

    def _chain(self, value: int, keep: set[int], needed: set[int]) -> set[int]:
        """Return the ops that run again if a value is not kept, besides those that do anyway."""
        facts, found, todo = self._facts, set(), [value]
        while todo:
            made_by = facts.made_by[todo.pop()]
            if made_by not in found and made_by not in needed:
                found.add(made_by)
                reads = facts.reads[made_by]
                todo += [r for r in reads if r not in keep and facts.made_by[r] in self._ops]
        return found

    # -- what a subset takes --

    def needed_ops(self, keep: set[int]) -> list[int]:
        """Return the ops that run again, in forward order."""
        facts = self._facts
        wanted = {v for v in self._targets if v not in keep}
        needed = []
        for op in reversed(self._ops):
            if not wanted.isdisjoint(facts.makes[op]):
                needed.append(op)
                wanted.update(r for r in facts.reads[op] if r not in keep)
        return needed[::-1]

    def forward_need(self, keep: set[int], idle: list[int], outlived: list[int]) -> int:
        """Return the most bytes that forward holds of this segment."""
        facts = self._facts
        ends: dict[int, int] = {}
        total = most = 0
        for op in self._ops:
            for made in facts.makes[op]:
                if not facts.outlives[made]:
                    total += facts.nbytes[made]
                    end = max(op, facts.forward_end[made])
                    if made not in keep:
                        ends[end] = ends.get(end, 0) + facts.nbytes[made]
            # Why here? What an in-place op overwrites ends before it.
            most = max(most, total + idle[op] + outlived[op])
            total -= ends.get(op, 0)
        return most

    def backward_need(self, keep: set[int], needed: list[int]) -> int:
        """Return the most bytes that backward holds of this segment, its recomputation included."""
        facts, first = self._facts, self._ops.start
        missing = self._last_use.keys() - keep
        replay_at = max((self._last_use[value] for value in missing), default=first - 1)
        read_again = {r for op in needed for r in facts.reads[op]}
        change: dict[int, int] = {}  # at which op of backward, coming from above, bytes go
        before = after = 0
        for value in {*keep, *self._targets}:
            if facts.outlives[value] and value in keep:
                continue
            nbytes, use = facts.nbytes[value], self._targets.get(value, self._ops.stop)
            if use <= replay_at:
                after += nbytes
            if value in keep and (use <= replay_at or value in read_again):
                before += nbytes
            change[use] = change.get(use, 0) + nbytes
        most = self._replay_need(keep, needed, replay_at) + before if needed else 0
        alive = after
        for op in range(replay_at, first - 1, -1):
            most = max(most, alive + facts.base_at[op])
            alive -= change.get(op, 0)
        return max(most, self._need_before(keep, replay_at, before))

    def _need_before(self, keep: set[int], replay_at: int, before: int) -> int:
        """Return the most bytes in the part of backward that comes before the recomputation."""
        facts = self._facts
        uses = [0] * (self._ops.stop - replay_at)
        for value in keep:
            use = self._targets.get(value, -1)
            if use > replay_at and not facts.outlives[value]:
                uses[use - replay_at] += facts.nbytes[value]
        alive, most = before, 0
        for op in range(replay_at + 1, self._ops.stop):
            alive += uses[op - replay_at]
            most = max(most, alive + facts.base_at[op])
        return most

    def _replay_need(self, keep: set[int], needed: list[int], replay_at: int) -> int:
        """Return the most bytes that a recomputation makes, on top of what is kept."""
        facts = self._facts
        last_read: dict[int, int] = {}
        for op in needed:
            for read in facts.reads[op]:
                last_read[read] = op
        total, most = 0, 0
        ends: dict[int, int] = {}
        for op in needed:
            for made in facts.makes[op]:
                total += facts.nbytes[made]
                if made in keep or made not in self._targets:
                    end = op if made in keep else last_read.get(made, op)
                    overwriter = facts.overwriter.get(made)
                    if overwriter == end and end > op:
                        end = -end  # it is gone before the in-place op adds its own result
                    ends[end] = ends.get(end, 0) + facts.nbytes[made]
            total -= ends.pop(-op, 0)
            most = max(most, total)
            total -= ends.pop(op, 0)
        return most + facts.base_before[replay_at]


def _pareto(nbytes: Any, seconds: Any) -> list[int]:
    """Return the entries that no other one beats in both, the fewest bytes first."""
    order = np.lexsort((seconds, nbytes))
    least = np.minimum.accumulate(seconds[order])
    is_better = np.ones(len(order), dtype=bool)
    is_better[1:] = seconds[order][1:] < least[:-1]
    return order[is_better].tolist()  # type: ignore[no-any-return]


def best_points(needs: Any, seconds: Any, unit: int, points: int) -> Any:
    """Return which points to go on with: the best of every small range of bytes, in their order.

    Those of equal seconds are told apart by their bytes; none costs as much as one below it.
    """
    # Why a root? It makes the ranges of small budgets finer, where a byte is worth more.
    ranges = (np.sqrt(needs * (points * points / unit))).astype(np.int64)
    least = np.full(int(ranges.max()) + 1, np.inf)
    np.minimum.at(least, ranges, seconds)
    # A range below which another one is as good is of no use: most points end here.
    least[1:][least[1:] >= np.minimum.accumulate(least)[:-1]] = -np.inf
    good = np.flatnonzero(seconds <= least[ranges])
    order = good[np.lexsort((needs[good], ranges[good]))]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = ranges[order][1:] != ranges[order][:-1]
    return order[is_first]


def _best(subsets: list[_Subset], most: int) -> list[_Subset]:
    """Return those that no other one beats, and of them at most so many."""
    best: list[_Subset] = []
    for subset in sorted(subsets, key=lambda s: (s.nbytes, s.seconds)):
        if not best or subset.seconds < best[-1].seconds:
            best.append(subset)
    return _thin(best, [(s.nbytes, s.seconds) for s in best], most)


def _best_options(options: list[Option], most: int) -> list[Option]:
    best: list[Option] = []
    for option in sorted(options, key=lambda o: (o.kept_bytes, o.seconds, o.need_bytes)):
        beaten = any(
            o.seconds <= option.seconds and o.need_bytes <= option.need_bytes for o in best
        )
        if not beaten:
            best.append(option)
    return fewer_options(best, most)


def columns(options: Sequence[Option]) -> Choices:
    """Return options as columns."""
    return Choices(
        np.array([[option.kept_bytes] for option in options], dtype=np.int64),
        np.array([[option.need_bytes] for option in options], dtype=np.int64),
        np.array([[option.seconds] for option in options]),
        options.__getitem__,
    )


def _moved(option: Option, by: int) -> Option:
    """Return the option of another segment that looks the same."""
    return replace(option, keep=tuple(value + by for value in option.keep))


def fewer_options(options: list[Option], most: int) -> list[Option]:
    """Return at most so many options, the first and last included."""
    return _thin(options, [(o.kept_bytes, o.seconds) for o in options], most)


def _thin(things: list[_T], points: list[tuple[int, float]], most: int) -> list[_T]:
    """Return at most so many things, the first and last included; drop what matters least."""
    things, points = list(things), list(points)

    def loss(i: int) -> float:
        return (points[i + 1][0] - points[i][0]) * (points[i - 1][1] - points[i][1])

    losses = [math.inf, *map(loss, range(1, len(points) - 1)), math.inf]
    while len(things) > most:
        worst = losses.index(min(losses))
        del things[worst], points[worst], losses[worst]
        for neighbour in range(max(1, worst - 1), min(worst + 1, len(points) - 1)):
            losses[neighbour] = loss(neighbour)
    return things
