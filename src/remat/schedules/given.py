"""Checkpoints at given positions, and between them one part taped at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..sizes import shown
from .actions import Action, Advance, Backward, Save, Tape
from .check import keep_whole, whole_number

__all__ = ["Given"]


@dataclass(frozen=True, slots=True)
class Given:
    """States saved before the steps at `positions`, and the tapes of one part between two of them.

    The steps from the last position on are taped as they run; those before it run twice, the
    second time with all tapes of their part held.

    >>> Given(10, (3, 6)).evaluations
    16
    >>> list(Given(2, (1,)))
    [Advance(start=0, stop=1), Save(step=1, tier=MEMORY), Backward(step=1), Backward(step=0)]
    """

    steps: int
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        keep_whole(self, steps=0)
        if not isinstance(self.positions, Iterable):
            raise TypeError(f"positions must be whole numbers, got {shown(self.positions)}")
        positions = tuple(whole_number(p, "a position", least=1) for p in self.positions)
        for before, after in pairwise((*positions, self.steps)):
            if not before < after:
                raise ValueError(
                    f"positions must rise and lie before the end, {self.steps}, got "
                    f"{shown(positions)}"
                )
        object.__setattr__(self, "positions", positions)

    @property
    def evaluations(self) -> int:
        return self.steps + max(self.positions, default=0)

    def __iter__(self) -> Iterator[Action]:
        for start, stop in pairwise((0, *self.positions)):
            yield Advance(start, stop)
            # Also before the last part, whose first tape contains it: a caller that gives positions
            # wants the states there.
            yield Save(stop)
        edges = (0, *self.positions, self.steps)
        for start, stop in reversed(list(pairwise(edges))):
            # Why -1? The last step of a part is taped as it is gone back through.
            yield from map(Tape, range(start, stop - 1))
            yield from map(Backward, reversed(range(start, stop)))
