"""Runs a schedule over an engine's verbs; knows no engine."""

from .options import Budget, LoopOptions, Measured, ScheduleName
from .runner import LoopRun, Verbs, Watcher

__all__ = ["Budget", "LoopOptions", "LoopRun", "Measured", "ScheduleName", "Verbs", "Watcher"]
