"""Plans for recorded passes under a budget, beside an oracle and the plans of peers.

The traces are those in `benchmarks/traces/`. All figures but the planning time are deterministic.
The oracle is the integer programme over stages of `tests/plans/oracle.py`, with a stage at every
cut of the trace. It is asked where it is small enough, and has a minute for each budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from tests.plans.networks import gpt, mlp
from tests.plans.oracle import StagedModel
from tests.plans.peers import PEERS as PLANS_OF_PEERS

from remat.errors import BudgetTooSmallError
from remat.plans import Plan, Trace, plan_trace, simulate
from remat.plans.facts import Facts
from remat.plans.layers import choose_cuts

from .measure import Result

__all__ = ["run"]

_BUDGETS = (0.75, 0.5, 0.4, 0.32, 0.2, 0.12)
_TRACES = Path(__file__).parent / "traces"
_ORACLE_OPS, _ORACLE_SECONDS = 200, 60.0  # of larger traces it finds nothing in this time

_SHOWN = {  # the tests compare with more of them
    "per block": "per block",
    "root of n": "sqrt(n) segments",
    "save matmuls": "save matmuls",
    "bytes 0.5": "knapsack, half of the bytes",
    "bytes 0.15": "knapsack, 15% of the bytes",
}


def run() -> list[Result]:
    traces = {path.stem: Trace.load(path) for path in sorted(_TRACES.glob("*.json"))}
    plan_trace(gpt(1), 0.9)  # imports
    planning = [_planning(name, trace) for name, trace in traces.items()]
    planning += [_planning("gpt", gpt(500), 2.0), _planning("unlike layers", mlp(2500), 2.0)]
    results: list[Result] = []
    for name, trace in traces.items():
        results += [*_at_budgets(name, trace), *_beside_peers(name, trace)]
    return [*results, *planning]


def _pass_seconds(trace: Trace) -> float:
    return trace.seconds + trace.backward_seconds


def _at_budgets(name: str, trace: Trace) -> Iterator[Result]:
    """Say what budgets cost, in parts of a plain pass, beside a bound and the oracle."""
    small = len(trace.ops) <= _ORACLE_OPS
    oracle = StagedModel(trace, choose_cuts(Facts(trace))[:-1]) if small else None
    for budget in _BUDGETS:
        try:
            plan = plan_trace(trace, budget)
        except BudgetTooSmallError:
            return
        found = None
        if oracle is not None:
            found = oracle.solve(int(budget * plan.plain_peak_bytes), seconds=_ORACLE_SECONDS)
        yield _at_budget(f"{name} at {budget:.0%} of the plain peak", trace, plan, found)


def _at_budget(title: str, trace: Trace, plan: Plan, found: tuple[float, Plan] | None) -> Result:
    share = plan.extra_seconds / _pass_seconds(trace)
    bound = plan.lower_bound_seconds / _pass_seconds(trace)
    figure = f"recomputation, of a plain pass; lower bound {bound:.1%}"
    if found is None:
        return Result.information(title, figure, share, lower_bound=bound)
    oracle = found[0] / _pass_seconds(trace)
    figure += f", optimum over stages {oracle:.1%}"
    return Result.at_most(title, figure, share, 1.05 * oracle, lower_bound=bound, oracle=oracle)


def _beside_peers(name: str, trace: Trace) -> Iterator[Result]:
    """Compare with peers at their own peaks."""
    for peer, title in _SHOWN.items():
        theirs = simulate(trace, PLANS_OF_PEERS[peer](trace))
        ours = plan_trace(trace, theirs.peak_bytes)
        peak = theirs.peak_bytes / ours.plain_peak_bytes
        share = ours.extra_seconds / _pass_seconds(trace)
        limit = theirs.extra_seconds / _pass_seconds(trace) + 1e-12
        figure = f"recomputation, of a plain pass, at its peak of {peak:.0%}; the limit is theirs"
        yield Result.at_most(f"{name} beside {title}", figure, share, limit)


def _planning(name: str, trace: Trace, limit: float | None = None) -> Result:
    begin = time.process_time()
    plan_trace(trace, 0.4)
    seconds = time.process_time() - begin
    title, figure = f"planning {name}", f"seconds to plan {len(trace.ops):,} ops"
    if limit is None:
        return Result.information(title, figure, seconds)
    return Result.at_most(title, figure, seconds, limit)
