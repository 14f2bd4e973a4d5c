"""Plans for any recorded pass under a budget of peak bytes.

What is done, in this order; everything is pure and gives the same plan for the same trace:

1. The trace is cut where few bytes cross; segments between cuts become stages (`segments.py`), each
   with a choice of what to keep (`options.py`), or in rounds for small budgets (`recursion.py`).
   One dynamic programme gives the best combination for every budget at once.
2. Of traces that are small enough, plans are made op by op as well: the highest peak is lowered
   first (`relief.py`), and values are evicted one by one (`closure.py`).
3. Plans are judged, and improved step by step (`search.py`).
4. For a budget the plan with the least seconds is taken. Since neither curves nor set depend on
   the budget, seconds never rise with it.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import BudgetTooSmallError
from ..sizes import format_bytes, parse_budget
from .bounds import LowerBound
from .closure import evictions
from .facts import Facts
from .plan import Plan, Stage
from .relief import Relief
from .search import PlanSet, improve
from .segments import choose_cuts, solve_segments
from .simulate import Judge, Simulation
from .trace import Trace

__all__ = ["Frontier", "FrontierPoint", "Search", "frontier", "plan_trace"]

_LEAST_JUDGED = 2  # plans of the curve that are judged at once; the others when they are needed
_JUDGED_OPS = 8_000  # or more: with so many ops together
_MOST_TRIED = 20  # plans of the curve that are judged for a budget
_SEARCHED_OPS = 1_500  # larger traces are not searched: the judge takes too long
_SEARCHED_WORK = 60_000  # ops and nodes that the judge goes through for the plans of the search
_TINY, _TINY_WORK = 20, 300_000  # ops, and work, of traces of which all is tried
_RELIEF_OPS = 700  # of larger traces there are too many values to look at them one by one
_RELIEF_WORK = 600_000  # ops and nodes that are evaluated for plans that hold values op by op
_SMALL, _SMALL_RELIEF_WORK = 150, 1_500_000  # ops, and work, of traces that are searched closely
_MEDIUM = 100  # ops; of larger traces plans that keep nothing take too long to judge
_EVICTED_WORK = 15_000  # ops of plans that evict values one by one
_FRONTIER_POINTS = 40
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
        judge = Judge(trace)
        facts = Facts(trace)
        saved = frozenset(v for v in trace.saved if not facts.is_external[v])
        self.plain: Simulation = judge.simulate(Plan(saved))
        self._plans = PlanSet(judge)
        self._plans.offer(Plan(saved))
        self._sources: list[_Predicted] = []  # plans that are judged when they are needed
        self.lower_bound = LowerBound(facts)
        # What comes after is found by seconds, which differ from run to run: no promise.
        self.smallest_budget = self.plain.peak_bytes
        if facts.count and saved:
            self._solve(facts)

    def _solve(self, facts: Facts) -> None:
        cuts = choose_cuts(facts)
        curve = solve_segments(facts, cuts)
        segments = _Predicted(curve.points, curve.plan, self._plans.judge)
        self._sources.append(segments)
        count = len(curve.points)
        judged = min(count, max(_LEAST_JUDGED, _JUDGED_OPS // facts.count))
        for number in _spread(count, judged):
            self._plans.offer(curve.plan(number))
        where = cuts if facts.count > 40 else list(range(facts.count + 1))
        if facts.count <= _MEDIUM:
            for firsts in ([0], where[:-1], range(facts.count)):
                self._plans.offer(Plan(frozenset(), tuple(map(Stage, firsts))))
        self.smallest_budget = self._plans.plans[0].peak_bytes
        if facts.count <= _SEARCHED_OPS:
            if facts.count <= _RELIEF_OPS:
                self._relieve(facts, segments)
            self._evict(facts, where[:-1])
            work = _TINY_WORK if facts.count <= _TINY else _SEARCHED_WORK
            improve(self._plans, facts, where, most=work)

    def _evict(self, facts: Facts, firsts: list[int]) -> None:
        """Offer plans that hold nothing on: for the smallest budgets."""
        for step in (1, 2, 4, 8) if facts.count <= _TINY else (1,):
            plans = list(evictions(facts, [0, *firsts[1::step]]))
            for number in _spread(len(plans), max(2, _EVICTED_WORK // (3 * facts.count))):
                self._plans.offer(plans[number])

    def _relieve(self, facts: Facts, segments: _Predicted) -> None:
        """Add plans whose values are held op by op; begin with those of segments."""
        judge, relief = self._plans.judge, Relief(facts)

        def known(level: int) -> list[tuple[Plan, tuple[tuple[int, ...], ...]]]:
            plans = segments.within(level)
            return [(plan, judge.simulate(plan).recomputed) for plan in plans]

        relief.search(known, _SMALL_RELIEF_WORK if facts.count <= _SMALL else _RELIEF_WORK)
        front = relief.front
        points = list(zip(front.peaks, front.seconds, strict=True))
        self._sources.append(_Predicted(points, relief.plan, judge))

    @property
    def plans(self) -> list[Plan]:
        return self._plans.plans

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
        """Return the best plan that was judged, or a better one that is judged now."""
        plan = self._plans.best(budget)
        for source in self._sources:
            plan = source.better(plan, budget)
        return plan


class _Predicted:
    """Plans with the bytes and seconds that they should take; judged when they are needed."""

    def __init__(
        self, points: list[tuple[int, float]], plan: Callable[[int], Plan], judge: Judge
    ) -> None:
        self.points = points
        self._plan = plan
        self._judge = judge
        self._judged_plans: dict[int, Plan] = {}

    def within(self, nbytes: int) -> list[Plan]:
        """Return the plan for so many bytes, if there is one."""
        place = bisect_right(self.points, (nbytes, math.inf))
        return [self._plan(place - 1)] if place else []

    def better(self, plan: Plan | None, budget: int) -> Plan | None:
        """Return a plan that is better than another one, or the other one."""
        place = bisect_right(self.points, (budget, math.inf))
        # Why a row? Where backward is not the reverse of forward, a prediction may fail.
        for number in range(place - 1, max(-1, place - 1 - _MOST_TRIED), -1):
            if plan is None or self.points[number][1] >= plan.extra_seconds:
                break
            other = self._judged(number)
            if other.peak_bytes <= budget and other.extra_seconds < plan.extra_seconds:
                return other
        return plan

    def _judged(self, number: int) -> Plan:
        if number not in self._judged_plans:
            plan = self._plan(number)
            peak, seconds, _ = self._judge.score(plan)
            plan = replace(plan, peak_bytes=peak, extra_seconds=seconds)
            self._judged_plans[number] = plan
        return self._judged_plans[number]


def _spread(count: int, most: int) -> list[int]:
    """Return about so many of `count` numbers, the first and the last included."""
    return sorted({round(n * (count - 1) / most) for n in range(most + 1)}) if count else []


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
        """The point that lies furthest below the line between the two ends of the curve."""
        first, last = self.points[0], self.points[-1]
        width = max(1, last.peak_bytes - first.peak_bytes)
        height = (first.extra_seconds - last.extra_seconds) or 1.0

        def height_above_corner(point: FrontierPoint) -> float:
            across = (point.peak_bytes - first.peak_bytes) / width
            return across + (point.extra_seconds - last.extra_seconds) / height

        return min(self.points, key=height_above_corner)


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
    Plan(keeps 3 values, 5 stages, peak 32 B, 3 s extra)
    """
    search = _search(trace)
    least, most = search.plans[0].peak_bytes, search.plain.peak_bytes
    steps = (least + (most - least) * n // _FRONTIER_POINTS for n in range(_FRONTIER_POINTS + 1))
    budgets = sorted({*steps, *(plan.peak_bytes for plan in search.plans)})
    points: list[FrontierPoint] = []
    for budget in budgets:
        plan = search.best(budget)
        assert plan is not None  # the smallest budget has one
        if not points or plan.extra_seconds < points[-1].extra_seconds:
            points.append(FrontierPoint(plan.peak_bytes, plan.extra_seconds, plan))
    return Frontier(tuple(points), most, trace.seconds + trace.backward_seconds)
