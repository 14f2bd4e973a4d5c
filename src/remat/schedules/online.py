"""The length is not known in advance: place checkpoints while the loop runs.

Placement is ours: whenever giving up one checkpoint and saving the working state instead would
make backward cheaper if the loop ended after the next step, it is done, and the checkpoint
given up is the one whose loss costs least. Both sides of that bargain are closed forms, so the
next place to save is known the moment the last one was saved, and the steps between are one
action. Backward is binomial in each part (as for `uniform`), with the slots free by then.

Against the optimum for a length known in advance it loses little (docs/schedules.md has the
table), where the placement of Wang, Moin & Iaccarino 2009 loses up to a fifth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from .actions import Action, Advance, Drop, Save
from .check import keep_whole
from .revolve import advances
from .uniform import reversal, reversal_advances

__all__ = ["Online", "OnlineRun"]

_cost = lru_cache(maxsize=2**14)(advances)


@dataclass(frozen=True, slots=True)
class Online:
    """Checkpoints for a loop that may end after any step.

    >>> Online(30).run(1000).evaluations  # a length known in advance needs 3439
    3443
    """

    slots: int

    def __post_init__(self) -> None:
        keep_whole(self, slots=0)

    def run(self, steps: int) -> OnlineRun:
        """Return the whole schedule for a loop that turns out to have `steps` steps."""
        return OnlineRun(steps, self.slots)

    def forward(self) -> Iterator[Action]:
        """Generate the forward pass, without end: the loop may end inside any `Advance`."""
        positions: list[int] = []
        at = 0
        while True:
            ahead, given_up = self._next_save(positions, at)
            yield Advance(at, at + ahead)
            at += ahead
            if given_up is not None:
                yield Drop(positions.pop(given_up))
            if self.slots:
                yield Save(at)
                positions.append(at)

    def backward(self, steps: int, positions: list[int]) -> Iterator[Action]:
        """Generate the backward pass after `steps` steps; states are held at `positions`."""
        if steps:
            yield from reversal(steps, positions, self.slots, at=steps)

    def _next_save(self, positions: list[int], at: int) -> tuple[int, int | None]:
        """Return how far to go before the next save, and which checkpoint to give up for it."""
        if not self.slots:
            return 2**20, None
        if len(positions) < self.slots:
            return 1, None
        edges = [0, *positions]
        lengths = [stop - start for start, stop in pairwise(edges)]
        loss, given_up = self._least_loss(lengths)
        last = lengths[-1]
        # Either the last checkpoint itself moves on by x steps …
        outer = _first(lambda x: _cost(last, 1) + x * (x + 1) // 2 > _cost(last + x, 1))
        # … or another one is given up: then the tail no longer needs quadratic re-runs.
        inner = _first(lambda x: x > outer or x * (x + 1) // 2 - _cost(x, 1) > loss)
        return (inner, given_up) if inner <= outer else (outer, self.slots - 1)

    def _least_loss(self, lengths: list[int]) -> tuple[float, int]:
        """Return what it costs to give up the most dispensable checkpoint but the last."""
        slots = self.slots
        now = [_cost(length, slots - part) for part, length in enumerate(lengths)]
        # Right of the gap every part has one free slot more.
        then = [_cost(length, slots - part + 1) for part, length in enumerate(lengths)]
        before = [0, *accumulate(now)]
        after = _suffix_sums(then)
        losses = [
            (before[j - 1] + _cost(lengths[j - 1] + lengths[j], slots - j + 1) + after[j + 1], j)
            for j in range(1, slots)
        ]
        best, j = min(losses, default=(float("inf"), slots))
        return best - before[-1], j - 1


def _suffix_sums(values: list[int]) -> list[int]:
    """Return the sums of values[i:] for i = 0 … len(values)."""
    return [*accumulate(reversed(values), initial=0)][::-1]


def _first(holds: Callable[[int], bool]) -> int:
    """Return the least positive number for which a condition holds that then goes on to hold."""
    high = 1
    while not holds(high):
        high *= 2
    low = high // 2 + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """What `Online` does for a loop that turned out to have `steps` steps."""

    steps: int
    slots: int

    def __post_init__(self) -> None:
        keep_whole(self, steps=0, slots=0)

    @property
    def evaluations(self) -> int:
        positions: list[int] = []
        for action in self._forward():
            note(action, positions)
        # Why 2n? The end shows only when the last step has run without a tape.
        return 2 * self.steps + reversal_advances(self.steps, positions, self.slots)

    def __iter__(self) -> Iterator[Action]:
        positions: list[int] = []
        for action in self._forward():
            yield action
            note(action, positions)
        yield from Online(self.slots).backward(self.steps, positions)

    def _forward(self) -> Iterator[Action]:
        for action in Online(self.slots).forward() if self.steps else ():
            if isinstance(action, Advance) and action.stop >= self.steps:
                yield Advance(action.start, self.steps)
                return
            yield action


def note(action: Action, positions: list[int]) -> None:
    """Follow a save or a drop of the forward pass in the list of positions that are held."""
    if isinstance(action, Save):
        positions.append(action.step)
    elif isinstance(action, Drop):
        positions.remove(action.step)
