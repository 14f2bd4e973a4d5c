"""How long each value of a pass is held, op by op: a finer form of plans, for searching.

`Lifetimes` say what is kept from forward on and, for each replay, what of its results is dropped
again. Every replay runs as late as it can: just before the node that lacks a value. What it makes
is held until nothing needs it any more, unless it is dropped. `Evaluator` says what lifetimes take;
it agrees with the simulator and is several times as fast.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import add

from .facts import Facts
from .plan import Plan, Stage

__all__ = ["Evaluator", "HeldInterval", "Lifetimes", "Outcome"]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Values that are kept, and pairs of a value and the op whose replay does not hold it on."""

    keep: frozenset[int]
    drops: frozenset[tuple[int, int]] = frozenset()


@dataclass(slots=True)
class HeldInterval:
    """A value that is there from one time to another, and the times when it is used."""

    start: int  # the time of a replay; -1 if it is kept
    end: float = math.inf  # when it is dropped, whoever needs it later
    uses: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Replay:
    ops: list[int]
    runs: set[int]  # the same ops
    remade: dict[int, int]  # what was not there, with the last op of the replay that reads it


@dataclass(slots=True)
class Outcome:
    """What lifetimes take. Times are those of `Evaluator`."""

    lifetimes: Lifetimes
    intervals: dict[int, list[HeldInterval]]  # by value, in the order of time
    replays: dict[int, _Replay]  # by time
    seconds: float
    peak_bytes: int = 0
    peak_time: int = 0

    def is_there(self, value: int, time: int) -> bool:
        """Tell whether a value is there before a time."""
        return value in self.lifetimes.keep or any(
            interval.start < time <= interval.end for interval in self.intervals.get(value, ())
        )


