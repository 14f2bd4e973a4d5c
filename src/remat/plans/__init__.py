"""Pure planning over traces: what to keep of a recorded pass, and what to compute again."""

from typing import TYPE_CHECKING, Any

from .plan import Plan, Stage
from .record import PassRecord
from .simulate import Alive, Moment, Simulation, simulate
from .trace import Kind, Op, Trace, Value

if TYPE_CHECKING:
    from .graph import Frontier, FrontierPoint, frontier, plan_trace

__all__ = [
    "Alive",
    "Frontier",
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


def __getattr__(name: str) -> Any:
    """Load the planner when it is first asked for: importing remat stays light."""
    if name in {"Frontier", "FrontierPoint", "frontier", "plan_trace"}:
        from . import graph  # noqa: PLC0415

        return getattr(graph, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
