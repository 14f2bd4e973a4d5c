"""Checkpoints at equal distances, and backward over checkpoints that are already placed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .actions import Action, Advance, Restore, Save, Tier
from .check import keep_whole
from .revolve import advances, reverse

__all__ = ["Uniform", "even_positions", "reversal", "reversal_advances"]


def even_positions(steps: int, slots: int) -> Iterator[int]:
    """Generate the positions that cut `steps` into `slots + 1` parts, the shorter ones first.

    >>> list(even_positions(10, 3))
    [2, 4, 7]
    """
    slots = max(0, min(slots, steps - 1))
    short, longer = divmod(steps, slots + 1)
    first_longer = slots + 1 - longer
    at = 0
    for part in range(slots):
        at += short + (part >= first_longer)
        yield at


def reversal(steps: int, positions: Sequence[int], slots: int, *, at: int) -> Iterator[Action]:
    """Go back over states held at `positions`, each part binomially with the slots free by then.

    The working state is before step `at`: loaded again unless backward starts there.
    """
    end = steps
    for held_before in range(len(positions), -1, -1):
        start = positions[held_before - 1] if held_before else 0
        tier = Tier.MEMORY if held_before else Tier.CALLER
        if start != at and end - start > 1:
            yield Restore(start, tier)
        yield from reverse(start, end, slots - held_before, held=tier)
        end = start


def reversal_advances(steps: int, positions: Sequence[int], slots: int) -> int:
    """Count the steps that `reversal` runs without a tape."""
    edges = [0, *positions, steps]
    return sum(
        advances(stop - start, slots - held) for held, (start, stop) in enumerate(pairwise(edges))
    )


@dataclass(frozen=True, slots=True)
class Uniform:
    """States held at equal distances; slots that fall free in backward are used again.

    >>> Uniform(1000, 31).evaluations
    3960
    """

    steps: int
    slots: int

    def __post_init__(self) -> None:
        keep_whole(self, steps=0, slots=0)

    @property
    def positions(self) -> list[int]:
        # Why -1? The state before the last step is where the sweep ends: saving it saves nothing.
        return list(even_positions(self.steps, min(self.slots, max(0, self.steps - 2))))

    @property
    def evaluations(self) -> int:
        positions = self.positions
        sweep = positions[-1] if positions else 0
        return sweep + reversal_advances(self.steps, positions, self.slots) + self.steps

    def __iter__(self) -> Iterator[Action]:
        if not self.steps:
            return
        at = 0
        for position in self.positions:
            yield Advance(at, position)
            yield Save(position)
            at = position
        yield from reversal(self.steps, self.positions, self.slots, at=at)