class Evaluator:
    """Evaluates lifetimes for one trace.

    With n ops, op i of forward runs at time i, the node at position p of backward at n + 2p + 1,
    and what this node lacks is recomputed at n + 2p.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.order = facts.trace.backward_order
        times = range(facts.count, facts.count + 2 * len(self.order), 2)
        nodes = zip(times, self.order, strict=True)
        self._nodes = [(t, op, frozenset(facts.saves[op])) for t, op in nodes if facts.saves[op]]
        # By value: when it is held if it is kept and no replay reads it. Outcomes share these.
        self._kept = [[HeldInterval(-1)] for _ in facts.nbytes]
        for time, _, saves in self._nodes:
            for value in saves:
                self._kept[value][0].uses.append(time + 1)
        self.is_reverse = all(later < op for op, later in pairwise(self.order))
        self.always = frozenset(v for v, is_bound in enumerate(facts.is_bound) if is_bound)
        base = [level for op in self.order for level in (facts.base_before[op], facts.base_at[op])]
        self._static = self._program_bytes() + base
        self.work = 0  # about the ops, nodes and values that were looked at

    def _program_bytes(self) -> list[int]:
        """Return for each op of forward the bytes that the program holds."""
        facts = self.facts
        change = [0] * (facts.count + 1)
        for value, nbytes in enumerate(facts.nbytes):
            if not facts.is_external[value]:
                made = facts.made_by[value]
                change[made] += nbytes
                change[max(made, facts.forward_end[value]) + 1] -= nbytes
        return list(accumulate(change))[:-1]

    def node_of(self, time: int) -> int:
        """Return the op whose backward a time belongs to."""
        return self.order[(time - self.facts.count) // 2]

    def replay_time(self, time: int) -> int:
        """Return when what is used at a time in backward would be recomputed."""
        return time - (time - self.facts.count) % 2

    def evaluate(self, lifetimes: Lifetimes) -> Outcome:
        """Return what lifetimes take."""
        facts, kept = self.facts, lifetimes.keep | self.always
        outcome = Outcome(lifetimes, {v: self._kept[v] for v in kept}, {}, 0.0)
        there = {v: self._kept[v][0] for v in kept}
        for time, op, saves in self._nodes:
            if loose := saves - kept:
                missing = [v for v in loose if v not in there]
                if missing:
                    self._recompute(missing, op, time, there, outcome)
                for value in loose:
                    there[value].uses.append(time + 1)
                for value in missing:
                    if there[value].end == time + 1:
                        del there[value]
        replayed = [op for replay in outcome.replays.values() for op in replay.ops]
        outcome.seconds = math.fsum(facts.seconds[op] for op in replayed)
        self._find_peak(outcome)
        self.work += len(self._static) + 2 * len(replayed)
        return outcome

    def _recompute(
        self,
        missing: list[int],
        op: int,
        time: int,
        there: dict[int, HeldInterval],
        outcome: Outcome,
    ) -> None:
        """Run again what a node lacks; all of it is there afterwards, unless it is dropped."""
        replay = outcome.replays[time] = self._replay(missing, time, there, outcome)
        drops = outcome.lifetimes.drops
        for value in replay.remade:
            is_dropped = (value, op) in drops
            if not is_dropped or value in missing:
                interval = there[value] = HeldInterval(time, time + 1 if is_dropped else math.inf)
                outcome.intervals.setdefault(value, []).append(interval)

    def _replay(
        self, missing: list[int], time: int, there: dict[int, HeldInterval], outcome: Outcome
    ) -> _Replay:
        facts, remade = self.facts, dict[int, int]()
        runs = self._closure(missing, there)
        ops = sorted(runs)
        for op in ops:
            for read in facts.reads[op]:
                if read in remade:
                    remade[read] = op
                elif (interval := there[read]).start >= 0:
                    interval.uses.append(time)
                else:
                    if interval is self._kept[read][0]:
                        interval = there[read] = HeldInterval(-1, uses=interval.uses.copy())
                        outcome.intervals[read] = [interval]
                    insort(interval.uses, time)
            for made in facts.makes[op]:
                if made not in there:
                    remade[made] = op
        return _Replay(ops, runs, remade)

    def _closure(self, missing: list[int], there: dict[int, HeldInterval]) -> set[int]:
        facts, todo, ops = self.facts, list(missing), set[int]()
        while todo:
            maker = facts.made_by[todo.pop()]
            if maker not in ops:
                ops.add(maker)
                todo += [read for read in facts.reads[maker] if read not in there]
        return ops

    # -- memory --

    def _find_peak(self, outcome: Outcome) -> None:
        nbytes, forward_end = self.facts.held_bytes, self.facts.forward_end
        change = [0] * (len(self._static) + 1)
        staying: dict[int, set[int]] = {time: set() for time in outcome.replays}
        for value, intervals in outcome.intervals.items():
            for interval in intervals:
                if interval.uses:
                    begin = (interval.start if interval.start >= 0 else forward_end[value]) + 1
                    change[begin] += nbytes[value]
                    change[max(begin, interval.uses[-1] + 1)] -= nbytes[value]
                    if interval.start >= 0:
                        staying[interval.start].add(value)
        levels = list(map(add, accumulate(change), self._static))
        for time, replay in outcome.replays.items():
            levels[time] += self._replay_bytes(replay, staying[time])
        outcome.peak_bytes = max(levels)
        outcome.peak_time = levels.index(outcome.peak_bytes)

    def held_from(self, value: int, interval: HeldInterval) -> int:
        """Return the first time at which an interval holds a value, and no program or replay."""
        return interval.start + 1 if interval.start >= 0 else self.facts.forward_end[value] + 1

    def _replay_bytes(self, replay: _Replay, staying: AbstractSet[int]) -> int:
        """Return the most bytes that a replay holds of what it makes."""
        facts, nbytes = self.facts, self.facts.nbytes
        total = most = 0
        ends: dict[int, list[int]] = {}
        for op in replay.ops:
            for made in facts.makes[op]:
                total += nbytes[made]
                if made not in staying:
                    ends.setdefault(replay.remade.get(made, op), []).append(made)
            gone = ends.pop(op, ())
            overwritten = sum(nbytes[v] for v in gone if facts.overwriter.get(v) == op)
            most = max(most, total - overwritten)
            total -= sum(nbytes[v] for v in gone)
        return most

    # -- plans --

    def plan(self, outcome: Outcome) -> Plan:
        """Return the plan that does the same: a stage ends with each op that starts a replay."""
        hold: dict[int, set[int]] = {}
        for value, intervals in outcome.intervals.items():
            for interval in intervals:
                if interval.start >= 0 and interval.uses and interval.end == math.inf:
                    hold.setdefault(self.node_of(interval.start), set()).add(value)
        last = self.facts.count - 1
        tops = {self.node_of(time) for time in outcome.replays} if self.is_reverse else range(last)
        ends = sorted({*tops, last})
        firsts = [0, *(end + 1 for end in ends[:-1])]
        stages = [
            Stage(first, frozenset(hold.get(end, ())))
            for first, end in zip(firsts, ends, strict=True)
        ]
        return Plan(outcome.lifetimes.keep | self.always, tuple(stages))

    def lifetimes_of(self, plan: Plan, recomputed: tuple[tuple[int, ...], ...]) -> Lifetimes:
        """Return about what a plan does: its stages drop what only others need.

        What is made in a stage is of no use beyond it: only what comes before can be dropped.
        """
        facts, drops = self.facts, set[tuple[int, int]]()
        stops = [*(stage.first_op for stage in plan.stages[1:]), facts.count]
        for stage, stop, ops in zip(plan.stages, stops, recomputed, strict=True):
            first = stage.first_op
            for value in {v for op in ops if op < first for v in facts.makes[op]} - stage.hold:
                uses = facts.users[value] + facts.readers[value]
                needed = min((use for use in uses if use >= first), default=stop)
                drops.update((value, op) for op in range(first, min(needed + 1, stop)))
        return Lifetimes(plan.keep - self.always, frozenset(drops))
