"""Runs a schedule over an engine's operations; knows no engine."""

from .accounts import Account, LoopEvents, is_inside_a_region
from .arrays import LoopArrays
from .calls import LoopFunctions
from .checkpoints import no_gradient_of_checkpoints
from .lifecycle import LoopPass
from .numbers import ClosedOverNumbers
from .options import LoopOptions, Measured, MemorySize, ScheduleName
from .protocols import LoopObserver, Progress, StepOperations
from .runner import LoopRun
from .scans import StepOutputs
from .steps import EngineSteps, HeldState, LoopCall, raised_in

__all__ = [
    "Account",
    "ClosedOverNumbers",
    "EngineSteps",
    "HeldState",
    "LoopArrays",
    "LoopCall",
    "LoopEvents",
    "LoopFunctions",
    "LoopObserver",
    "LoopOptions",
    "LoopPass",
    "LoopRun",
    "Measured",
    "MemorySize",
    "Progress",
    "ScheduleName",
    "StepOperations",
    "StepOutputs",
    "is_inside_a_region",
    "no_gradient_of_checkpoints",
    "raised_in",
]
