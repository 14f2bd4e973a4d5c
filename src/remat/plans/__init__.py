"""Pure planning over traces: what to keep of a recorded pass, and what to compute again.

A `Trace` says what a pass did (`trace.py`), a `Plan` what to do about it (`plan.py`), and
`simulate.py`, which shares no code with the planner, what a plan takes. How a plan is found
(`search.py`, one `Search` for each trace):

**What is minimized.** The seconds of recomputation, so that the peak of forward and backward stays
within a budget. To decide whether this can be done in so many seconds is NP-complete, for each
value may be kept, or computed again at any time of backward. So there are two steps, and a
simulator.

**1. The dynamic programme over cuts** (`layers.py`, `parts.py`, `chain.py`). The trace is cut at up
to 47 places where few bytes cross. What is between two cuts is a layer, and a plan is a row of

- layers that keep all that their backward needs;
- *parts*: up to four layers in a row that keep some of it and recompute the rest in one go;
- *segments*: layers that keep their input only. When backward comes to them they run again, by a
  row of their own: layers and segments in it, to any depth. These are the rounds that small budgets
  need (Beaumont, Herrmann, Pallez, Shilova 2019).

The table has the least seconds for each range of layers and each number of free bytes, in steps of
one part in 500. It is exact for these rows, up to rounding: for what a layer takes in sum, which is
an upper bound of what it takes op by op. Eight ways to keep less are known of each part: of all
values the one is dropped next that costs the fewest seconds per byte (`eviction.py`). Plans for 1,
1.1, 1.25 and 1.5 times the budget are made.

**2. Refinement op by op** (`refine.py`). The plans of step 1, and the pass that keeps everything,
are brought within the budget: at the highest peak, by the same rule, the cheapest value that is
idle there is dropped, or a smaller one that it is made of is held instead. Then something that is
recomputed is restored and the excess dropped elsewhere, as long as that takes fewer seconds. It is
a local search: exact in what it counts (`lifetimes.py` agrees with the simulator), but with no
promise of an optimum. Its work is bounded, whatever the size of the trace.

**3. The simulator.** All plans are simulated, and those that no other one beats in bytes and
seconds are held (`front.py`). A budget gets the one with the fewest seconds of all that fit.

**How far it may be off.** `bounds.py` has seconds that no plan can avoid; where they are within 1 %
of a plan, nothing is searched. At half the plain peak the plans of the five recorded traces
(benchmarks/traces) are 0.1 to 4 % of a pass above this bound; at budgets of a few layers, where
what lives for a moment decides, the bound says little. Up to rounding no plan is slower than the
best row of layers as `chain.py` counts them. Tests compare plans with brute force, with an integer
programme over stages, and with what other tools do.

A program that is known in other sizes takes its plan from the search that exists (`similar.py`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .plan import Plan, Stage
from .record import PassRecord
from .simulate import Alive, Moment, Simulation, simulate
from .trace import Kind, Op, Trace, Value

if TYPE_CHECKING:
    from .curve import FrontierCurve, FrontierPoint, frontier
    from .search import plan_trace

__all__ = [
    "Alive",
    "FrontierCurve",
    "FrontierPoint",
    "Kind",
    "Moment",
    "Op",
    "PassRecord",
    "Plan",
    "Simulation",
    "Stage",
    "Trace",
    "Value",
    "frontier",
    "plan_trace",
    "simulate",
]

_LATE = {
    "FrontierCurve": "curve",
    "FrontierPoint": "curve",
    "frontier": "curve",
    "plan_trace": "search",
}


def __getattr__(name: str) -> Any:
    """Load the planner when it is first asked for: importing remat stays light."""
    if name in _LATE:
        return getattr(import_module(f".{_LATE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
