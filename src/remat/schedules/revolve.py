"""Binomial checkpointing, optimal for slots that hold states (Griewank & Walther 2000).

All functions here count *free* slots: the state that a stretch of steps starts from is held by
the runner. The paper's s is therefore `slots + 1`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

from .actions import Action, Advance, Backward, Restore, Save, Tier
from .check import keep_whole

__all__ = ["Revolve", "advances", "reverse", "split"]


def sweeps_needed(steps: int, slots: int) -> int:
    """Return the least r so that no step is advanced over more than r times, for slots >= 1."""
    low, high = 0, 1
    while comb(slots + 1 + high, high) < steps:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if comb(slots + 1 + middle, middle) < steps:
            low = middle + 1
        else:
            high = middle
    return low


def advances(steps: int, slots: int) -> int:
    """Return how many steps the best schedule runs without a tape, its first sweep included.

    >>> advances(1000, 30), advances(1_000_000, 29)
    (2439, 5623008)
    """
    if steps < 2:
        return 0
    slots = min(slots, steps - 1)
    if slots == 0:
        return steps * (steps - 1) // 2
    sweeps = sweeps_needed(steps, slots)
    return sweeps * steps - comb(slots + 1 + sweeps, sweeps - 1)  # Griewank & Walther 2000, t(n, s)


def split(steps: int, slots: int) -> int:
    """Return how far to advance before the next state is saved, for 2 or more steps and slots >= 1.

    Of the optimal answers it is the largest: what lies right of it needs the fewest slots.
    """
    sweeps = sweeps_needed(steps, slots)
    # Left of the checkpoint every step is advanced over once more, with the same slots; right of
    # it there is one slot less. beta(s, r) = comb(s + r, r) bounds both parts.
    left_at_most = comb(slots + sweeps, sweeps - 1)
    right_at_least = comb(slots + sweeps - 1, sweeps - 1)
    return min(left_at_most, steps - right_at_least)


class _Reaches(dict[int, list[int]]):
    """Row s holds beta(s + 1, r) = comb(s + 1 + r, r) for r = 0, 1, …, up to `steps`.

    Rows are made when they are first asked for. Row 0 alone would grow with `steps`; as no split
    needs more of it than row 1 has entries, it stops there.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __missing__(self, slots: int) -> list[int]:
        row = [1]
        if slots == 0:
            row = list(range(1, len(self[1]) + 1))
        else:
            while row[-1] < self.steps:
                row.append(comb(slots + 1 + len(row), len(row)))
        self[slots] = row
        return row


def reverse(start: int, stop: int, slots: int, *, held: Tier) -> Iterator[Action]:
    """Go back from `stop` to `start` with `slots` free slots.

    The working state is before `start`; the same state is held in `held`.
    Long for a reason: it is the hot generator, one pass without calls.
    """
    new = tuple.__new__  # twice as fast as the constructor of a named tuple
    memory = Tier.MEMORY
    reaches = _Reaches(stop - start)
    saved: list[int] = []
    at, end, free = start, stop, slots
    while True:
        length = end - at
        if length <= 2 or not free:
            if length > 1:
                yield new(Advance, (at, end - 1))
            end -= 1
            yield new(Backward, (end,))
        elif length <= free + 2:  # one sweep is enough: save every state on the way
            step = at
            for ahead in range(at + 1, end - 1):
                yield new(Advance, (step, ahead))
                yield new(Save, (ahead, memory))
                step = ahead
            yield new(Advance, (step, end - 1))
            for step in range(end - 1, at, -1):
                yield new(Backward, (step,))
            end = at + 1
        else:
            row = reaches[free]
            sweeps = bisect_left(row, length)
            ahead = min(row[sweeps - 1], length - reaches[free - 1][sweeps - 1])  # as in `split`
            yield new(Advance, (at, at + ahead))
            at += ahead  # what is left has at least free + 1 steps: worth a slot
            yield new(Save, (at, memory))
            saved.append(at)
            free -= 1
            continue
        if end == start:
            return
        at = saved[-1] if saved else start
        if end - at > 1:
            yield new(Restore, (at, memory if saved else held))
        elif saved:  # step `at` alone is left: going back through it frees its slot
            saved.pop()
            free += 1


@dataclass(frozen=True, slots=True)
class Revolve:
    """The fewest evaluations that `slots` states in memory allow.

    >>> schedule = Revolve(1000, 30)
    >>> schedule.evaluations
    3439
    >>> next(iter(schedule))
    Advance(start=0, stop=504)
    """

    steps: int
    slots: int

    def __post_init__(self) -> None:
        keep_whole(self, steps=0, slots=0)

    @property
    def evaluations(self) -> int:
        return advances(self.steps, self.slots) + self.steps

    def __iter__(self) -> Iterator[Action]:
        if not self.steps:
            return iter(())
        return reverse(0, self.steps, self.slots, held=Tier.CALLER)
