"""States on disk at equal distances, and binomial schedules in memory between them.

Not optimal, as `Multistage` is, but it needs no table: for loops that are too long for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from .actions import Action, Advance, Drop, Restore, Save, Tier
from .check import amount, keep_whole
from .revolve import advances, reverse
from .uniform import even_positions

__all__ = ["Staged", "best_staged"]

_TOLERANCE = 1.1


@dataclass(frozen=True, slots=True)
class Staged:
    """A loop in `parts` parts of equal length; those between the first and the last start on disk.

    The costs are in forward steps, as those of `Multistage`.

    >>> schedule = Staged(100_000, slots=10, parts=100, write_cost=2.0, read_cost=2.0)
    >>> schedule.disk_slots, schedule.evaluations, schedule.cost
    (98, 562509, 562901.0)
    """

    steps: int
    slots: int
    parts: int
    write_cost: float = 1.0
    read_cost: float = 1.0

    def __post_init__(self) -> None:
        keep_whole(self, steps=0, slots=1, parts=1)
        amount(self.write_cost, "write_cost", "a number of forward steps")
        amount(self.read_cost, "read_cost", "a number of forward steps")

    @property
    def positions(self) -> list[int]:
        """Where the parts begin, but for the first."""
        return list(even_positions(self.steps, self.parts - 1))

    @property
    def disk_slots(self) -> int:
        return max(0, min(self.parts, self.steps) - 2)  # the last part starts where the sweep ends

    @property
    def evaluations(self) -> int:
        if not self.steps:
            return 0
        parts = min(self.parts, self.steps)
        short, longer = divmod(self.steps, parts)
        # The shorter parts come first, and the first one needs no slot for its start.
        work = (parts - longer) * advances(short, self.slots - 1)
        work += longer * advances(short + 1, self.slots - 1)
        first = short if longer < parts else short + 1
        work += advances(first, self.slots) - advances(first, self.slots - 1)
        last = short + (longer > 0)
        sweep = self.steps - last if parts > 1 else 0
        return sweep + work + self.steps

    @property
    def cost(self) -> float:
        """Return the time in forward steps: evaluations, reads and writes."""
        return self.evaluations + self.disk_slots * (self.write_cost + self.read_cost)

    def __iter__(self) -> Iterator[Action]:
        edges = [0, *self.positions, self.steps]
        for start, stop in pairwise(edges[:-1]):
            yield Advance(start, stop)
            yield Save(stop, Tier.MEMORY if stop == edges[-2] else Tier.DISK)
        for start, stop in reversed(list(pairwise(edges))):
            if stop == start:
                return  # no steps at all
            if not start:
                if stop < self.steps and stop > 1:
                    yield Restore(0, Tier.CALLER)
                yield from reverse(0, stop, self.slots, held=Tier.CALLER)
            else:
                if stop < self.steps:
                    yield Restore(start, Tier.DISK)
                    yield Save(start, Tier.MEMORY)
                    yield Drop(start, Tier.DISK)
                yield from reverse(start, stop, self.slots - 1, held=Tier.MEMORY)


def best_staged(steps: int, slots: int, disk_slots: int, write: float, read: float) -> Staged:
    """Return the fewest parts that cost at most a little more than the best number of parts.

    Twice the room on disk for a few percent of the time would be a bad bargain.
    """
    most = max(1, min(disk_slots + 2, steps))
    tried = {min(most, round(1.15**power)) for power in range(200) if 1.15**power <= 2 * most}
    schedules = [Staged(steps, slots, parts, write, read) for parts in sorted(tried)]
    enough = _TOLERANCE * min(schedule.cost for schedule in schedules)
    return next(schedule for schedule in schedules if schedule.cost <= enough)
