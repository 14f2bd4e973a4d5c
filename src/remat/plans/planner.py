"""What engines ask for plans; `graph.Search` is what they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .plan import Plan
from .trace import Trace

__all__ = ["Planner", "Plans"]


class Plans(Protocol):
    """The plans of one trace, for all budgets."""

    @property
    def memory_bytes(self) -> int:
        """About what it has taken to find them, and what Python does not give back."""

    def plan(self, memory_budget: int | float | str) -> Plan:
        """Return the plan for a budget; raise `BudgetTooSmallError` if none fits."""


Planner = Callable[[Trace], Plans]
