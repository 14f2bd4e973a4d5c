"""Runs a schedule over an engine's operations; knows no engine."""

from .accounts import Account, LoopEvents, is_inside_a_region
from .checkpoints import checkpoints_of
from .lengths import KnownLength, Length, Progress, UnknownLength
from .lifecycle import LoopPass, PassSteps
from .options import Budget, LoopOptions, Measured, ScheduleName
from .outputs import StepOutputs, state_and_output
from .runner import LoopRun, StepOperations, Watcher

__all__ = [
    "Account",
    "Budget",
    "KnownLength",
    "Length",
    "LoopEvents",
    "LoopOptions",
    "LoopPass",
    "LoopRun",
    "Measured",
    "PassSteps",
    "Progress",
    "ScheduleName",
    "StepOperations",
    "StepOutputs",
    "UnknownLength",
    "Watcher",
    "checkpoints_of",
    "is_inside_a_region",
    "state_and_output",
]
