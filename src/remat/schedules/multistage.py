"""States in memory and on disk, each with its own price (Herrmann & Pallez 2020, H-Revolve).

Memory is free to use; a disk write and a disk read cost as much as so many forward steps. What a
step back costs is not asked for: it only adds a constant, so a plan must not depend on it.

The dynamic programme holds states on disk on the outside and in memory on the inside: a state on
disk is read seldom and waits long. (The tests compare with brute force over all two-tier
schedules, which finds nothing better.) With m memory slots and d disk slots, starting from a
state that costs `read` to load again (0 unless it is on disk), the best of

    memory only      M(n, m)          hold nothing         n + read + M(n - 1, m)
                                      in memory k ahead    k + M(n - k, m - 1) + read + M(k, m)
                                      lift the start       M(n, m - 1) with read = 0
    disk first       k + write + D(n - k, d - 1) + read + D(k, d)

M for a start in memory is Revolve, which has a closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
import numpy.typing as npt

from .actions import Action, Advance, Tier
from .check import amount, keep_whole
from .revolve import split
from .walk import Decision, Hold, Lift, Run, walk

__all__ = ["Multistage"]

Table = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Multistage:
    """The least time with `slots` states in memory and `disk_slots` on disk.

    The costs are in forward steps: `write_cost=2` is a write that takes as long as two steps.

    >>> schedule = Multistage(1000, slots=10, disk_slots=20, write_cost=2.0, read_cost=2.0)
    >>> schedule.cost, schedule.evaluations
    (3749.0, 3669)
    """

    steps: int
    slots: int
    disk_slots: int
    write_cost: float = 1.0
    read_cost: float = 1.0

    def __post_init__(self) -> None:
        keep_whole(self, steps=0, slots=0, disk_slots=0)
        amount(self.write_cost, "write_cost", "a number of forward steps")
        amount(self.read_cost, "read_cost", "a number of forward steps")

    @property
    def cost(self) -> float:
        """Return the time in forward steps: evaluations, reads and writes."""
        return self._programme().cost()

    @property
    def evaluations(self) -> int:
        runs = 0
        for action in self:
            if isinstance(action, Advance):
                runs += action.stop - action.start
        return runs + self.steps

    def __iter__(self) -> Iterator[Action]:
        programme = self._programme()
        return walk(self.steps, (self.slots, self.disk_slots, True), programme.decide)

    def _programme(self) -> _MultistageProgramme:
        return _programme(
            self.steps, self.slots, self.disk_slots, float(self.write_cost), float(self.read_cost)
        )


# Memory slots, disk slots, and whether disk may still be used: not inside a stretch in memory.
_Room = tuple[int, int, bool]


@lru_cache(maxsize=4)
def _programme(
    steps: int, slots: int, disk: int, write: float, read: float
) -> _MultistageProgramme:
    return _MultistageProgramme(steps, slots, disk, write, read)


class _MultistageProgramme:
    def __init__(self, steps: int, slots: int, disk: int, write: float, read: float) -> None:
        self.steps = steps
        self.slots = min(slots, max(0, steps - 1))
        self.disk = min(disk, max(0, steps - 1))
        self.write, self.read = write, read
        self.revolve = _revolve_table(steps, self.slots)
        self.from_disk = self._memory_only()
        self.outer = self._with_disk()  # [start is on disk, length, disk slots]

    def cost(self) -> float:
        return float(self.outer[0, self.steps, self.disk])

    def _memory_only(self) -> Table:
        """Table [length, slots] for a start on disk, with memory only to the right of it."""
        table = np.zeros((self.steps + 1, self.slots + 1))
        table[1:2] = 1
        left = table + np.arange(self.steps + 1.0)[:, None] + self.read
        for length in range(2, self.steps + 1):
            best = length + self.read + table[length - 1]
            if self.slots:
                right = self.revolve[length - 1 : 0 : -1, :-1]
                ahead = (left[1:length, 1:] + right).min(axis=0)
                np.minimum(best[1:], ahead, out=best[1:])
                np.minimum(best[1:], self.revolve[length, :-1], out=best[1:])
            table[length] = best
            left[length] = best + length + self.read
        return table

    def _with_disk(self) -> Table:
        table = np.zeros((2, self.steps + 1, self.disk + 1))
        inner = np.stack([self.revolve[:, -1], self.from_disk[:, -1]])
        again = np.array([0.0, self.read])[:, None, None]
        left = np.zeros_like(table)
        for length in range(1, self.steps + 1):
            best = np.repeat(inner[:, length, None], self.disk + 1, axis=1)
            if self.disk and length > 1:
                right = table[1, length - 1 : 0 : -1, :-1]
                ahead = (left[:, 1:length, 1:] + right).min(axis=1) + self.write
                np.minimum(best[:, 1:], ahead, out=best[:, 1:])
            table[:, length] = best
            left[:, length] = best + length + again[:, 0]
        return table

    @lru_cache(maxsize=4096)  # noqa: B019  (lives as long as the programme, of which there are 4)
    def decide(self, length: int, tier: Tier, room: _Room) -> Decision[_Room]:
        slots, disk, disk_allowed = min(room[0], self.slots), min(room[1], self.disk), room[2]
        on_disk = int(tier is Tier.DISK)
        again = self.read * on_disk
        if length == 1:
            return Run()
        if disk_allowed:
            best = self.outer[on_disk, length, disk]
            inner = (self.from_disk if on_disk else self.revolve)[length, slots]
            if best < inner and disk:
                ahead = np.arange(1, length)
                left = self.outer[on_disk, 1:length, disk] + ahead + again
                right = self.outer[1, length - 1 : 0 : -1, disk - 1] + self.write
                return Hold(int((left + right).argmin()) + 1, Tier.DISK, (slots, disk - 1, True))
        if not slots:
            return Run()
        if not on_disk:
            return Hold(split(length, slots), Tier.MEMORY, (slots - 1, 0, False))
        options = np.arange(1.0, length) + self.revolve[length - 1 : 0 : -1, slots - 1]
        options += self.from_disk[1:length, slots] + again
        # With a slot to spare, holding nothing is never better than one of these.
        if self.revolve[length, slots - 1] <= options.min():
            return Lift((slots - 1, 0, False))
        return Hold(int(options.argmin()) + 1, Tier.MEMORY, (slots - 1, 0, False))


def _revolve_table(steps: int, slots: int) -> Table:
    """Table [length, slots] of Revolve's evaluations, for a start in memory."""
    table = np.zeros((steps + 1, slots + 1))
    for free in range(slots + 1):
        counts: list[int] = []
        while sum(counts) < steps:
            # comb(free + r, r) steps are advanced over r times and then run with a tape
            counts.append(min(steps, comb(free + len(counts), free)))
        runs = np.repeat(np.arange(1, len(counts) + 1), counts)[:steps]
        table[1:, free] = np.cumsum(runs)
    return table
