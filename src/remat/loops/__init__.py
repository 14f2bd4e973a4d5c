"""Runs a schedule over an engine's verbs; knows no engine."""

from .accounts import Account, LoopTales, is_inside_a_region
from .checkpoints import checkpoints_of
from .lengths import KnownLength, Length, Progress, UnknownLength
from .options import Budget, LoopOptions, Measured, ScheduleName
from .outputs import StepOutputs, state_and_output
from .runner import LoopRun, Verbs, Watcher

__all__ = [
    "Account",
    "Budget",
    "KnownLength",
    "Length",
    "LoopOptions",
    "LoopRun",
    "LoopTales",
    "Measured",
    "Progress",
    "ScheduleName",
    "StepOutputs",
    "UnknownLength",
    "Verbs",
    "Watcher",
    "checkpoints_of",
    "is_inside_a_region",
    "state_and_output",
]
