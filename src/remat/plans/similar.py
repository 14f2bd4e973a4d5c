"""One search for programs that are the same but for their sizes.

What to keep of a pass depends on the order of its ops and on how bytes and seconds are shared out
among them, and little on how many there are. So a trace with the ops and the wiring of one that has
been searched takes its plan from there: that for the same part of the plain peak, simulated on the
new trace. Only where no plan fits, or one costs clearly more than it does where it comes from, the
new trace is searched. The same holds for a program whose ops were timed once more: it is searched
again if more than a few percent of the seconds are other ops' than they were.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from dataclasses import replace

from ..errors import BudgetTooSmallError
from ..sizes import parse_budget
from .front import Front
from .plan import Plan
from .planner import Planner, Plans
from .simulate import Simulator
from .trace import Trace

__all__ = ["Searches"]

_MANY = 4  # programs whose searches are held
_TRIES = 8  # smaller budgets of the search, until a plan fits
_STEP = 0.96  # times the budget is the next one
_NEAR = 0.95  # of a budget is what the peak of a known plan has to be at least
_MARGIN = 0.02  # of a plain pass: a plan may cost so much more here than where it comes from
_MOVED = 0.025  # of a pass: seconds of ops may be measured so much otherwise
_RENEWED = 3  # times that a program is searched again because of the margin


class Searches:
    """Finds plans of traces, and searches only those that are new."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._kept: dict[str, _Kept] = {}  # by program, the one that was used last at the end

    def __call__(self, trace: Trace) -> Plans:
        """Return the plans of a trace."""
        program = _program(trace)
        kept = self._kept.pop(program, None)
        if kept is None:
            kept = _Kept(trace, self._planner)
        elif kept.trace.signature == trace.signature and _moved(kept.trace, trace) > _MOVED:
            kept.search(trace)  # its ops were timed once more
        self._kept[program] = kept
        while len(self._kept) > _MANY:
            del self._kept[next(iter(self._kept))]
        return kept if kept.trace == trace else _SimilarPlans(kept, trace)


class _Kept:
    """The search of a program, the sizes that it was made for, and the plans that it gave."""

    def __init__(self, trace: Trace, planner: Planner) -> None:
        self._planner = planner
        self._margin_searches = 0
        self.search(trace)

    def search(self, trace: Trace) -> None:
        self._plans = self._planner(trace)
        self._front: Front[Plan] = Front()
        self.trace, self.plain_peak = trace, trace.plain_peak

    def plan(self, memory_budget: int | float | str) -> Plan:
        plan = self._plans.plan(memory_budget)
        self._front.add(plan.peak_bytes, plan.extra_seconds, plan)
        return plan

    def near(self, budget: int) -> Plan:
        """Return a plan for a budget: one that is known, if it is nearly as large.

        Else a budget is asked for that is as near, one of few: so sizes that change from pass to
        pass find known plans soon.
        """
        plan = self._front.best(budget)
        if plan is not None and plan.peak_bytes >= _NEAR * budget:
            return plan
        part = min(1.0, budget / max(1, self.plain_peak)) or 1.0
        level = int(self.plain_peak * _NEAR ** math.ceil(math.log(part, _NEAR)))
        with suppress(BudgetTooSmallError):
            return self.plan(min(level, budget))
        return self.plan(budget)

    def may_search_again(self) -> bool:
        """Return whether a plan that costs too much is worth a search: not with ever new sizes."""
        self._margin_searches += 1
        return self._margin_searches <= _RENEWED


class _SimilarPlans:
    """The plans of a trace, by those of another one with the same ops."""

    def __init__(self, kept: _Kept, trace: Trace) -> None:
        self._kept = kept
        self._trace = trace
        self._simulator = Simulator(trace)
        self.plain_peak = trace.plain_peak

    def plan(self, memory_budget: int | float | str) -> Plan:
        budget = parse_budget(memory_budget, whole=self.plain_peak)
        found = self._scaled(budget)
        if found is None or (self._is_dear(*found) and self._kept.may_search_again()):
            self._kept.search(self._trace)
            return self._kept.plan(memory_budget)
        return found[0]

    def _scaled(self, budget: int) -> tuple[Plan, Plan] | None:
        """Return a plan that fits here, and the one that it comes from."""
        scaled = budget * self._kept.plain_peak / max(1, self.plain_peak)
        for _ in range(_TRIES):
            try:
                source = self._kept.near(int(scaled))
            except BudgetTooSmallError:
                return None
            peak, seconds, _ = self._simulator.score(source)
            if peak <= budget:
                return self._adapted(source, peak, seconds, budget), source
            scaled *= _STEP
        return None

    def _adapted(self, source: Plan, peak: int, seconds: float, budget: int) -> Plan:
        return replace(
            source,
            peak_bytes=peak,
            extra_seconds=seconds,
            lower_bound_seconds=0.0,  # that of the source is not one here
            memory_budget=budget,
            plain_peak_bytes=self.plain_peak,
            signature=self._trace.signature,
        )

    def _is_dear(self, plan: Plan, source: Plan) -> bool:
        there = source.extra_seconds / max(1e-12, _seconds(self._kept.trace))
        here = plan.extra_seconds / max(1e-12, _seconds(self._trace))
        return here > there + _MARGIN


def _seconds(trace: Trace) -> float:
    return trace.seconds + trace.backward_seconds


def _moved(one: Trace, other: Trace) -> float:
    """Return the share of a pass that other ops take than were thought to.

    If each op runs again once at most, no plan gains more than twice as much by a new search.
    """
    times = [
        [op.seconds / max(1e-12, _seconds(trace)) for op in trace.ops] for trace in (one, other)
    ]
    before, now = times
    return sum(abs(a - b) for a, b in zip(before, now, strict=True)) / 2


def _program(trace: Trace) -> str:
    """Return the same text for traces with the same ops and wiring, whatever their sizes."""
    ops = [(op.name, op.reads, op.makes, op.saves) for op in trace.ops]
    values = [
        (value.made_by, value.overwrites, value.kind.value, value.requires_grad)
        for value in trace.values
    ]
    return hashlib.sha256(repr((ops, values)).encode()).hexdigest()
