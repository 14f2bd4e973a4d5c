"""Loops under autograd: a loop is one primitive, and the runner computes its gradient."""

from __future__ import annotations

from ...loops import LoopFunctions
from .steps import NumpySteps

__all__ = ["run_loop", "run_while"]

_loops = LoopFunctions(NumpySteps, lambda condition, state: condition(state))
run_loop = _loops.run_loop
run_while = _loops.run_while
