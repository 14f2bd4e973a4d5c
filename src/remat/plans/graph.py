"""Plans for any recorded pass under a budget of peak bytes.

What is done, in this order; everything is pure and gives the same plan for the same trace:

1. The trace is cut where few bytes cross; segments between cuts become stages (`segments.py`), each
   with a choice of what to keep (`options.py`), or in rounds for small budgets (`recursion.py`).
   One dynamic programme gives the best combination for every budget at once.
2. At levels of memory, values are dropped op by op (`relief.py`), with bounded work. More is done
   at a level when a budget asks for it, and where the lower bound leaves something to gain.
3. Plans are judged (`simulate.py`); for a budget the one with the least seconds is taken.

Seconds never rise with the budget, whatever was asked for before: what is found at a level depends
on the level alone, and a budget is compared with all lower levels that may be better. (Unless more
than a part of the seconds of segments, `_LARGEST_GAIN`, is gained at a lower level only.)
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from ..errors import BudgetTooSmallError
from ..sizes import format_bytes, parse_budget
from .bounds import LowerBound
from .facts import Facts
from .front import Front
from .plan import Plan, Stage
from .relief import Relief
from .segments import Curve, choose_cuts, solve_segments
from .simulate import Judge, Simulation
from .trace import Trace

__all__ = ["Frontier", "FrontierPoint", "Search", "frontier", "plan_trace"]

_LEVELS = 20  # of memory at which plans are made op by op: parts of the plain peak
_LEVEL_OPS = 700  # of larger traces there are too many values to look at them one by one
_LEVEL_WORK = 3_000_000  # times ops: how many ops and nodes are evaluated at a level
_LARGEST_GAIN = 0.6  # of the seconds of segments is what plans made op by op take at least
_WORTH = 0.99  # of the seconds of a plan: a bound above it leaves nothing to look for
_MEDIUM = 100  # ops; of larger traces plans that keep nothing take too long to judge
_FRONTIER_POINTS = 40
_FREE, _DEAREST = 0.02, 1.0  # of a plain pass: seconds that nobody notices, and that nobody wants
# What a search leaves of memory that Python keeps, for each op, up to so many of them (measured).
_SEARCH_BYTES, _SEARCH_OPS = 16_000, 750


def plan_trace(trace: Trace, memory_budget: int | float | str) -> Plan:
    """Return what to keep of a recorded pass, so that its peak stays within a budget.

    The plan costs the least seconds of recomputation of all that were found; a larger budget never
    gets a slower one.

    Args:
        trace: What the pass did.
        memory_budget: The peak bytes of forward and backward: an int, text such as "2GB", or a
            float in (0, 1] as the fraction of what a plain pass would hold.

    Raises:
        BudgetTooSmallError: No plan fits; the message has the smallest budget that works.

    >>> from remat.plans import Kind, Op, Trace, Value, plan_trace
    >>> values = [Value(8, kind=Kind.INPUT)]
    >>> values += [Value(8, made_by=i, freed_after=i + 1) for i in range(9)] + [Value(8, made_by=9)]
    >>> ops = [Op("sin", (i,), (i + 1,), 0.5, saves=(i,)) for i in range(10)]
    >>> plan_trace(Trace(tuple(ops), tuple(values)), 40)
    Plan(keeps 4 values, 4 stages, peak 40 B, 2.5 s extra)
    """
    search = _search(trace)
    plan = search.plan(memory_budget)
    assert plan.memory_budget is not None
    bound = search.lower_bound.seconds(plan.memory_budget)
    return replace(plan, lower_bound_seconds=min(bound, plan.extra_seconds))


class Search:
    """The plans of one trace, for all budgets.

    A training run plans a trace once. What is found here takes some tens of kilobytes for each op,
    so engines let go of it when they have their plan.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._judge = Judge(trace)
        self._facts = facts = Facts(trace)
        saved = frozenset(v for v in trace.saved if not facts.is_external[v])
        self.plain: Simulation = self._judge.simulate(Plan(saved))
        self._front: Front[Plan] = Front()  # plans that were judged
        self._offer(Plan(saved))
        self.lower_bound = LowerBound(facts)
        self._segments: _Segments | None = None
        self._relief: Relief | None = None
        self._levels: dict[int, Plan | None] = {}
        if facts.count and saved:
            self._solve(facts)

    def _solve(self, facts: Facts) -> None:
        cuts = choose_cuts(facts)
        curve = solve_segments(facts, cuts)
        self._segments = _Segments(curve, self._judge)
        self._offer(curve.plan(0))
        where = cuts if facts.count > 40 else list(range(facts.count + 1))
        if facts.count <= _MEDIUM:
            for firsts in ([0], where[:-1], range(facts.count)):
                self._offer(Plan(frozenset(), tuple(map(Stage, firsts))))
        if facts.count <= _LEVEL_OPS:
            self._relief = self._descend(self._segments)

    @functools.cached_property
    def smallest_budget(self) -> int:
        """The smallest budget that some plan keeps to."""
        least = self._front.peaks[0]
        while (plan := self.best(least)) is not None and plan.peak_bytes < least:
            least = plan.peak_bytes
        return least

    def _offer(self, plan: Plan) -> None:
        judged = _judged(self._judge, plan)
        self._front.add(judged.peak_bytes, judged.extra_seconds, judged)

    @property
    def memory_bytes(self) -> int:
        return _SEARCH_BYTES * min(len(self.trace.ops), _SEARCH_OPS)

    def plan(self, memory_budget: int | float | str) -> Plan:
        """Return the plan for a budget; its lower bound is one that SciPy is not imported for.

        Raises:
            BudgetTooSmallError: No plan fits; the message has the smallest budget that works.
        """
        budget = parse_budget(memory_budget, whole=self.plain.peak_bytes)
        plan = self.best(budget)
        if plan is None:
            least = self.smallest_budget
            raise BudgetTooSmallError(
                f"this pass needs at least {least} bytes ({format_bytes(least)}) whatever is "
                f"recomputed, got memory_budget={memory_budget!r}"
                f"{'' if isinstance(memory_budget, int) else f' ({budget} bytes)'}; a plain pass "
                f"needs {format_bytes(self.plain.peak_bytes)}",
                smallest=least,
            )
        return replace(
            plan,
            lower_bound_seconds=min(self.lower_bound.quick_seconds(budget), plan.extra_seconds),
            memory_budget=budget,
            plain_peak_bytes=self.plain.peak_bytes,
            signature=self.trace.signature,
        )

    def best(self, budget: int) -> Plan | None:
        """Return the best plan within a budget; what was returned before is known from then on."""
        plan = self._find(budget)
        if plan is not None:
            self._front.add(plan.peak_bytes, plan.extra_seconds, plan)
        return plan

    def _find(self, budget: int) -> Plan | None:
        plan = self._front.best(budget)
        if self._segments is None:
            return plan
        plan = _better(plan, self._segments.within(budget))
        if self._relief is None:
            return plan
        plan = _better(plan, self._relieved(self._relief, budget))
        highest = min(_LEVELS - 1, budget * _LEVELS // self.plain.peak_bytes)
        for number in range(highest, 0, -1):
            if plan is not None and self._least_seconds(number) >= plan.extra_seconds:
                break  # nor can a lower one be better
            plan = _better(plan, self._improved(self._relief, number))
        return plan

    def _relieved(self, relief: Relief, budget: int) -> Plan | None:
        """Return the plan within a budget that evictions have led to."""
        number = relief.front.place(budget)
        return None if number < 0 else self._judged_within(relief.plan(number), budget)

    def _level(self, number: int) -> int:
        return self.plain.peak_bytes * number // _LEVELS

    def _least_seconds(self, number: int) -> float:
        """Return the seconds that no plan of a level is below."""
        assert self._segments is not None
        bound = self.lower_bound.quick_seconds(self._level(number))
        predicted = self._segments.seconds(self._level(number))
        return bound if predicted is None else max(bound, _LARGEST_GAIN * predicted)

    def _improved(self, relief: Relief, number: int) -> Plan | None:
        """Return a plan that was made op by op within a level."""
        if number not in self._levels:
            level, work = self._level(number), _LEVEL_WORK // self._facts.count
            plan = relief.improved(level, work)
            self._levels[number] = None if plan is None else self._judged_within(plan, level)
        return self._levels[number]

    def _judged_within(self, plan: Plan, budget: int) -> Plan | None:
        judged = _judged(self._judge, plan)
        return judged if judged.peak_bytes <= budget else None

    def _descend(self, segments: _Segments) -> Relief:
        """Evict op by op at all levels where the lower bound leaves something to gain."""

        def known(level: int) -> tuple[Plan, tuple[tuple[int, ...], ...]] | None:
            plan = segments.predicted(level)
            return None if plan is None else (plan, self._judge.simulate(plan).recomputed)

        levels = [self._level(number) for number in range(_LEVELS - 1, 0, -1)]
        relief = Relief(self._facts)
        relief.descend([level for level in levels if self._is_open(segments, level)], known)
        return relief

    def _is_open(self, segments: _Segments, level: int) -> bool:
        seconds = segments.seconds(level)
        least = self.lower_bound.quick_seconds(level)
        return seconds is None or least < _WORTH * seconds


def _better(plan: Plan | None, other: Plan | None) -> Plan | None:
    """Return the plan with fewer seconds, the first one if they are equal."""
    if plan is None or other is None:
        return plan or other
    return other if other.extra_seconds < plan.extra_seconds else plan


def _judged(judge: Judge, plan: Plan) -> Plan:
    peak, seconds, _ = judge.score(plan)
    return replace(plan, peak_bytes=peak, extra_seconds=seconds)


class _Segments:
    """Plans of segments, with the bytes and seconds that they should take; judged when needed."""

    def __init__(self, curve: Curve, judge: Judge) -> None:
        self._curve = curve
        self._judge = judge
        self._plans: dict[int, Plan] = {}

    def seconds(self, budget: int) -> float | None:
        """Return the seconds that should be enough for a budget, if there is a plan for it."""
        number = self._place(budget)
        return None if number < 0 else self._curve.points[number][1]

    def within(self, budget: int) -> Plan | None:
        """Return the plan that should fit into a budget, or a neighbour, if one does."""
        place, best = self._place(budget), None
        for number in range(max(0, place - 1), min(place + 2, len(self._curve.points))):
            plan = self._judged(number)
            if plan.peak_bytes <= budget:  # the peak may be lower than predicted, too
                best = _better(best, plan)
        return best

    def predicted(self, budget: int) -> Plan | None:
        """Return the plan that should fit into a budget.

        Where backward is not the reverse of forward, it may not.
        """
        number = self._place(budget)
        return None if number < 0 else self._judged(number)

    def _place(self, budget: int) -> int:
        return bisect_right(self._curve.points, (budget, math.inf)) - 1

    def _judged(self, number: int) -> Plan:
        if number not in self._plans:
            self._plans[number] = _judged(self._judge, self._curve.plan(number))
        return self._plans[number]


@functools.lru_cache(maxsize=8)
def _search(trace: Trace) -> Search:
    return Search(trace)


# -- the whole curve ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A budget that pays: with fewer bytes, recomputation takes longer."""

    peak_bytes: int
    extra_seconds: float
    plan: Plan


@dataclass(frozen=True, slots=True)
class Frontier:
    """Peak bytes against seconds of recomputation; the fewest bytes first."""

    points: tuple[FrontierPoint, ...]
    plain_peak_bytes: int
    plain_seconds: float  # of forward and backward

    @property
    def knee(self) -> FrontierPoint:
        """The point from which on less memory costs much more time.

        Points that cost nothing to speak of (2 % of a plain pass) are one point, the one with the
        fewest bytes; points that more than double the time do not count. Of the rest it is the one
        that lies furthest below the line between the two ends: bytes against seconds.
        """
        free = next(p for p in self.points if self._is_cheap(p, _FREE) or p is self.points[-1])
        first = next(p for p in self.points if self._is_cheap(p, _DEAREST) or p is free)
        width = max(1, free.peak_bytes - first.peak_bytes)
        height = (first.extra_seconds - free.extra_seconds) or 1.0

        def height_above_corner(point: FrontierPoint) -> float:
            across = (point.peak_bytes - first.peak_bytes) / width
            return across + (point.extra_seconds - free.extra_seconds) / height

        between = self.points[self.points.index(first) : self.points.index(free) + 1]
        return min(between, key=height_above_corner)

    def _is_cheap(self, point: FrontierPoint, share: float) -> bool:
        return point.extra_seconds <= share * self.plain_seconds


def frontier(trace: Trace) -> Frontier:
    """Return the curve of peak memory against time of a recorded pass, for all budgets.

    >>> from remat.plans import Kind, Op, Trace, Value, frontier
    >>> values = [Value(8, kind=Kind.INPUT)]
    >>> values += [Value(8, made_by=i, freed_after=i + 1) for i in range(9)] + [Value(8, made_by=9)]
    >>> ops = [Op("sin", (i,), (i + 1,), 0.5, saves=(i,)) for i in range(10)]
    >>> curve = frontier(Trace(tuple(ops), tuple(values)))
    >>> [(point.peak_bytes, point.extra_seconds) for point in curve.points][-3:]
    [(64, 1.0), (72, 0.5), (80, 0.0)]
    >>> curve.knee.plan
    Plan(keeps 4 values, 4 stages, peak 40 B, 2.5 s extra)
    """
    search = _search(trace)
    least, most = search.smallest_budget, search.plain.peak_bytes
    budgets = {least + (most - least) * n // _FRONTIER_POINTS for n in range(_FRONTIER_POINTS + 1)}
    points: list[FrontierPoint] = []
    for budget in sorted(budgets):
        plan = search.best(budget)
        assert plan is not None  # the smallest budget has one
        if not points or plan.extra_seconds < points[-1].extra_seconds:
            points.append(FrontierPoint(plan.peak_bytes, plan.extra_seconds, plan))
    return Frontier(tuple(points), most, trace.seconds + trace.backward_seconds)
