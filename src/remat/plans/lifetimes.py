"""How long each value of a pass is held: plans in which every replay runs as late as it can.

A `Lifetimes` says what is kept from forward on and, for each replay, what of its results is dropped
at once. All else that a replay makes is held until nothing needs it any more. So an op runs again
only for what was dropped. `Evaluator` says what that takes, as the judge does, but much faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

from .facts import Facts
from .plan import Plan, Stage

__all__ = ["Evaluator", "Lifetimes", "Outcome", "Stay"]

Drop = tuple[int, int]  # a value, and the op before whose backward it is recomputed


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Values that are kept, and those that are dropped again after a replay."""

    keep: frozenset[int]
    drops: frozenset[Drop] = frozenset()


@dataclass(slots=True)
class Stay:
    """A value that is held from one time to another, and the times when it is used."""

    value: int
    start: int  # the time of a replay; -1 if it is kept
    end: float = math.inf  # when it is dropped, whoever needs it later
    uses: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What lifetimes take. Times are those of `Evaluator`."""

    peak_bytes: int
    peak_time: int
    seconds: float
    stays: dict[int, list[Stay]]  # by value, in the order of time
    replays: dict[int, list[int]]  # the ops that run again, by time

    def stay_at(self, value: int, time: int) -> Stay | None:
        """Return the stay of a value that is there before a time."""
        for stay in self.stays.get(value, ()):
            if stay.start < time <= stay.end:
                return stay
        return None


class Evaluator:
    """Evaluates lifetimes of one trace.

    Op i of forward runs at time i. With n ops, the node at position p of backward runs at time
    n + 2p + 1, and what it lacks is recomputed at time n + 2p.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.order = facts.trace.backward_order
        used = (v for v in range(len(facts.nbytes)) if facts.users[v] or facts.readers[v])
        self.always = frozenset(v for v in used if facts.is_fixed[v] or facts.outlives[v])
        self._live = self._live_bytes()
        self._base = [
            base
            for op in self.order
            for base in (facts.base_before[op], facts.base_at[op])
        ]
        self.work = 0

    def _live_bytes(self) -> list[int]:
        """Return for each op the bytes that the program holds."""
        facts = self.facts
        change = [0] * (facts.count + 1)
        for value, nbytes in enumerate(facts.nbytes):
            if not facts.is_external[value]:
                change[facts.made_by[value]] += nbytes
                change[max(facts.made_by[value], facts.forward_end[value]) + 1] -= nbytes
        return list(accumulate(change))[:-1]

    def node_of(self, time: int) -> int:
        """Return the op whose backward a time belongs to."""
        return self.order[(time - self.facts.count) // 2]

    def evaluate(self, lifetimes: Lifetimes) -> Outcome:
        """Return what lifetimes take."""
        facts, drops = self.facts, lifetimes.drops
        there = {v: Stay(v, -1) for v in (*lifetimes.keep, *self.always)}
        stays = {v: [stay] for v, stay in there.items()}
        replays: dict[int, list[int]] = {}
        remade: dict[int, dict[int, int]] = {}
        time = facts.count
        for op in self.order:
            saves = facts.saves[op]
            if saves:
                missing = [v for v in saves if v not in there]
                if missing:
                    ops = self._closure(missing, there)
                    replays[time] = ops
                    remade[time] = self._replay(ops, op, time, there, stays, drops)
                for value in saves:
                    there[value].uses.append(time + 1)
                if missing and drops:
                    for value in missing:
                        if (value, op) in drops:
                            there.pop(value).end = time + 1
            time += 2
        transient = {t: self._transient(replays[t], r, stays, t) for t, r in remade.items()}
        peak, when = self._peak(stays, transient)
        seconds = math.fsum(facts.seconds[op] for ops in replays.values() for op in ops)
        self.work += facts.count + 2 * len(self.order) + 2 * sum(map(len, replays.values()))
        return Outcome(peak, when, seconds, stays, replays)

    def _closure(self, missing: list[int], there: dict[int, Stay]) -> list[int]:
        facts, todo = self.facts, list(missing)
        ops: set[int] = set()
        while todo:
            maker = facts.made_by[todo.pop()]
            if maker not in ops:
                ops.add(maker)
                todo += [read for read in facts.reads[maker] if read not in there]
        return sorted(ops)

    def _replay(self, ops, node, time, there, stays, drops) -> dict[int, int]:
        """Run ops again; return what they make, with the last op that reads it."""
        facts = self.facts
        remade: dict[int, int] = {}  # with the last op that reads it
        for op in ops:
            for read in facts.reads[op]:
                if read in remade:
                    remade[read] = op
                else:
                    there[read].uses.append(time)
            for made in facts.makes[op]:
                if made not in there:
                    remade[made] = op
        wanted = facts.saves[node]
        for value in remade:
            is_dropped = (value, node) in drops
            if value in wanted or not is_dropped:
                stay = there[value] = Stay(value, time)
                stays.setdefault(value, []).append(stay)
        return remade

    def _transient(self, ops: list[int], remade: dict[int, int], stays, time) -> int:
        facts, total, most = self.facts, 0, 0
        there = {v for v in remade if any(s.start == time and s.uses for s in stays.get(v, ()))}
        nbytes = facts.nbytes
        ends: dict[int, list[int]] = {}
        for op in ops:
            gone = 0
            for made in facts.makes[op]:
                total += nbytes[made]
                if made not in remade:
                    gone += nbytes[made]
                elif made not in there:
                    if remade[made] == op: gone += nbytes[made]
                    else:
                        ends.setdefault(remade[made], []).append(made)
            for value in ends.pop(op, ()):
                if facts.overwriter.get(value) == op:
                    total -= nbytes[value]
                else:
                    gone += nbytes[value]
            most = max(most, total)
            total -= gone
        return most

    def _peak(self, stays: dict[int, list[Stay]], transient: dict[int, int]) -> tuple[int, int]:
        facts, count = self.facts, self.facts.count
        change = [0] * (count + 2 * len(self.order) + 1)
        for value, row in stays.items():
            if facts.outlives[value]:
                continue
            nbytes = facts.nbytes[value]
            for stay in row:
                if stay.uses:
                    begin = stay.start + 1 if stay.start >= 0 else facts.forward_end[value] + 1
                    change[max(begin,0)] += nbytes
                    change[max(begin, stay.uses[-1] + 1)] -= nbytes
        most, when = -1, 0
        level = 0
        static = self._live + self._base
        levels = list(accumulate(change))
        levels = [a + b for a, b in zip(levels, static)]
        for time, more in transient.items():
            levels[time] += more
        # A replay that does not take place holds nothing that the node before or after does not.
        most = max(levels)
        return most, levels.index(most)

    def plan(self, lifetimes: Lifetimes, outcome: Outcome) -> Plan:
        """Return the plan: one stage for each replay."""
        facts = self.facts
        if any(a < b for a, b in zip(self.order, self.order[1:])):
            cuts = list(range(facts.count))
        else:
            cuts = sorted({0, *(min(facts.count - 1, self.node_of(t) + 1) for t in outcome.replays)})
        held: dict[int, set[int]] = {}
        for value, row in outcome.stays.items():
            for stay in row:
                if stay.start >= 0 and stay.end == math.inf and stay.uses:
                    held.setdefault(self.node_of(stay.start), set()).add(value)
        stages = []
        for first, stop in zip(cuts, [*cuts[1:], facts.count]):
            hold: set[int] = set()
            for op in range(first, stop):
                hold |= held.get(op, set())
            stages.append(Stage(first, frozenset(hold)))
        return Plan(lifetimes.keep | self.always, tuple(stages))
