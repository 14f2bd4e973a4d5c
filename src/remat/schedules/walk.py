"""Turns decisions into actions, for schedules that look up what to do stretch by stretch.

A *stretch* is a run of steps that starts from a held state. A planner answers one question:
given the length of a stretch and the room that is left, what is to be held next? The walker asks
it again and again and keeps the stretches on a stack, so nothing recurses and memory is O(slots).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Generic, NamedTuple, TypeVar

from .actions import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier

__all__ = ["Decision", "Hold", "Lift", "Run", "walk"]

Room = TypeVar("Room")  # what a planner counts: slots, bytes, a pair of tiers


class Run(NamedTuple):
    """Run to the last step and go back through it; hold nothing."""


class Hold(NamedTuple, Generic[Room]):
    """Advance by `ahead` steps, then hold the state (or the next steps' tapes) and go on there."""

    ahead: int
    tier: Tier
    room: Room  # what is left for the steps to the right
    tapes: int = 1  # if it is tapes: of how many steps


class Lift(NamedTuple, Generic[Room]):
    """Move the state that the stretch starts from, from disk into memory."""

    room: Room


Decision = Run | Hold[Room] | Lift[Room]


class _Stretch(NamedTuple, Generic[Room]):
    start: int
    tier: Tier  # where the state before `start` is held
    room: Room


def walk(
    steps: int, room: Room, decide: Callable[[int, Tier, Room], Decision[Room]]
) -> Iterator[Action]:
    """Generate the actions for `steps` steps as `decide(length, tier, room)` says."""
    stretches: list[_Stretch[Room]] = [_Stretch(0, Tier.CALLER, room)]
    end = steps
    while end:
        start, tier, room = stretches[-1]
        decision = decide(end - start, tier, room)
        if isinstance(decision, Lift):
            yield Save(start, Tier.MEMORY)
            yield Drop(start, tier)
            stretches[-1] = _Stretch(start, Tier.MEMORY, decision.room)
            continue
        if isinstance(decision, Hold):
            at = start + decision.ahead
            if decision.ahead:
                yield Advance(start, at)
            if decision.tier is Tier.TAPE:
                yield from _tapes(at, decision, stretches)
                continue
            # A state is saved only if it will be restored: not before a tape that contains it.
            if not _is_last_use(decide(end - at, decision.tier, decision.room), end - at):
                yield Save(at, decision.tier)
            stretches.append(_Stretch(at, decision.tier, decision.room))
            continue
        if end - start > 1:
            yield Advance(start, end - 1)
        end = yield from _backward(end, stretches)
        if end:
            start, tier, room = stretches[-1]
            if not _is_last_use(decide(end - start, tier, room), end - start):
                yield Restore(start, tier)


def _backward(end: int, stretches: list[_Stretch[Room]]) -> Generator[Action, None, int]:
    """Go back through the last step and all tapes before it; return the step that is reached."""
    end -= 1
    yield Backward(end)
    while stretches and stretches[-1].start == end:
        if stretches.pop().tier is Tier.TAPE:
            end -= 1
            yield Backward(end)
    return end


def _tapes(at: int, decision: Hold[Room], stretches: list[_Stretch[Room]]) -> Iterator[Action]:
    for step in range(at, at + decision.tapes):
        yield Tape(step)
        stretches.append(_Stretch(step + 1, Tier.TAPE, decision.room))


def _is_last_use(decision: Decision[Room], length: int) -> bool:
    """Return whether a stretch begins with an action that uses up the state it starts from."""
    if isinstance(decision, Hold):
        return decision.tier is Tier.TAPE and decision.ahead == 0
    return length == 1
