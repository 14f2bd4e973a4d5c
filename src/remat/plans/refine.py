"""Makes a plan better op by op: for any trace, by so much work.

`Refinement.within` brings plans within a budget, and then looks for what was dropped in vain:

- At the highest peak the value is dropped that is idle there and costs the fewest seconds per byte
  to compute again (`eviction.py`), until the peak fits: the highest peak first, as XLA's
  rematerialisation does, with exact prices. Or a smaller value that it is made of is held in its
  place, if that frees bytes for fewer seconds.
- Something that runs again is restored, and what is then too much is dropped elsewhere. If this
  takes fewer seconds, it is a better plan.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from .eviction import cheapest_first, ops_again
from .facts import Facts
from .lifetimes import Evaluator, HeldInterval, Lifetimes, Outcome
from .plan import Plan

__all__ = ["Known", "Refinement"]

_STEP = 64  # one part in so many of a level is freed in a round, at least
_FIRST = 4  # and one part in so many of what is too much
_REPAIRED = 0.7  # of the work at most goes into plans to begin with
_PATIENCE = 4  # one part in so many of the work at most is done without finding a better plan
_CLOSE = 1.1  # times the seconds of the best one: another one as near is improved, too

Known = tuple[Plan, tuple[tuple[int, ...], ...]]  # a plan, and what its stages recompute


class _Eviction(NamedTuple):
    """A value that is not held at the peak: what it costs, and when it is recomputed instead."""

    price: float  # seconds per byte
    nbytes: int
    value: int
    interval: HeldInterval
    times: tuple[int, ...]  # of replays; only from the last one on it is held
    sources: frozenset[int]  # what it is recomputed from
    instead: int = -1  # what is kept in its place


class Refinement:
    """Finds plans of one trace op by op, for one level of memory at a time."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._evaluator = Evaluator(facts)
        self._always = self._evaluator.always
        self._time_of = {op: facts.count + 2 * p for p, op in enumerate(self._evaluator.order)}
        self._until = math.inf  # so much work of the evaluator

    def within(self, level: int, known: Iterable[Known], below: float, work: int) -> Plan | None:
        """Return a plan within a level of bytes that takes fewer seconds than `below`.

        It is made from known plans, for this level or larger ones, and from the one that recomputes
        nothing, by so much work.
        """
        begun, found, limit = self._evaluator.work, list[Outcome](), below
        self._until = begun + int(_REPAIRED * work)
        for start in self._starts(known):
            outcome = self._repair(start, level, below=_CLOSE * limit)
            if outcome is not None and all(o.seconds != outcome.seconds for o in found):
                found.append(outcome)
                limit = min(limit, outcome.seconds)
        close = [o for o in sorted(found, key=_seconds)[:2] if o.seconds < _CLOSE * limit]
        left = begun + work - self._evaluator.work
        patience = work // _PATIENCE
        better = [self._improved(o, level, left // (2 * len(close)), patience) for o in close]
        if not better:
            return None
        left = begun + work - self._evaluator.work
        best = self._improved(min(better, key=_seconds), level, left, patience)
        return self._evaluator.plan(best) if best.seconds < below else None

    def _starts(self, known: Iterable[Known]) -> Iterator[Outcome]:
        for plan, recomputed in known:
            outcome = self._evaluator.evaluate(self._evaluator.lifetimes_of(plan, recomputed))
            yield replace(outcome, lifetimes=self._effective(outcome))
        saved = {v for v, users in enumerate(self._facts.users) if users}
        yield self._evaluator.evaluate(Lifetimes(frozenset(saved) - self._always))  # all is kept

    def _effective(self, outcome: Outcome) -> Lifetimes:
        """Return the same lifetimes without drops at ops that start no replay of the value."""
        replays, lifetimes = outcome.replays.items(), outcome.lifetimes
        made = {
            (v, self._evaluator.node_of(time)) for time, replay in replays for v in replay.remade
        }
        return Lifetimes(lifetimes.keep, lifetimes.drops & made)

    def _improved(self, outcome: Outcome, level: int, work: int, patience: int) -> Outcome:
        """Restore what is worth most and drop something else: by so much work, and so much in vain.

        What did not help is tried again only when all else has been tried.
        """
        stop, is_new = self._evaluator.work + work, True
        self._until = min(stop, self._evaluator.work + patience)
        while is_new:
            is_new = False
            for is_close in (False, True):
                tried = set[int]()
                while better := self._better(outcome, level, tried, is_close=is_close):
                    outcome, is_new = better, True
                    self._until = min(stop, self._evaluator.work + patience)
        return outcome

    def _better(
        self, outcome: Outcome, level: int, tried: set[int], *, is_close: bool
    ) -> Outcome | None:
        """Return a plan with fewer seconds that restores something and fits, if there is one."""
        for value, lifetimes in self._restored(outcome):
            if self._evaluator.work >= self._until:
                return None
            if value not in tried:
                restored = self._evaluator.evaluate(lifetimes)
                better = self._repair(restored, level, value, outcome.seconds, is_close=is_close)
                if better is not None:
                    return better
                tried.add(value)
        return None

    def _repair(
        self,
        outcome: Outcome,
        level: int,
        spared: int = -1,
        below: float = math.inf,
        *,
        is_close: bool = False,
    ) -> Outcome | None:
        """Drop values until a plan fits; return None if it does not, or takes too many seconds.

        If the plan is close to the level, bytes beyond what is too much are worth nothing.
        """
        while (excess := outcome.peak_bytes - level) > 0:
            if outcome.seconds >= below or self._evaluator.work >= self._until:
                return None
            drops = self._drops(outcome, excess if is_close else outcome.peak_bytes)
            others = (drop for drop in drops if drop.value != spared)
            # Why a part of the excess? What is far above the level comes near it in a few rounds.
            chosen = self._choose(others, max(min(excess, level // _STEP), excess // _FIRST))
            if not chosen:
                return None
            outcome = self._evaluator.evaluate(self._without(outcome.lifetimes, chosen))
        return outcome if outcome.seconds < below * (1 - 1e-9) else None

    # -- what to drop --

    def _drops(self, outcome: Outcome, excess: int) -> Iterator[_Eviction]:
        """Yield what can be dropped at the peak, the cheapest first; `excess` bytes are enough."""
        facts, peak = self._facts, outcome.peak_time
        self._evaluator.work += len(outcome.intervals)
        idle = [
            (-facts.nbytes[value], value, interval)
            for value, intervals in outcome.intervals.items()
            if value not in self._always and facts.nbytes[value]
            for interval in intervals
            if self._is_idle(value, interval, peak)
        ]
        idle.sort(key=lambda entry: entry[:2])  # of equal prices the largest is the first
        priced: dict[int, _Eviction] = {}

        def price(place: int) -> float:
            if place not in priced:
                _, value, interval = idle[place]
                priced[place] = self._priced(value, interval, outcome, excess)
            return priced[place].price

        least = [self._least_price(value, interval, outcome, excess) for _, value, interval in idle]
        for place in cheapest_first(zip(least, range(len(idle)), strict=True), price):
            yield priced[place]

    def _is_idle(self, value: int, interval: HeldInterval, peak: int) -> bool:
        """Tell whether a value is held at the peak, but not used then or just after."""
        if (
            not interval.uses
            or not self._evaluator.held_from(value, interval) <= peak < interval.uses[-1]
        ):
            return False
        after = next(use for use in interval.uses if use > peak)
        return peak not in interval.uses and self._evaluator.replay_time(after) > peak

    def _least_price(
        self, value: int, interval: HeldInterval, outcome: Outcome, excess: int
    ) -> float:
        """Return a bound of the price: what made the value runs again, if it does not anyway."""
        op = self._facts.made_by[value]
        times = self._times(interval, outcome.peak_time)
        runs = sum(
            time not in outcome.replays or op not in outcome.replays[time].runs for time in times
        )
        return runs * self._facts.seconds[op] / min(excess, self._facts.nbytes[value])

    def _times(self, interval: HeldInterval, peak: int) -> tuple[int, ...]:
        """Return when a value is recomputed: for each use up to the peak, and for the next one."""
        uses = interval.uses[: bisect_right(interval.uses, peak) + 1]
        return tuple(dict.fromkeys(self._evaluator.replay_time(use) for use in uses))

    def _priced(
        self, value: int, interval: HeldInterval, outcome: Outcome, excess: int
    ) -> _Eviction:
        seconds, sources = 0.0, set[int]()
        times = self._times(interval, outcome.peak_time)
        for time in times:
            seconds += self._seconds_again(value, time, outcome, sources)
        nbytes = self._facts.nbytes[value]
        drop = _Eviction(
            seconds / min(excess, nbytes), nbytes, value, interval, times, frozenset(sources)
        )
        return min([drop, *self._instead(drop, outcome, excess)], key=lambda d: d.price)

    def _seconds_again(self, value: int, time: int, outcome: Outcome, sources: set[int]) -> float:
        """Return the seconds to recompute a value at a time, besides what runs then anyway."""
        facts, replay = self._facts, outcome.replays.get(time)
        running: set[int] = replay.runs if replay else set()

        def is_there(read: int) -> bool:
            if read in self._always or (read != value and outcome.is_there(read, time)):
                sources.add(read)
                return True
            return facts.made_by[read] in running

        if facts.made_by[value] in running:
            return 0.0
        ops = ops_again([value], facts.made_by.__getitem__, facts.reads.__getitem__, is_there)
        return sum(facts.seconds[op] for op in ops)

    def _instead(self, drop: _Eviction, outcome: Outcome, excess: int) -> Iterator[_Eviction]:
        """Yield ways to keep a smaller value from which the one that is dropped is made.

        (What attention saves may be made by repeating the heads of a smaller one, or in another
        data type.) Only ops that read one value that is not there are looked at.
        """
        facts, value, seconds = self._facts, drop.value, 0.0
        while drop.interval.start < 0:
            op = facts.made_by[value]
            seconds += facts.seconds[op] * len(drop.times)
            missing = [
                read
                for read in facts.reads[op]
                if read not in self._always and not outcome.is_there(read, drop.times[-1])
            ]
            if len(missing) != 1:
                return
            value = missing[0]
            free = drop.nbytes - facts.nbytes[value]
            price = seconds / min(excess, max(1, free))
            if price >= drop.price:
                return
            if free > 0 and facts.forward_end[value] < outcome.peak_time:
                yield drop._replace(
                    price=price, nbytes=free, sources=frozenset({value}), instead=value
                )

    def _choose(self, drops: Iterable[_Eviction], nbytes: int) -> list[_Eviction]:
        """Return the cheapest that free so many bytes and are not recomputed from one another."""
        chosen: list[_Eviction] = []
        sources: set[int] = set()
        for drop in drops:
            if drop.value in sources or any(other.value in drop.sources for other in chosen):
                continue
            chosen.append(drop)
            sources |= drop.sources
            nbytes -= drop.nbytes
            if nbytes <= 0:
                break
        return chosen

    def _without(self, lifetimes: Lifetimes, chosen: list[_Eviction]) -> Lifetimes:
        keep, drops = set(lifetimes.keep), set(lifetimes.drops)
        for drop in chosen:
            if drop.interval.start < 0:
                keep.discard(drop.value)
            else:
                drops.add((drop.value, self._evaluator.node_of(drop.interval.start)))
            drops.update((drop.value, self._evaluator.node_of(time)) for time in drop.times[:-1])
        keep.update(drop.instead for drop in chosen if drop.instead >= 0)
        return Lifetimes(frozenset(keep), frozenset(drops))

    # -- what to restore --

    def _restored(self, outcome: Outcome) -> Iterator[tuple[int, Lifetimes]]:
        """Yield a value that is recomputed, and lifetimes in which it is not: the best first.

        Of those that look the same, one after the other has its turn: others come between.
        """
        facts, lifetimes = self._facts, outcome.lifetimes
        worth: dict[tuple[int, int], float] = {}
        dropped: dict[int, list[int]] = {}
        for value, op in lifetimes.drops:
            dropped.setdefault(value, []).append(op)
        for time, replay in outcome.replays.items():
            for value in [v for v in replay.remade if facts.readers[v] or facts.users[v]]:
                before = [op for op in dropped.get(value, ()) if self._time_of[op] < time]
                key = value, max(before, key=self._time_of.__getitem__, default=-1)
                worth[key] = worth.get(key, 0.0) + facts.seconds[facts.made_by[value]]
        order = sorted(worth, key=lambda k: (-worth[k] / max(1, facts.nbytes[k[0]]), k))
        alike, turns = Counter[tuple[float, int]](), dict[tuple[int, int], int]()
        for value, op in order:
            look = facts.seconds[facts.made_by[value]], facts.nbytes[value]
            turns[value, op] = alike[look]
            alike[look] += 1
        for value, op in sorted(order, key=turns.__getitem__):
            if op < 0:
                yield value, Lifetimes(lifetimes.keep | {value}, lifetimes.drops)
            else:
                yield value, Lifetimes(lifetimes.keep, lifetimes.drops - {(value, op)})


def _seconds(outcome: Outcome) -> float:
    return outcome.seconds
