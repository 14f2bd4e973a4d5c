"""Improves plans step by step: changes one thing, asks the judge, and keeps what nothing beats.

The result is a set of plans, one for every trade of bytes for seconds that was found. Which plans
are tried does not depend on a budget, so that a larger budget never gets a worse plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from .facts import Facts
from .front import Front
from .plan import Plan, Stage
from .simulate import Judge, Simulation

__all__ = ["PlanSet", "improve"]

_SMALL = 10  # ops; of larger traces not all changes are tried
_MOST_LIKELY = 12  # changes of a kind
_FEW = 2  # forward passes


class PlanSet:
    """Judged plans that no other one beats in both bytes and seconds, by bytes."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self._seen: set[tuple[frozenset[int], tuple[Stage, ...]]] = set()
        self._front: Front[Plan] = Front()
        self.work = 0  # the ops and nodes that the judge has gone through

    @property
    def plans(self) -> list[Plan]:
        """The plans, the one with the fewest bytes first."""
        return self._front.items

    def offer(self, plan: Plan) -> None:
        """Judge a plan, and take it with its figures if no other one beats it."""
        key = plan.keep, plan.stages
        if key in self._seen:
            return
        self._seen.add(key)
        peak, seconds, work = self.judge.score(plan)
        self.work += work
        self._front.add(peak, seconds, replace(plan, peak_bytes=peak, extra_seconds=seconds))

    def best(self, budget: int) -> Plan | None:
        """Return the plan with the least seconds within a budget."""
        return self._front.best(budget)


def improve(plans: PlanSet, facts: Facts, cuts: list[int], *, most: int) -> None:
    """Try the neighbours of all plans in a set, and of what comes in, up to so much work.

    Of small traces all changes are tried, and then two at a time; of others those that can lower
    the peak or the seconds.
    """
    most += plans.work
    is_small = facts.count <= _SMALL
    moves = _AllMoves(facts, cuts) if is_small else _LikelyMoves(facts, cuts, plans.judge)
    for changes in (1, 2) if is_small else (1,):
        explored: set[Plan] = set()
        while (plan := _widest(plans.plans, explored, facts.trace.seconds)) is not None:
            explored.add(plan)
            for other in moves.around(plan, changes):
                if plans.work >= most:
                    return
                plans.offer(other)


def _widest(plans: list[Plan], explored: set[Plan], seconds: float) -> Plan | None:
    """Return the plan below which the curve has the largest gap, of those not yet explored.

    A gap is the rectangle between a plan and the next smaller one: a plan inside of it would be
    worth so many bytes and seconds. Seconds beyond a few passes do not count: hardly anybody wants
    such plans.
    """
    best, largest = None, -1.0
    smaller = Plan(frozenset(), peak_bytes=0, extra_seconds=_FEW * seconds)
    for plan in plans:
        height = min(smaller.extra_seconds, _FEW * seconds) - plan.extra_seconds
        gap = (plan.peak_bytes - smaller.peak_bytes) * max(0.0, height)
        if gap > largest and plan not in explored:
            best, largest = plan, gap
        smaller = plan
    return best


class _AllMoves:
    """All that can be changed of a plan in one step."""

    def __init__(self, facts: Facts, cuts: list[int]) -> None:
        self._facts = facts
        self._cuts = cuts[1:-1]
        self._values = [
            v
            for v, readers in enumerate(facts.readers)
            if not facts.is_external[v]
            and not facts.is_fixed[v]
            and not facts.outlives[v]
            and (readers or facts.users[v])
        ]

    def around(self, plan: Plan, changes: int) -> Iterator[Plan]:
        """Yield what becomes of a plan by so many changes."""
        for other in self._changed(plan):
            yield other
            if changes > 1:
                yield from self.around(other, changes - 1)

    def _changed(self, plan: Plan) -> Iterator[Plan]:
        for value in self._values:
            yield replace(plan, keep=plan.keep ^ {value})
        for cut in self._cuts:
            yield replace(plan, stages=_toggled(plan.stages, cut))
        for value in sorted(plan.keep):
            for other in self._beside(value):
                if other not in plan.keep:
                    yield replace(plan, keep=(plan.keep - {value}) | {other})

    def _beside(self, value: int) -> list[int]:
        """Return what a value is made of, and what is made of it."""
        facts = self._facts
        inputs = facts.reads[facts.made_by[value]]
        results = [made for reader in facts.readers[value] for made in facts.makes[reader]]
        return [v for v in (*inputs, *results) if not facts.is_fixed[v]]


class _LikelyMoves(_AllMoves):
    """Changes that can lower the peak, or the seconds."""

    def __init__(self, facts: Facts, cuts: list[int], judge: Judge) -> None:
        super().__init__(facts, cuts)
        self._judge = judge

    def _changed(self, plan: Plan) -> Iterator[Plan]:
        done = self._judge.simulate(plan)
        alive = [thing.number for thing in done.alive if thing.what == "value"]
        again = Counter(op for ops in done.recomputed for op in ops)
        yield from self._lower_the_peak(plan, [v for v in alive if v in plan.keep], done.peak.op)
        yield from self._run_less_again(plan, again, done)
        for value in alive[:_MOST_LIKELY]:
            for other in self._beside(value):
                if value in plan.keep and other not in plan.keep:
                    yield replace(plan, keep=(plan.keep - {value}) | {other})

    def _lower_the_peak(self, plan: Plan, kept: list[int], op: int) -> Iterator[Plan]:
        for value in kept[:_MOST_LIKELY]:
            dropped = replace(plan, keep=plan.keep - {value})
            yield dropped
            # What two stages recompute for it, one can: before or after the op that makes it.
            stage = plan.stage_of(self._facts.made_by[value])
            for near in plan.stages[max(1, stage) : stage + 2]:
                yield replace(dropped, stages=_toggled(plan.stages, near.first_op))
        stage = plan.stage_of(op)
        first = plan.stages[stage].first_op
        stop = (
            plan.stages[stage + 1].first_op if stage + 1 < len(plan.stages) else self._facts.count
        )
        for cut in self._cuts:
            if first < cut < stop:
                yield replace(plan, stages=_toggled(plan.stages, cut))

    def _run_less_again(self, plan: Plan, again: Counter[int], done: Simulation) -> Iterator[Plan]:
        facts = self._facts
        made = [v for op in again for v in facts.makes[op] if facts.readers[v] or facts.users[v]]
        made.sort(key=lambda v: -again[facts.made_by[v]] * self._worth(v))
        for value in made[:_MOST_LIKELY]:
            yield replace(plan, keep=plan.keep | {value})
        for (_, left), (stage, right) in pairwise(zip(plan.stages, done.recomputed, strict=True)):
            if set(left) & set(right):
                yield replace(plan, stages=_toggled(plan.stages, stage.first_op))

    def _worth(self, value: int) -> float:
        return self._facts.seconds[self._facts.made_by[value]] / max(1, self._facts.nbytes[value])


def _toggled(stages: tuple[Stage, ...], cut: int) -> tuple[Stage, ...]:
    others = tuple(stage for stage in stages if stage.first_op != cut)
    if len(others) < len(stages):
        return others
    return tuple(sorted((*others, Stage(cut)), key=lambda stage: stage.first_op))
