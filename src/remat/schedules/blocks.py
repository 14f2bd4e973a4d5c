"""Revolve over blocks of steps that are taped as a whole.

Where a tape costs more than a state, it is best held where it lives shortest: over the last few
steps before backward. So: binomial checkpointing over blocks of equal length, and a block,
once it is reached, is run once with all its tapes held. There is a closed form, so this class is
planned in no time for any number of steps. The optimal schedule of `mixed` needs up to about a
tenth fewer evaluations where the room is tight, and hardly fewer where it is wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .actions import Action, Sizes, Tier
from .check import keep_whole
from .revolve import advances, split
from .walk import Decision, Hold, Run, walk

__all__ = [
    "Blocks",
    "best_blocks",
    "block_lengths",
    "block_runs",
    "decide_in_blocks",
    "tapes_of_block",
]


@dataclass(frozen=True, slots=True)
class Blocks:
    """`slots` states in memory, and the tapes of one block of `block` steps.

    >>> Blocks(1000, block=25, slots=40).evaluations
    1975
    """

    steps: int
    block: int
    slots: int

    def __post_init__(self) -> None:
        keep_whole(self, steps=0, block=1, slots=0)

    @property
    def evaluations(self) -> int:
        return block_runs(self.steps, self.block, self.slots)

    @property
    def recordings(self) -> int:
        """How many runs of tapes are made: one for each block."""
        return -(-self.steps // self.block)

    def peak(self, sizes: Sizes) -> int:
        """Return the most that is held at a time."""
        # Why -2? As for Revolve: neither the first block's state nor the last one's is saved.
        states = min(self.slots, max(0, self.recordings - 2))
        return states * sizes.state + tapes_of_block(self.steps, self.block, sizes)

    def __iter__(self) -> Iterator[Action]:
        return walk(self.steps, self.slots, self._decide)

    def _decide(self, length: int, tier: Tier, slots: int) -> Decision[int]:
        return decide_in_blocks(length, self.block, slots)


def block_runs(steps: int, block: int, slots: int) -> int:
    """Return how many steps are run in all."""
    # The last block may be shorter, but no schedule ever advances over it.
    return block * advances(-(-steps // block), slots) + steps


def decide_in_blocks(length: int, block: int, slots: int) -> Decision[int]:
    """Say what is to be held next in a stretch: a state at the start of a block, or a tape."""
    if length == 1:
        return Run()
    if length <= block:
        return Hold(0, Tier.TAPE, slots, tapes=length - 1)
    blocks = -(-length // block)
    ahead = split(blocks, slots) if slots else blocks - 1
    return Hold(ahead * block, Tier.MEMORY, max(0, slots - 1))


def tapes_of_block(steps: int, block: int, sizes: Sizes) -> int:
    """Return the room that the tapes of a block take."""
    # Why -1? The last tape of a block lives just in passing.
    tapes = max(0, min(block, steps) - 1) * (sizes.tape - sizes.tape_input)
    # The state that the last block starts from is not saved: its first tape alone contains it.
    return tapes + (sizes.tape_input if 1 < block < steps else 0)


def best_blocks(steps: int, room: int, sizes: Sizes) -> Blocks | None:
    """Return the blocks with the fewest evaluations in `room`, or None if no tape fits."""
    best: Blocks | None = None
    for block in block_lengths(steps):
        left = room - tapes_of_block(steps, block, sizes)
        if left >= 0:
            candidate = Blocks(steps, block, left // sizes.state)
            if best is None or candidate.evaluations < best.evaluations:
                best = candidate
    return best


def block_lengths(steps: int) -> Iterator[int]:
    """All short lengths, then ever fewer. They do not depend on the room: more room never hurts."""
    length = 2
    while length < steps:
        yield length
        length += 1 + length // 64
    if steps > 1:
        yield steps
