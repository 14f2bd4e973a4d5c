"""Plans for any recorded pass under a budget of peak bytes; the algorithm is told in `__init__`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from ..errors import BudgetTooSmallError
from ..sizes import format_bytes, parse_budget
from .bounds import LowerBound
from .chain import ChainPlan, Part, plan_chains, smallest_chain
from .facts import Facts
from .front import Front
from .layers import LayerChain, choose_cuts
from .parts import find_parts
from .plan import Plan, Stage
from .refine import Known, Refinement
from .simulate import Simulation, Simulator
from .trace import Trace

__all__ = ["Search", "plan_trace", "search_of"]

_WORK = 200_000  # ops, nodes and values that are evaluated for a budget
_STARTS = (1.0, 1.1, 1.25, 1.5)  # times the budget: plans over layers to begin with
_STAGES = 100  # at most in which nothing is kept: to simulate them takes so many replays
_SHRINK = 0.98  # times the least bytes is tried next
_WORTH = 0.99  # of the seconds of a plan: a bound above it leaves nothing to look for


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
    search = search_of(trace)
    plan = search.plan(memory_budget)
    assert plan.memory_budget is not None
    bound = search.lower_bound.seconds(plan.memory_budget)
    return replace(plan, lower_bound_seconds=min(bound, plan.extra_seconds))


class Search:
    """The plans of one trace, for all budgets.

    `ends` are the numbers of ops that had run when each layer of a chain ended: the trace is cut
    there, and not where few bytes cross.

    A training run plans a trace once. What is found here takes some tens of kilobytes for each op,
    so engines let go of it when they have their plan.
    """

    def __init__(self, trace: Trace, ends: Sequence[int] | None = None) -> None:
        self.trace = trace
        self._ends = ends
        self._simulator = Simulator(trace)
        self._facts = facts = Facts(trace)
        saved = frozenset(v for v in trace.saved if not facts.is_external[v])
        self.plain: Simulation = self._simulator.simulate(Plan(saved))
        self._front: Front[Plan] = Front()  # plans that were simulated
        self._offer(Plan(saved))
        self.lower_bound = LowerBound(facts)
        self._looked: set[int] = set()  # budgets
        self._work = _WORK
        self._refinement = Refinement(facts)

    @functools.cached_property
    def _chain(self) -> LayerChain:
        ends = choose_cuts(self._facts) if self._ends is None else self._ends
        return LayerChain(self._facts, ends)

    def _offer(self, plan: Plan) -> Plan:
        peak, seconds, _ = self._simulator.score(plan)
        plan = replace(plan, peak_bytes=peak, extra_seconds=seconds)
        self._front.add(peak, seconds, plan)
        return plan

    @property
    def smallest_budget(self) -> int:
        """The smallest budget that some plan keeps to."""
        return min(self._surely_least, self._front.peaks[0])

    @functools.cached_property
    def _surely_least(self) -> int:
        """The smallest budget for which a plan is found whatever the seconds of ops.

        They differ from pass to pass, and what an error names has to be enough in the next one. So
        all ops count alike: plans of fewer and fewer bytes are made, each from the one before.
        """
        if not self.trace.saved:
            return self.plain.peak_bytes
        count, chain = self._facts.count, self._chain
        plans = [chain.plan_of(smallest_chain(chain.layers))]
        for firsts in ([0], chain.cuts[:-1], range(0, count, 1 + count // _STAGES)):
            plans.append(Plan(frozenset(), tuple(map(Stage, firsts))))
        ops = tuple(replace(op, seconds=1.0) for op in self.trace.ops)
        refinement = Refinement(Facts(replace(self.trace, ops=ops)))
        least = self.plain.peak_bytes
        found: Plan | None = min(map(self._offer, plans), key=lambda plan: plan.peak_bytes)
        while found is not None:
            plan = self._offer(found)
            least = min(least, plan.peak_bytes)
            level = int(plan.peak_bytes * _SHRINK)
            found = refinement.within(level, [self._known(plan)], math.inf, self._work)
        return least

    def plan(self, memory_budget: int | float | str) -> Plan:
        """Return the plan for a budget; its lower bound is one that SciPy is not imported for.

        Raises:
            BudgetTooSmallError: No plan fits; the message has the smallest budget that works.
        """
        budget = parse_budget(memory_budget, whole=self.plain.peak_bytes)
        plan = self.best(budget)
        if plan is None:
            least, ends = self._surely_least, self._ends
            what = "pass" if ends is None else f"chain of {len(ends)} layers"
            raise BudgetTooSmallError(
                f"this {what} needs at least {least} bytes ({format_bytes(least)}) by all "
                f"plans that were found, got memory_budget={memory_budget!r}"
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
        if budget not in self._looked:
            self._looked.add(budget)
            self._look(budget)
        if self._front.place(budget) < 0 and self.smallest_budget > budget:
            return None
        return self._front.best(budget)

    @property
    def plans(self) -> list[Plan]:
        """The plans found so far that no other one beats, the fewest bytes first."""
        return list(self._front.items)

    def _look(self, budget: int) -> None:
        """Look for a plan, where the bound leaves something to gain."""
        plans = [self._offer(self._chain.plan_of(plan)) for plan in self._over_layers(budget)]
        best = self._front.best(budget)
        limit = math.inf if best is None else best.extra_seconds
        if self.lower_bound.quick_seconds(budget) < _WORTH * limit:
            known = map(self._known, plans)
            found = self._refinement.within(budget, known, limit, self._work)
            if found is not None:
                self._offer(found)

    def _over_layers(self, budget: int) -> list[ChainPlan]:
        """Return the best plans over layers that are predicted to fit into a budget or more."""
        best = self._front.best(budget)
        if (best is not None and not best.extra_seconds) or not self.trace.saved:
            return []
        chain = self._chain
        levels = [max(0, int(budget * times) - chain.outliving_bytes) for times in _STARTS]
        found = plan_chains(chain.layers, levels, self._parts)
        return found or [smallest_chain(chain.layers)]

    @functools.cached_property
    def _parts(self) -> list[Part]:
        return list(find_parts(self._facts, self._chain))

    def _known(self, plan: Plan) -> Known:
        return plan, self._simulator.simulate(plan).recomputed


@functools.lru_cache(maxsize=8)
def search_of(trace: Trace) -> Search:
    """Return the search of a trace, which is remembered."""
    return Search(trace)
