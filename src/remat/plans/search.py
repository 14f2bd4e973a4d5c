"""Improves plans step by step: changes one thing, asks the judge, and keeps what nothing beats.

The result is a set of plans, one for every trade of bytes for seconds that was found. Which plans
are tried does not depend on a budget, so that a larger budget never gets a worse plan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace

from .facts import Facts
from .plan import Plan, Stage
from .simulate import Judge

__all__ = ["PlanSet", "improve"]


class PlanSet:
    """Judged plans that no other one beats in both bytes and seconds, by bytes."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self._seen: set[tuple[frozenset[int], tuple[Stage, ...]]] = set()
        self._peaks: list[int] = []
        self.plans: list[Plan] = []

    def offer(self, plan: Plan) -> Plan | None:
        """Judge a plan; return it with its figures if no other one beats it."""
        key = plan.keep, plan.stages
        if key in self._seen:
            return None
        self._seen.add(key)
        peak, seconds = self.judge.score(plan)
        return self._put(replace(plan, peak_bytes=peak, extra_seconds=seconds))

    def _put(self, plan: Plan) -> Plan | None:
        place = bisect_right(self._peaks, plan.peak_bytes)
        if place and self.plans[place - 1].extra_seconds <= plan.extra_seconds:
            return None
        first = bisect_left(self._peaks, plan.peak_bytes)
        last = first
        while last < len(self.plans) and self.plans[last].extra_seconds >= plan.extra_seconds:
            last += 1
        self.plans[first:last] = [plan]
        self._peaks[first:last] = [plan.peak_bytes]
        return plan

    def best(self, budget: int) -> Plan | None:
        """Return the plan with the least seconds within a budget."""
        place = bisect_right(self._peaks, budget)
        return self.plans[place - 1] if place else None

    @property
    def tried(self) -> int:
        """How many plans have been judged."""
        return len(self._seen)


def improve(plans: PlanSet, facts: Facts, cuts: list[int], *, most: int) -> None:
    """Try the neighbours of all plans in a set, and of what comes in, up to so many.

    When no single change helps any more, two at a time are tried.
    """
    moves = _Moves(facts, cuts)
    explored: set[tuple[int, Plan]] = set()
    for plan in moves.extremes():
        plans.offer(plan)
    for changes in (1, 2):
        while todo := [plan for plan in plans.plans if (changes, plan) not in explored]:
            for plan in todo:
                explored.add((changes, plan))
                for other in moves.around(plan, changes):
                    if plans.tried >= most:
                        return
                    plans.offer(other)


class _Moves:
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

    def extremes(self) -> Iterator[Plan]:
        """Plans that keep nothing."""
        for firsts in ([0], [0, *self._cuts], range(self._facts.count)):
            yield Plan(frozenset(), tuple(Stage(first) for first in firsts))

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


def _toggled(stages: tuple[Stage, ...], cut: int) -> tuple[Stage, ...]:
    others = tuple(stage for stage in stages if stage.first_op != cut)
    if len(others) < len(stages):
        return others
    return tuple(sorted((*others, Stage(cut)), key=lambda stage: stage.first_op))
