"""States and tapes in the same room, the fewest evaluations.

For tapes of a state's size there is a closed form. A tape that contains its step's output stands
for the state after the step as well, so `slots` of them reverse n steps with as many evaluations
as `slots + 1` states reverse n + 1 steps without counting the taping runs; and the best place for
a tape is one step before Revolve's place for a state.

For other sizes it is a dynamic programme over (length of a stretch, room left). With r bytes free
beside the state that a stretch of n steps starts from, the best of

    hold nothing            n + E(n - 1, r)
    hold the state k ahead  k + E(n - k, r - state) + E(k, r)
    hold the next tape      1 + E(n - 1, r - tape + what is there already)

A tape finds its input there already and pays `tape - tape_input`, or takes the place of the state
that the stretch started from, if that has a slot of its own. (So a tape further ahead is a state
there, and then the next tape.) Brute force over all schedules finds nothing better on the small
cases that the tests go through.

A *recording* is steps whose tapes are made one after another, the last of which may need none:
a runner that goes back through all of it at once pays for that once. If it costs something, a
stretch that comes right after a tape is another question than one that does not: J(n, r), where one
more tape is part of the same recording. Counted as one evaluation, the recordings may become half
as many for a thousandth of the evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

from ..sizes import shown
from .actions import Action, Advance, Sizes, Tier
from .check import keep_whole, whole_number
from .revolve import advances, split
from .walk import Decision, Hold, Run, walk

__all__ = ["Mixed"]

Table = npt.NDArray[np.int32]
_NEVER = 2**30
_ONE_SLOT_EACH = Sizes()


@dataclass(frozen=True, slots=True)
class Mixed:
    """The fewest evaluations when `room` is shared by states and tapes.

    The unit of `room` is that of `sizes`; with the default sizes it is slots. With a
    `recording_cost` it is the least of evaluations and recordings, each of which counts as so many
    evaluations: for a runner that goes back through several tapes at once, and pays for each time.

    >>> Mixed(1000, 30).evaluations
    2442
    >>> Mixed(1000, 64_000, Sizes(state=2_000, tape=6_000, tape_input=2_000)).evaluations
    2730
    >>> some, fewer = (Mixed(1000, 36, Sizes(1, 2, 1), recording_cost=c) for c in (0, 1))
    >>> some.evaluations, fewer.evaluations, fewer.cost
    (2303, 2306, 2350)
    """

    steps: int
    room: int
    sizes: Sizes = _ONE_SLOT_EACH
    recording_cost: int = 0

    def __post_init__(self) -> None:
        keep_whole(self, steps=0, room=0, recording_cost=0)
        if self.recording_cost * self.steps >= _NEVER:
            raise ValueError(
                "recording_cost must be what a recording costs in evaluations, at most "
                f"{_NEVER - 1:,} for all {self.steps:,} steps together, got "
                f"{self.recording_cost:,} for each"
            )
        if not isinstance(self.sizes, Sizes):
            raise TypeError(f"sizes must be remat.schedules.Sizes, got {shown(self.sizes)}")
        state = whole_number(self.sizes.state, "sizes.state", least=1)
        tape = whole_number(self.sizes.tape, "sizes.tape", least=state)
        tape_input = whole_number(self.sizes.tape_input, "sizes.tape_input")
        object.__setattr__(self, "sizes", Sizes(state, tape, tape_input))
        if tape_input > state or tape_input >= tape:
            raise ValueError(
                f"sizes.tape_input must be a part of the tape and at most a state, got {self.sizes}"
            )

    @property
    def has_closed_form(self) -> bool:
        state, tape, tape_input = self.sizes
        return state == tape and not tape_input and not self.recording_cost

    @property
    def evaluations(self) -> int:
        if not self.recording_cost:
            return self.cost
        # Each step is run with a tape, or right before going back through it, just once.
        return self.steps + sum(a.stop - a.start for a in self if isinstance(a, Advance))

    @property
    def cost(self) -> int:
        """The evaluations, and what the recordings cost."""
        planner, room = self._planner()
        return planner.cost(self.steps, room)

    def __iter__(self) -> Iterator[Action]:
        planner, room = self._planner()
        return walk(self.steps, room, planner.decide)

    def _planner(self) -> tuple[_EqualSizes | _MixedProgramme, int]:
        state, tape, tape_input = self.sizes
        if self.has_closed_form:
            return _EqualSizes(), self.room // state
        unit = gcd(state, tape, tape_input)
        room = min(self.room, self.steps * tape) // unit
        sizes = Sizes(state // unit, tape // unit, tape_input // unit)
        return _programme(self.steps, room, sizes, self.recording_cost), room


class _EqualSizes:
    def cost(self, steps: int, slots: int) -> int:
        return advances(steps + 1, slots)

    def decide(self, length: int, tier: Tier, slots: int) -> Decision[int]:
        if length == 1 or not slots:
            return Run()
        return Hold(split(length + 1, slots) - 1, Tier.TAPE, slots - 1)


_latest: dict[tuple[int, Sizes, int], _MixedProgramme] = {}


def _programme(steps: int, room: int, sizes: Sizes, recording_cost: int) -> _MixedProgramme:
    """Return tables that are wide enough: those for more room answer for less room, too."""
    key = steps, sizes, recording_cost
    known = _latest.get(key)
    if known is None or known.room < room:
        known = _latest[key] = _MixedProgramme(steps, room, sizes, recording_cost)
        if len(_latest) > 4:
            _latest.pop(next(iter(_latest)), None)
    return known


class _MixedProgramme:
    """The table E[length, room] and, where they differ, those of other starts.

    They are a start in a slot of its own, and one right after a tape.
    """

    def __init__(self, steps: int, room: int, sizes: Sizes, recording_cost: int) -> None:
        self.room = room
        self.sizes = sizes
        self.once = recording_cost
        # A state in a slot can be given up for the tape of its step, if that does not contain it.
        self.gain = sizes.state - sizes.tape_input
        shape = (steps + 1, room + 1)
        self.fixed: Table = np.full(shape, _NEVER, dtype=np.int32)
        self.slotted: Table = np.full(shape, _NEVER, dtype=np.int32) if self.gain else self.fixed
        self.joined: Table = np.full(shape, _NEVER, dtype=np.int32) if self.once else self.fixed
        self._fill(steps)
        self.decide = lru_cache(maxsize=512)(self._decide)

    def cost(self, steps: int, room: int) -> int:
        return int(self.fixed[steps, room])

    def _fill(self, steps: int) -> None:
        tables = (self.fixed, self.slotted) if self.gain else (self.fixed,)
        self.joined[0] = 0
        self.joined[1:2] = 1
        for table in tables:
            table[0] = 0
            table[1:2] = 1 + self.once
        # left[k] = k + E(k, room): what the steps before a held state cost, their sweep included
        lefts = [table + np.arange(steps + 1, dtype=np.int32)[:, None] for table in tables]
        buffer = np.empty((max(1, steps), self.room + 1), dtype=np.int32)
        for length in range(2, steps + 1):
            # First the start that has no slot: what is in a slot may become one of those.
            for table, left in zip(tables, lefts, strict=True):
                best = length + self.once + table[length - 1]
                self._hold_at_once(best, length, self.once, own_slot=table is not self.fixed)
                self._hold_ahead(best, left[1:length], self.slotted[length - 1 : 0 : -1], buffer)
                table[length] = best
                left[length] = best + length
            if self.once:
                best = self.joined[length]
                best[:] = self.fixed[length]
                self._hold_at_once(best, length, 0, own_slot=False)

    def _hold_ahead(self, best: Table, left: Table, right: Table, buffer: Table) -> None:
        """Lower `best` to the best place for a state, over all rooms at once."""
        state, room = self.sizes.state, self.room + 1
        if state < room:
            sums = buffer[: len(left), : room - state]
            np.add(left[:, state:], right[:, : room - state], out=sums)
            np.minimum(best[state:], sums.min(axis=0), out=best[state:])

    def _hold_at_once(self, best: Table, length: int, once: int, *, own_slot: bool) -> None:
        cost = self._cost_at_once(own_slot=own_slot)
        if cost <= self.room:
            right = self.joined[length - 1, : self.room + 1 - cost]
            np.minimum(best[cost:], 1 + once + right, out=best[cost:])

    def _cost_at_once(self, *, own_slot: bool) -> int:
        return self.sizes.tape - (self.sizes.state if own_slot else self.sizes.tape_input)

    def _decide(self, length: int, tier: Tier, room: int) -> Decision[int]:
        """Find the choice that gave the table its value; a cheap search, made once per question."""
        if length == 1:
            return Run()
        own_slot = bool(self.gain) and tier is Tier.MEMORY
        table = self.slotted if own_slot else self.fixed
        best = table[length, room]
        if best == length + self.once + table[length - 1, room]:
            return Run()
        cost = self._cost_at_once(own_slot=own_slot)
        if cost <= room and best == 1 + self.once + self.joined[length - 1, room - cost]:
            tapes = self._more_tapes(length - 1, room - cost)
            room -= cost + tapes * self._cost_at_once(own_slot=False)
            return Hold(0, Tier.TAPE, room, tapes=1 + tapes)
        room -= self.sizes.state
        sums = np.arange(1, length) + table[1:length, room + self.sizes.state]
        sums += self.slotted[length - 1 : 0 : -1, room]
        (places,) = np.nonzero(sums == best)
        return Hold(int(places[-1]) + 1, Tier.MEMORY, room)

    def _more_tapes(self, length: int, room: int) -> int:
        """Return how many tapes are to follow one that was just made, in the same recording."""
        tapes = 0
        while length > 1 and self.joined[length, room] < self.fixed[length, room]:
            length, room = length - 1, room - self._cost_at_once(own_slot=False)
            tapes += 1
        return tapes
