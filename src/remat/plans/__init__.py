"""Pure planning over traces: what to keep of a recorded pass, and what to compute again."""

from .plan import Plan, Stage
from .record import PassRecord
from .simulate import Alive, Moment, Simulation, simulate
from .trace import Kind, Op, Trace, Value

__all__ = [
    "Alive",
    "Kind",
    "Moment",
    "Op",
    "PassRecord",
    "Plan",
    "Simulation",
    "Stage",
    "Trace",
    "Value",
    "simulate",
]
