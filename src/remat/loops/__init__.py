"""Runs a schedule over an engine's operations; knows no engine."""

from .accounts import Account, LoopEvents, is_inside_a_region
from .checkpoints import checkpoints_of
from .lengths import KnownLength, Length, UnknownLength
from .lifecycle import LoopPass
from .options import LoopOptions, Measured, MemorySize, ScheduleName
from .outputs import StepOutputs, state_and_output
from .protocols import LoopObserver, LoopSteps, PassSteps, Progress, StepOperations
from .runner import LoopRun

__all__ = [
    "Account",
    "KnownLength",
    "Length",
    "LoopEvents",
    "LoopObserver",
    "LoopOptions",
    "LoopPass",
    "LoopRun",
    "LoopSteps",
    "Measured",
    "MemorySize",
    "PassSteps",
    "Progress",
    "ScheduleName",
    "StepOperations",
    "StepOutputs",
    "UnknownLength",
    "checkpoints_of",
    "is_inside_a_region",
    "state_and_output",
]
