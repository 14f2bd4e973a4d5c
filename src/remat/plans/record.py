"""What was planned for a pass, and what was measured when it ran."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Plan
from .trace import Trace

__all__ = ["PassRecord"]


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A pass under a budget.

    `measured_peak` counts the storages of activations, recomputed ones included, and their
    gradients if `counts_gradients` is true. `curve` is what was held, from moment to moment.
    """

    trace: Trace
    plan: Plan
    budget: int
    measured_peak: int = 0
    counts_gradients: bool = False
    recompute_seconds: float = 0.0
    recomputed_ops: int = 0
    followed: bool = False  # the pass was planned before it ran
    curve: tuple[int, ...] = ()
