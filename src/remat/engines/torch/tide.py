"""How high memory stands in a backward pass: what to do without is worth it at the peak alone.

When a pass begins, all inputs of regions are held. Region by region inputs are let go and gradients
of parameters come in their place. So a pass stands highest at its beginning if the inputs are
larger, and at its end if the gradients are.
"""

from __future__ import annotations

__all__ = ["Tide"]


class Tide:
    """The level of memory in the backward pass that is under way, beside that at its beginning.

    It knows one pass at a time. Passes of several threads that take turns begin anew each time, and
    spare memory where there would be no need.
    """

    def __init__(self) -> None:
        self._pass = -1
        self._level = 0
        self._height = 0  # that it had at most

    def asks_to_spare(self, current: int, needed: int, spare: int) -> bool:
        """Return whether a region that needs so many bytes should do without some of them.

        That is if memory would stand higher than it did in this pass.
        """
        self._turn_to(current)
        stands = self._level + needed
        if stands <= self._height:
            return False
        self._height = max(self._height, stands - spare)
        return True

    def went_back(self, current: int, balance: int) -> None:
        """Note by how many bytes the level has changed when a region is gone back through."""
        self._turn_to(current)
        self._level += balance

    def _turn_to(self, current: int) -> None:
        if current != self._pass:
            self._pass, self._level, self._height = current, 0, 0
