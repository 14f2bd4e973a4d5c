"""Every tape is held: no step runs twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .actions import Action, Backward, Tape
from .check import keep_whole

__all__ = ["StoreAll"]


@dataclass(frozen=True, slots=True)
class StoreAll:
    """What differentiation does without checkpointing.

    >>> list(StoreAll(2))
    [Tape(step=0), Backward(step=1), Backward(step=0)]
    """

    steps: int

    def __post_init__(self) -> None:
        keep_whole(self, steps=0)

    @property
    def evaluations(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Action]:
        # Why -1? The last step is taped as it is gone back through, so it takes no slot.
        yield from map(Tape, range(self.steps - 1))
        yield from map(Backward, reversed(range(self.steps)))
