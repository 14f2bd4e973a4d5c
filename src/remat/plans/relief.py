"""Lowers the highest peak first, again and again, and then looks for what was dropped in vain.

From a plan whose peak is too high, the value is dropped that is idle at the peak and costs the
least seconds per byte to compute again (as XLA's rematerialisation does, with exact prices). The
better of several such plans is then improved: something that runs again is restored, and what is
too much is dropped elsewhere; if this takes fewer seconds it is a better plan.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .facts import Facts
from .lifetimes import Evaluator, Lifetimes, Outcome, Stay
from .plan import Plan

__all__ = ["Known", "Relief"]

_STEP = 64  # one part in so many of a level is freed in a round, at least
_FIRST = 4  # and one part in so many of what is too much
_REPAIRED = 0.6  # of the work at most goes into plans to begin with
_PATIENCE = 4  # one part in so many of the work at most is done without finding a better plan
_CLOSE = 1.1  # times the seconds of the best one: another one as near is improved, too

Known = tuple[Plan, tuple[tuple[int, ...], ...]]  # a plan, and what its stages recompute


class _Eviction(NamedTuple):
    """A value that is not held at the peak: what it costs, and when it is recomputed instead."""

    price: float  # seconds per byte
    nbytes: int
    value: int
    stay: Stay
    times: tuple[int, ...]  # of replays; only from the last one on it is held
    sources: frozenset[int]  # what it is recomputed from


class Relief:
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

    def _starts(self, known: Iterable[Known]) -> Iterator[Lifetimes]:
        for plan, recomputed in known:
            yield self._effective(self._evaluator.lifetimes_of(plan, recomputed))
        yield self._plain()

    def _plain(self) -> Lifetimes:
        """Return what recomputes nothing."""
        facts = self._facts
        saved = {v for v, users in enumerate(facts.users) if users and not facts.is_external[v]}
        return Lifetimes(frozenset(saved) - self._always)

    def _effective(self, lifetimes: Lifetimes) -> Lifetimes:
        """Return the same without drops at ops that start no replay of the value."""
        replays = self._evaluator.evaluate(lifetimes).replays.items()
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
                better = self._repair(lifetimes, level, value, outcome.seconds, is_close=is_close)
                if better is not None:
                    return better
                tried.add(value)
        return None

    def _repair(
        self,
        lifetimes: Lifetimes,
        level: int,
        spared: int = -1,
        below: float = math.inf,
        *,
        is_close: bool = False,
    ) -> Outcome | None:
        """Evict until a plan fits; return None if it does not, or takes too many seconds.

        If the plan is close to the level, bytes beyond what is too much are worth nothing.
        """
        outcome = self._evaluator.evaluate(lifetimes)
        while (excess := outcome.peak_bytes - level) > 0:
            if outcome.seconds >= below or self._evaluator.work >= self._until:
                return None
            evictions = self._evictions(outcome, excess if is_close else outcome.peak_bytes)
            others = (eviction for eviction in evictions if eviction.value != spared)
            # Why a part of the excess? What is far above the level comes near it in a few rounds.
            chosen = self._choose(others, max(min(excess, level // _STEP), excess // _FIRST))
            if not chosen:
                return None
            outcome = self._evaluator.evaluate(self._without(outcome.lifetimes, chosen))
        return outcome if outcome.seconds < below * (1 - 1e-9) else None

    # -- what to drop --

    def _evictions(self, outcome: Outcome, excess: int) -> Iterator[_Eviction]:
        """Yield what can be dropped at the peak, the cheapest first; `excess` bytes are enough."""
        facts, peak = self._facts, outcome.peak_time
        self._evaluator.work += len(outcome.stays)
        heap: list[tuple[float, int, int, int, Stay, _Eviction | None]] = []
        for value, stays in outcome.stays.items():
            for stay in stays if value not in self._always and facts.nbytes[value] else ():
                if self._is_idle(value, stay, peak):
                    least = self._least_price(value, stay, outcome, excess)
                    heap.append((least, -facts.nbytes[value], value, stay.start, stay, None))
        heapq.heapify(heap)
        while heap:
            _, nbytes, value, start, stay, eviction = heapq.heappop(heap)
            if eviction is None:
                eviction = self._priced(value, stay, outcome, excess)
                heapq.heappush(heap, (eviction.price, nbytes, value, start, stay, eviction))
            else:
                yield eviction

    def _is_idle(self, value: int, stay: Stay, peak: int) -> bool:
        """Tell whether a value is held at the peak, but not used then or just after."""
        if not stay.uses or not self._evaluator.held_from(value, stay) <= peak < stay.uses[-1]:
            return False
        after = next(use for use in stay.uses if use > peak)
        return peak not in stay.uses and self._evaluator.replay_time(after) > peak

    def _least_price(self, value: int, stay: Stay, outcome: Outcome, excess: int) -> float:
        """Return a bound of the price: what made the value runs again, if it does not anyway."""
        op = self._facts.made_by[value]
        times = self._times(stay, outcome.peak_time)
        runs = sum(
            time not in outcome.replays or op not in outcome.replays[time].ops for time in times
        )
        return runs * self._facts.seconds[op] / min(excess, self._facts.nbytes[value])

    def _times(self, stay: Stay, peak: int) -> tuple[int, ...]:
        """Return when a value is recomputed: for each use up to the peak, and for the next one."""
        uses = stay.uses[: bisect_right(stay.uses, peak) + 1]
        return tuple(dict.fromkeys(self._evaluator.replay_time(use) for use in uses))

    def _priced(self, value: int, stay: Stay, outcome: Outcome, excess: int) -> _Eviction:
        seconds, sources = 0.0, set[int]()
        times = self._times(stay, outcome.peak_time)
        for time in times:
            seconds += self._chain_seconds(value, time, outcome, sources)
        nbytes = self._facts.nbytes[value]
        return _Eviction(
            seconds / min(excess, nbytes), nbytes, value, stay, times, frozenset(sources)
        )

    def _chain_seconds(self, value: int, time: int, outcome: Outcome, sources: set[int]) -> float:
        """Return the seconds to recompute a value at a time, besides what runs then anyway."""
        facts, replay = self._facts, outcome.replays.get(time)
        running = set(replay.ops) if replay else set()
        todo, found = [value], set[int]()
        while todo:
            op = facts.made_by[todo.pop()]
            if op in found or op in running:
                continue
            found.add(op)
            for read in facts.reads[op]:
                if read not in self._always and (read == value or not outcome.is_there(read, time)):
                    todo.append(read)
                else:
                    sources.add(read)
        return sum(facts.seconds[op] for op in found)

    def _choose(self, evictions: Iterable[_Eviction], nbytes: int) -> list[_Eviction]:
        """Return the cheapest that free so many bytes and are not recomputed from one another."""
        chosen: list[_Eviction] = []
        sources: set[int] = set()
        for eviction in evictions:
            if eviction.value in sources or any(e.value in eviction.sources for e in chosen):
                continue
            chosen.append(eviction)
            sources |= eviction.sources
            nbytes -= eviction.nbytes
            if nbytes <= 0:
                break
        return chosen

    def _without(self, lifetimes: Lifetimes, evictions: list[_Eviction]) -> Lifetimes:
        keep, drops = set(lifetimes.keep), set(lifetimes.drops)
        for _, _, value, stay, times, _ in evictions:
            if stay.start < 0:
                keep.discard(value)
            else:
                drops.add((value, self._evaluator.node_of(stay.start)))
            drops.update((value, self._evaluator.node_of(time)) for time in times[:-1])
        return Lifetimes(frozenset(keep), frozenset(drops))

    # -- what to restore --

    def _restored(self, outcome: Outcome) -> Iterator[tuple[int, Lifetimes]]:
        """Yield a value that is recomputed, and lifetimes in which it is not: the best first."""
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
        nbytes = facts.nbytes
        for value, op in sorted(worth, key=lambda k: (-worth[k] / max(1, nbytes[k[0]]), k)):
            if op < 0:
                yield value, Lifetimes(lifetimes.keep | {value}, lifetimes.drops)
            else:
                yield value, Lifetimes(lifetimes.keep, lifetimes.drops - {(value, op)})


def _seconds(outcome: Outcome) -> float:
    return outcome.seconds
