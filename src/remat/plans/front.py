"""Things that no other one beats in both bytes and seconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Generic, TypeVar

__all__ = ["Front"]

_T = TypeVar("_T")


class Front(Generic[_T]):
    """Things with their bytes and seconds, the fewest bytes first."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.seconds: list[float] = []
        self.items: list[_T] = []

    def add(self, peak: int, seconds: float, item: _T) -> bool:
        """Take a thing if nothing beats it, and drop what it beats."""
        place = bisect_right(self.peaks, peak)
        if place and self.seconds[place - 1] <= seconds:
            return False
        first = last = bisect_left(self.peaks, peak)
        while last < len(self.items) and self.seconds[last] >= seconds:
            last += 1
        self.peaks[first:last] = [peak]
        self.seconds[first:last] = [seconds]
        self.items[first:last] = [item]
        return True

    def place(self, budget: int) -> int:
        """Return the number of the thing with the least seconds within a budget, or -1."""
        return bisect_right(self.peaks, budget) - 1

    def best(self, budget: int) -> _T | None:
        """Return the thing with the least seconds within a budget."""
        place = self.place(budget)
        return self.items[place] if place >= 0 else None
