"""Plans for recorded passes under a budget, beside those of peers on the same traces.

The traces are those in `benchmarks/traces/`, if there are any, and networks that are written down
op by op with the proportions of measured ones. All but the planning time is deterministic.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from tests.plans.networks import NETWORKS, gpt, mlp
from tests.plans.peers import PEERS as PLANS_OF_PEERS

from remat.errors import BudgetTooSmallError
from remat.plans import Trace, plan_trace, simulate

from .measure import Result

__all__ = ["run"]

_BUDGETS = (0.75, 0.5, 0.32, 0.2, 0.12)
_TRACES = Path(__file__).parent / "traces"


def run() -> list[Result]:
    traces = {path.stem: Trace.load(path) for path in sorted(_TRACES.glob("*.json"))}
    traces |= {f"{name} (written)": make() for name, make in NETWORKS.items()}
    results = []
    for name, trace in traces.items():
        results.append(_beside_peers(name, trace))
        results += _costs(name, trace)
    return [*results, _planning("gpt", gpt(500)), _planning("unlike layers", mlp(2500))]


def _whole(trace: Trace) -> float:
    return trace.seconds + trace.backward_seconds


def _beside_peers(name: str, trace: Trace) -> Result:
    """Compare with every peer at its own peak."""
    table: dict[str, dict[str, float]] = {}
    plain = trace.plain_peak
    for peer, make in PLANS_OF_PEERS.items():
        theirs = simulate(trace, make(trace))
        ours = plan_trace(trace, theirs.peak_bytes)
        table[peer] = {
            "peak": theirs.peak_bytes / plain,
            "theirs": theirs.extra_seconds / _whole(trace),
            "ours": ours.extra_seconds / _whole(trace),
        }
    excess = max(row["ours"] - row["theirs"] for row in table.values())
    return Result.at_most(
        name, "no more recomputation than any peer at its peak", excess, 1e-12, peers=table
    )


def _costs(name: str, trace: Trace) -> Iterator[Result]:
    """Say what budgets cost, in parts of a plain pass, beside what no plan can avoid."""
    for budget in _BUDGETS:
        try:
            plan = plan_trace(trace, budget)
        except BudgetTooSmallError:
            return
        figure = f"recomputation at {budget:.0%} of the plain peak, in parts of a plain pass"
        share = plan.extra_seconds / _whole(trace)
        bound = plan.lower_bound_seconds / _whole(trace)
        peak = plan.peak_bytes / plan.plain_peak_bytes
        yield Result.information(name, figure, share, lower_bound=bound, peak=peak)


def _planning(name: str, trace: Trace) -> Result:
    begin = time.perf_counter()
    plan_trace(trace, 0.4)
    seconds = time.perf_counter() - begin
    figure = f"{len(trace.ops)} ops are planned within 2 s"
    return Result.at_most(f"planning {name}", figure, seconds, 2.0)
