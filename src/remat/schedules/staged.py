"""States on disk at equal distances, and blocks in memory between them.

The loop is cut into parts that start from states on disk, and each part is reversed as `Blocks`
does it: with states and the tapes of one block in memory. Where the disk is fast, a part is one
block, and no step runs more than twice, in however little memory. There is a closed form, so it
is planned in no time for any number of steps. `Multistage` knows no tapes, but is optimal without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .actions import Action, Sizes, Tier
from .blocks import block_lengths, block_runs, decide_in_blocks, tapes_of_block
from .check import amount, keep_whole
from .walk import Decision, Hold, Lift, walk

__all__ = ["Staged", "best_staged"]


@dataclass(frozen=True, slots=True)
class Staged:
    """Parts of `part` steps, the first of which may be shorter, that start from states on disk.

    In memory are the tapes of one block of `block` steps and, if a part is longer than a block,
    `slots` states. The costs are in forward steps, as those of `Multistage`.

    >>> Staged(1000, part=25, block=25).evaluations
    1975
    >>> schedule = Staged(100_000, part=1000, slots=10, write_cost=2.0, read_cost=2.0)
    >>> schedule.disk_slots, schedule.evaluations, schedule.cost
    (98, 562509, 562901.0)
    """

    steps: int
    part: int
    block: int = 1
    slots: int = 0
    write_cost: float = 1.0
    read_cost: float = 1.0

    def __post_init__(self) -> None:
        keep_whole(self, steps=0, part=1, block=1)
        # Why a slot? A part of several blocks is started again and again, from memory.
        keep_whole(self, slots=int(self.part > self.block))
        amount(self.write_cost, "write_cost", "a number of forward steps")
        amount(self.read_cost, "read_cost", "a number of forward steps")

    @property
    def parts(self) -> int:
        return -(-self.steps // self.part)

    @property
    def disk_slots(self) -> int:
        return max(0, self.parts - 2)  # not for the first part, nor where the sweep ends

    @property
    def evaluations(self) -> int:
        if self.parts < 2:
            return block_runs(self.steps, self.block, self.slots)
        first = self.steps - (self.parts - 1) * self.part
        # The start of the first part needs no slot, nor does that of a part that is one block.
        slots = self.slots - (self.part > self.block)
        runs = (self.parts - 1) * block_runs(self.part, self.block, slots)
        return self.steps - self.part + block_runs(first, self.block, self.slots) + runs

    @property
    def recordings(self) -> int:
        """How many runs of tapes are made: one for each block of a part."""
        first = self.steps - (self.parts - 1) * self.part
        return (self.parts - 1) * -(-self.part // self.block) + -(-first // self.block)

    @property
    def cost(self) -> float:
        """Return the time in forward steps: evaluations, reads and writes."""
        return self.evaluations + self.disk_slots * (self.write_cost + self.read_cost)

    def peak(self, sizes: Sizes) -> int:
        """Return the room in memory that it needs: never less than what is held at a time."""
        blocks = -(-min(self.part, self.steps) // self.block)
        states = min(self.slots, max(0, blocks - 1))
        # A part shorter than a block is taped as a whole.
        taped = min(self.part, self.block)
        return states * sizes.state + tapes_of_block(self.steps, taped, sizes)

    def __iter__(self) -> Iterator[Action]:
        return walk(self.steps, self.slots, self._decide)

    def _decide(self, length: int, tier: Tier, slots: int) -> Decision[int]:
        if length <= self.part:
            if tier is Tier.DISK and length > self.block:
                return Lift(slots - 1)
            return decide_in_blocks(length, self.block, slots)
        after_it = (-(-length // self.part) - 1) * self.part
        if after_it == self.part > self.block:  # the last part: backward begins there
            return Hold(length - after_it, Tier.MEMORY, slots - 1)
        return Hold(length - after_it, Tier.DISK, slots)


def best_staged(
    steps: int,
    room: int,
    disk_slots: int,
    sizes: Sizes,
    write_cost: float,
    read_cost: float,
    *,
    tapes: bool,
) -> Staged | None:
    """Return the cheapest parts and blocks in `room`, or None if none of them uses the disk.

    What is tried does not depend on the room: more room never costs more.
    """
    some = {round(1.15**power) for power in range(200) if 1.15**power <= steps}
    numbers = {parts for parts in some | {disk_slots + 2} if 3 <= parts <= disk_slots + 2}
    best: Staged | None = None
    rank = (float("inf"), 0)
    for block in (1, *block_lengths(steps)) if tapes else (1,):
        left = room - tapes_of_block(steps, block, sizes)
        if left < 0:
            continue
        slots = left // sizes.state
        lengths = {block}
        if slots and block in some:  # all of them would take too long
            lengths |= {-(-steps // (parts * block)) * block for parts in numbers}
        for part in lengths:
            schedule = Staged(
                *(steps, part, block, slots if part > block else 0), write_cost, read_cost
            )
            if not 0 < schedule.disk_slots <= disk_slots:
                continue
            if (found := (schedule.cost, schedule.disk_slots)) < rank:
                best, rank = schedule, found
    return best
