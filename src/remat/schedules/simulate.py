"""The simulator: runs any schedule on integers.

It shares no algorithm with the planners. A schedule that restores what is not there, goes back
without the state or the tape, or takes more room than it has, is refused with the action that
did it; otherwise the result is what the schedule cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import assert_never, get_args

from ..errors import RematError
from .actions import Action, Advance, Backward, Drop, Restore, Save, Sizes, Tape, Tier

__all__ = ["IllegalMoveError", "ScheduleCost", "simulate"]


_KINDS = frozenset(get_args(Action))
_CHEAPEST_FIRST = (Tier.MEMORY, Tier.TAPE, Tier.CALLER, Tier.DISK)


class IllegalMoveError(RematError):
    """A schedule asked for something that no runner could do."""


@dataclass(slots=True)
class ScheduleCost:
    """What a schedule cost; room is counted in the unit of the sizes given to `simulate`."""

    steps: int
    evaluations: int = 0
    peak_memory: int = 0
    peak_disk: int = 0
    reads: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    writes: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))


def simulate(
    actions: Iterable[Action],
    steps: int,
    *,
    memory: int | None = None,
    disk: int | None = None,
    sizes: Sizes | None = None,
) -> ScheduleCost:
    """Run `actions` for a loop of `steps` steps and return what they cost.

    `memory` and `disk` are the room there is, in the unit of `sizes`; None is no limit. With the
    default sizes a unit is a slot, and a slot holds a state or a tape.

    >>> from remat.schedules import Revolve
    >>> simulate(Revolve(1000, 31), 1000, memory=31).evaluations
    3405
    """
    simulator = _Simulator(steps, memory, disk, sizes or Sizes())
    for number, action in enumerate(actions):
        try:
            simulator.act(action)
        except IllegalMoveError as error:
            raise IllegalMoveError(f"action {number}, {action}: {error}") from None
    simulator.finish()
    return simulator.cost


class _Simulator:
    def __init__(self, steps: int, memory: int | None, disk: int | None, sizes: Sizes) -> None:
        self.cost = ScheduleCost(steps)
        self.limits = {Tier.MEMORY: memory, Tier.DISK: disk}
        self.sizes = sizes
        self.working: int | None = 0
        self.end = steps  # the steps from here on have been gone back through
        self.held: dict[Tier, set[int]] = {Tier.MEMORY: set(), Tier.DISK: set()}
        self.tapes: set[int] = set()
        self.sharing = 0  # tapes whose input is held anyway

    def act(self, action: Action) -> None:
        _refuse_if(type(action) not in _KINDS, "this is no action")
        whole = all(isinstance(p, int | Integral) for p in action if type(p) is not Tier)
        _refuse_if(not whole, "positions must be whole numbers")
        # Whatever an action does, it does to one step: only that tape and the next may share more
        # or less than before.
        step = action[0]
        before = self._shares(step) + self._shares(step + 1)
        self._do(action)
        self.sharing += self._shares(step) + self._shares(step + 1) - before
        self._measure()

    def _shares(self, step: int) -> int:
        held_anyway = step == 0 or step in self.held[Tier.MEMORY] or step - 1 in self.tapes
        return int(step in self.tapes and held_anyway)

    def _do(self, action: Action) -> None:
        match action:
            case Advance(start, stop):
                _refuse_if(self.working != start, f"the working state is at {self.working}")
                _refuse_if(not start < stop <= self.end, f"steps left end at {self.end}")
                self.cost.evaluations += stop - start
                self.working = stop
            case Save(step, tier):
                _refuse_if(self.working != step, f"the working state is at {self.working}")
                _refuse_if(tier not in self.held, "this tier has no slots")
                _refuse_if(step in self.held[tier], "this state is held there already")
                self.held[tier].add(step)
                self.cost.writes[tier] += 1
            case Restore(step, tier):
                _refuse_if(not self._is_held(step, tier), "no such state is held there")
                self.cost.reads[tier] += 1
                self.working = step
            case Drop(step, tier):
                self._free(step, tier)
            case Tape(step):
                _refuse_if(step >= self.end, f"steps left end at {self.end}")
                _refuse_if(step in self.tapes, "this tape is held already")
                self._run_from(step)
                self.tapes.add(step)
                self.working = step + 1
            case Backward(step):
                _refuse_if(step != self.end - 1, f"the next step back is {self.end - 1}")
                if step not in self.tapes:
                    self._run_from(step)
                self._use_up(step)
                self.tapes.discard(step)
                self.working = None
                self.end = step
            case _:
                assert_never(action)

    def finish(self) -> None:
        if self.end:
            raise IllegalMoveError(f"the schedule stops with steps 0 to {self.end - 1} still ahead")
        left = [step for states in self.held.values() for step in sorted(states)]
        if left:
            raise IllegalMoveError(f"the schedule leaves {left} held")

    def _is_held(self, step: int, tier: Tier) -> bool:
        match tier:
            case Tier.CALLER:
                return step == 0
            case Tier.TAPE:
                return step - 1 in self.tapes
            case _:
                return step in self.held[tier]

    def _free(self, step: int, tier: Tier) -> None:
        _refuse_if(tier not in self.held or step not in self.held[tier], "no such slot is held")
        self.held[tier].remove(step)

    def _run_from(self, step: int) -> None:
        """Run `step` with a tape, from wherever the state before it is."""
        if self.working != step:
            places = [tier for tier in _CHEAPEST_FIRST if self._is_held(step, tier)]
            _refuse_if(not places, "neither its tape nor the state before it is here")
            self.cost.reads[places[0]] += 1
        self._use_up(step)
        self.cost.evaluations += 1

    def _use_up(self, step: int) -> None:
        for states in self.held.values():
            states.discard(step)

    def _measure(self) -> None:
        memory = len(self.held[Tier.MEMORY]) * self.sizes.state
        memory += len(self.tapes) * self.sizes.tape - self.sharing * self.sizes.tape_input
        disk = len(self.held[Tier.DISK]) * self.sizes.state
        for used, tier in ((memory, Tier.MEMORY), (disk, Tier.DISK)):
            limit = self.limits[tier]
            _refuse_if(
                limit is not None and used > limit, f"{used} held in {tier.value}, room {limit}"
            )
        self.cost.peak_memory = max(self.cost.peak_memory, memory)
        self.cost.peak_disk = max(self.cost.peak_disk, disk)


def _refuse_if(wrong: bool, why: str) -> None:
    if wrong:
        raise IllegalMoveError(why)
