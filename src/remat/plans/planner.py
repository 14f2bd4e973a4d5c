"""What engines ask for plans; `search.Search` is what they get."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from ..errors import BudgetTooSmallError
from ..sizes import format_bytes
from .plan import Plan
from .trace import Trace

__all__ = ["Planner", "Plans", "too_small"]


class Plans(Protocol):
    """The plans of one trace, for all budgets."""

    def plan(self, memory_budget: int | float | str) -> Plan:
        """Return the plan for a budget; raise `BudgetTooSmallError` if none fits."""


Planner = Callable[[Trace], Plans]


def too_small(
    error: BudgetTooSmallError, given: int | float | str, budget: int, share: float
) -> BudgetTooSmallError:
    """Return an error in the words of the user, who gave `given`, which are `budget` bytes.

    If only a share of them is planned for, they were given as `max_memory_mb`.
    """
    smallest = error.smallest
    if smallest is None:
        return error
    fact = str(error).partition(", got ")[0]
    if share == 1:
        meaning = "" if isinstance(given, int) else f", which is {format_bytes(budget)}"
        return BudgetTooSmallError(
            f"{fact}, got memory_budget={given!r}{meaning}; pass "
            f"memory_budget={_like(given, smallest, budget)} or more, or a smaller input",
            smallest=smallest,
        )
    needed = math.ceil(smallest / share)
    while int(needed * share) < smallest:  # floats are rounded
        needed += 1
    return BudgetTooSmallError(
        f"{fact}, got max_memory_mb={budget / 10**6:g}, of which memory_threshold={share:g} is "
        f"planned for; pass max_memory_mb={_rounded_up(needed / 10**6)} or more, or a larger "
        "memory_threshold",
        smallest=needed,
    )


def _like(given: int | float | str, nbytes: int, budget: int) -> str:
    """Write bytes as a budget was written: in bytes, as text, or as a fraction."""
    if isinstance(given, str):
        return f'"{math.ceil(nbytes / 1000)}KB"'
    if isinstance(given, float) and budget and nbytes * given <= budget:
        return min(_rounded_up(nbytes * given / budget), "1.0", key=float)  # never above a whole
    return str(nbytes)


def _rounded_up(number: float) -> str:
    """Write a number with few digits, none smaller than it is."""
    digits = max(0, 3 - math.ceil(math.log10(number)))
    return f"{math.ceil(number * 10**digits * (1 + 1e-9)) / 10**digits:.{digits}f}"
