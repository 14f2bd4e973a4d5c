"""What engines ask for plans; `graph.Search` is what they get."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from ..errors import BudgetTooSmallError
from ..sizes import format_bytes
from .plan import Plan
from .trace import Trace

__all__ = ["Planner", "Plans", "too_small_share"]


class Plans(Protocol):
    """The plans of one trace, for all budgets."""

    @property
    def memory_bytes(self) -> int:
        """About what it has taken to find them, and what Python does not give back."""

    def plan(self, memory_budget: int | float | str) -> Plan:
        """Return the plan for a budget; raise `BudgetTooSmallError` if none fits."""


Planner = Callable[[Trace], Plans]


def too_small_share(smallest: int, share: float, budget: int) -> BudgetTooSmallError:
    """Return the error for a budget of which only a share is planned for."""
    needed = math.ceil(smallest / share)
    while int(needed * share) < smallest:  # floats are rounded
        needed += 1
    return BudgetTooSmallError(
        f"the pass needs at least {smallest} bytes ({format_bytes(smallest)}) and {share:.0%} of "
        f"{budget} bytes ({format_bytes(budget)}) are planned for; give at least {needed} bytes "
        f"({format_bytes(needed)}), or raise memory_threshold",
        smallest=needed,
    )
