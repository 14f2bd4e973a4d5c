"""Pure planning over traces: what to keep of a recorded pass, and what to compute again."""

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
