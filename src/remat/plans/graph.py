"""Plans for any recorded pass under a budget of peak bytes.

What is done, in this order; everything is pure and gives the same plan for the same trace:

1. The trace is cut where few bytes cross; segments between cuts become stages (`segments.py`), each
   with a choice of what to keep (`options.py`), or in rounds for small budgets (`recursion.py`).
   One dynamic programme gives the best combination for every budget at once.
2. For a budget, values are dropped op by op (`relief.py`), with bounded work, if the lower bound
   leaves something to gain.
3. Plans are judged (`simulate.py`). For a budget the one with the least seconds is taken of all
   that were found so far, for this budget or for others. So no budget gets a slower plan than one
   that is as small or smaller and was asked for before.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import BudgetTooSmallError
from ..sizes import format_bytes, parse_budget
from .bounds import LowerBound
from .facts import Facts
from .front import Front
from .plan import Plan, Stage
from .relief import Known, Relief
from .segments import Curve, Segments, choose_cuts
from .simulate import Judge, Simulation
from .trace import Trace

__all__ = ["Frontier", "FrontierPoint", "Search", "frontier", "plan_trace"]

_RELIEF_OPS = 700  # of larger traces there are too many values to look at them one by one
_RELIEF_WORK, _RELIEF_WORK_OP = 70_000, 125  # ops and nodes evaluated for a budget, and per op
_RELIEF_STEP = 20  # budgets nearer than one part in so many of the plain peak share their work
_TINY = 20  # ops; of smaller traces every budget is looked at: it takes no time
_STARTS = (1.0, 1.1, 1.25, 1.5)  # times the budget: plans of segments to begin with
_ROUNDS = 1.1  # times the least bytes of segments: below, recomputation in rounds is looked at, too
_SHRINK = 0.98  # times the least bytes is tried next
_WORTH = 0.99  # of the seconds of a plan: a bound above it leaves nothing to look for
_MEDIUM = 100  # ops; of larger traces plans that keep nothing take too long to judge
_FRONTIER_POINTS = 40
_FREE, _DEAREST = 0.02, 1.0  # of a plain pass: seconds that nobody notices, and that nobody wants
# What a search leaves of memory that Python keeps, for each op, up to so many of them (measured).
_SEARCH_BYTES, _SEARCH_OPS = 16_000, 750


def plan_trace(trace: Trace, memory_budget: int | float | str) -> Plan:
    """Return what to keep of a recorded pass, so that its peak stays within a budget.

    The plan costs the least seconds of recomputation of all that were found, for this trace and any
    budget: it is never slower than one for a smaller budget that was asked for before.

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
        self._looked: list[int] = []  # budgets, in order
        self._shared_bytes = self.plain.peak_bytes // _RELIEF_STEP
        self._is_shrunk = False
        self._finder: Segments | None = None
        if facts.count and saved:
            self._finder = Segments(facts, choose_cuts(facts))
        self._work = _RELIEF_WORK + _RELIEF_WORK_OP * facts.count
        self._relief = Relief(facts) if facts.count <= _RELIEF_OPS else None

    def _offer(self, plan: Plan) -> Plan:
        peak, seconds, _ = self._judge.score(plan)
        plan = replace(plan, peak_bytes=peak, extra_seconds=seconds)
        self._front.add(peak, seconds, plan)
        return plan

    @property
    def smallest_budget(self) -> int:
        """The smallest budget that some plan keeps to."""
        if self._finder is not None and not self._is_shrunk:
            self._is_shrunk = True
            self._offer(self._rounds.plan(0))
            facts = self._facts
            if facts.count <= _MEDIUM:
                where = self._finder.cuts if facts.count > 40 else range(facts.count + 1)
                for firsts in ([0], where[:-1], range(facts.count)):
                    self._offer(Plan(frozenset(), tuple(map(Stage, firsts))))
            self._shrink()
        return self._front.peaks[0]

    def _shrink(self) -> None:
        """Look for plans of fewer and fewer bytes, each made from the one before."""
        plan = self._front.items[0]
        while self._relief is not None:
            level, known = int(plan.peak_bytes * _SHRINK), [self._known(plan)]
            found = self._relief.within(level, known, math.inf, self._work)
            if found is None:
                break
            plan = self._offer(found)

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
        """Return the best plan within a budget that is known or can be found."""
        if self._finder is not None and budget < self.plain.peak_bytes:
            self._look(self._finder.curve, budget)
            if budget < _ROUNDS * self._finder.curve.points[0][0]:
                self._look(self._rounds, budget)
            self._look_closely(budget)
            if self._front.place(budget) < 0 and self.smallest_budget > budget:
                return None
        return self._front.best(budget)

    def known(self, budget: int) -> Plan:
        """Return the best plan that is known for a budget, which is not too small."""
        return self._front.items[self._front.place(budget)]

    @functools.cached_property
    def _rounds(self) -> Curve:
        assert self._finder is not None
        return self._finder.curve_with_rounds()

    def _look(self, curve: Curve, budget: int) -> None:
        """Judge the plan of a curve that should fit into a budget, and smaller ones until one does.

        The peak may be lower than predicted. Where backward is not the reverse of forward, or has
        an order of its own in an op, it may be higher.
        """
        place = curve.place(budget)
        number, step = min(place + 1, len(curve.points) - 1), 1
        while number >= 0 and self._offer(curve.plan(number)).peak_bytes > budget:
            number, step = number - step, (2 * step if number <= place else 1)

    def _look_closely(self, budget: int) -> None:
        """Look for a plan op by op, where the bound leaves something to gain."""
        best, place = self._front.best(budget), bisect_right(self._looked, budget)
        limit = math.inf if best is None else best.extra_seconds
        near = self._looked[place - 1] if place else -self.plain.peak_bytes
        if (
            self._relief is None
            or self.lower_bound.quick_seconds(budget) >= _WORTH * limit
            or (self._facts.count > _TINY and budget - near < self._shared_bytes)
        ):
            return
        self._looked.insert(place, budget)
        found = self._relief.within(budget, self._starts(budget), limit, self._work)
        if found is not None:
            self._offer(found)

    def _starts(self, budget: int) -> Iterator[Known]:
        """Yield plans that are predicted to fit into a budget or larger ones."""
        assert self._finder is not None
        for factor in _STARTS:
            level = int(budget * factor)
            curve = self._finder.curve
            if level < _ROUNDS * curve.points[0][0]:
                curve = self._rounds
            place = curve.place(level)
            if place >= 0:
                yield self._known(curve.plan(place))

    def _known(self, plan: Plan) -> Known:
        return plan, self._judge.simulate(plan).recomputed


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
    for budget in sorted(budgets):
        search.best(budget)
    # Why once more? What was found for one budget may be better for a smaller one.
    budgets.add(search.smallest_budget)
    plans = dict.fromkeys(search.known(budget) for budget in sorted(budgets))
    points = [FrontierPoint(plan.peak_bytes, plan.extra_seconds, plan) for plan in plans]
    return Frontier(tuple(points), most, trace.seconds + trace.backward_seconds)
