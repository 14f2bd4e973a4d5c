"""Brute force over all schedules of a short loop: an oracle that knows no planner.

A situation is (steps left, working position or None, what is held ...); sets are bit masks, where
bit k of the states is the state before step k and bit k of the tapes is the tape of step k. The
search is Dijkstra's, drawn towards the goal by a lower bound on what is still to be run.
"""

from collections.abc import Callable, Iterable
from functools import cache
from heapq import heappop, heappush
from itertools import count
from typing import Any

Situation = tuple[Any, ...]
Moves = Callable[[Situation], Iterable[tuple[float, Situation]]]


def fewest_evaluations(
    steps: int,
    room: int,
    sizes: tuple[int, int, int] = (1, 1, 0),
    *,
    tapes: bool = True,
    placed: Iterable[int] = (),
    working: int = 0,
) -> int:
    """Return the fewest runs of a step that reverse `steps` steps in `room`.

    The search starts with the states at `placed` held, which stay held until their step has been
    gone back through, and the working state at `working`.
    """
    fits = _room_for(room, sizes)
    fixed = sum(1 << k for k in placed)

    def moves(situation: Situation) -> Iterable[tuple[float, Situation]]:
        left, at, states, taped = situation
        last = left - 1
        below = (1 << last) - 1  # what is held for the steps before the last one
        if taped >> last & 1:
            yield 0, (last, None, states & below, taped & below)
        elif at == last:
            yield 1, (last, None, states & below, taped & below)
        if at is not None and at < left:
            yield 1, (left, at + 1, states, taped)
            if at and not states >> at & 1:
                yield 0, (left, at, states | 1 << at, taped)
            if tapes and not taped >> at & 1:
                yield 1, (left, at + 1, states, taped | 1 << at)
        for k in _members(states & ~fixed):
            yield 0, (left, at, states ^ 1 << k, taped)
        for k in _members(taped):
            yield 0, (left, at, states, taped ^ 1 << k)
        for k in _members(1 | states | taped << 1):
            yield 0, (left, k, states, taped)

    def legal(situation: Situation) -> Iterable[tuple[float, Situation]]:
        return (move for move in moves(situation) if fits(*move[1][2:]))

    def to_be_run(situation: Situation) -> int:
        return situation[0] - situation[3].bit_count()  # each step that has no tape, at least once

    return int(_cheapest((steps, working, fixed, 0), legal, to_be_run))


def cheapest_recordings(
    steps: int, room: int, sizes: tuple[int, int, int], recording_cost: int
) -> int:
    """Return the least of runs of a step and of recordings, each of which counts as so many runs.

    A recording is a row of tapes with nothing done in between. The step that is gone back through
    as soon as it has run belongs to the row that it ends.
    """
    fits = _room_for(room, sizes)

    def moves(situation: Situation) -> Iterable[tuple[float, Situation]]:
        left, at, states, taped, records = situation
        last = left - 1
        below = (1 << last) - 1
        begin = 0 if records else recording_cost
        if taped >> last & 1:
            yield 0, (last, None, states & below, taped & below, False)
        elif at == last:
            yield 1 + begin, (last, None, states & below, taped & below, False)
        if at is not None and at < left:
            yield 1, (left, at + 1, states, taped, False)
            if at and not states >> at & 1:
                yield 0, (left, at, states | 1 << at, taped, False)
            if not taped >> at & 1:
                yield 1 + begin, (left, at + 1, states, taped | 1 << at, True)
        for k in _members(states):
            yield 0, (left, at, states ^ 1 << k, taped, records)
        for k in _members(taped):
            # The tape that was made last belongs to a recording that may go on.
            yield 0, (left, at, states, taped ^ 1 << k, records and k + 1 != at)
        for k in _members(1 | states | taped << 1):
            yield 0, (left, k, states, taped, False)

    def legal(situation: Situation) -> Iterable[tuple[float, Situation]]:
        return (move for move in moves(situation) if fits(*move[1][2:4]))

    return int(_cheapest((steps, 0, 0, 0, False), legal, lambda s: s[0] - s[3].bit_count()))


def cheapest_two_tiers(
    steps: int, slots: int, disk_slots: int, write_cost: float, read_cost: float
) -> float:
    """Return the least of runs, disk writes and disk reads; memory and disk hold states."""

    def moves(situation: Situation) -> Iterable[tuple[float, Situation]]:
        left, at, memory, disk = situation
        last = left - 1
        below = (1 << last) - 1
        if at == last:
            yield 1, (last, None, memory & below, disk & below)
        if at is not None and at < last:
            yield 1, (left, at + 1, memory, disk)
        if at:
            if not memory >> at & 1 and memory.bit_count() < slots:
                yield 0, (left, at, memory | 1 << at, disk)
            if not disk >> at & 1 and disk.bit_count() < disk_slots:
                yield write_cost, (left, at, memory, disk | 1 << at)
        for k in _members(memory):
            yield 0, (left, at, memory ^ 1 << k, disk)
        for k in _members(disk):
            yield 0, (left, at, memory, disk ^ 1 << k)
            yield read_cost, (left, k, memory, disk)
        for k in _members(1 | memory):
            yield 0, (left, k, memory, disk)

    return _cheapest((steps, 0, 0, 0), moves, lambda situation: situation[0])


def _room_for(room: int, sizes: tuple[int, int, int]) -> Callable[[int, int], bool]:
    """Return whether these states and tapes fit into the room."""
    state, tape, tape_input = sizes

    @cache
    def fits(states: int, taped: int) -> bool:
        used = states.bit_count() * state
        for k in _members(taped):
            otherwise_held = k == 0 or states >> k & 1 or taped >> (k - 1) & 1
            used += tape - (tape_input if otherwise_held else 0)
        return used <= room

    return fits


def _cheapest(start: Situation, moves: Moves, at_least: Callable[[Situation], float]) -> float:
    """Return the cost of the cheapest way to a situation with no steps left."""
    order = count()  # among equals, what was found last: it is further on
    queue = [(at_least(start), 0, 0.0, start)]
    done = set()
    best = {start: 0.0}
    while queue:
        _, _, cost, here = heappop(queue)
        if here[0] == 0:
            return cost
        if here in done:
            continue
        done.add(here)
        for price, there in moves(here):
            total = cost + price
            if total < best.get(there, float("inf")):
                best[there] = total
                heappush(queue, (total + at_least(there), -next(order), total, there))
    raise AssertionError("no schedule at all")


def _members(mask: int) -> Iterable[int]:
    k = 0
    while mask:
        if mask & 1:
            yield k
        mask >>= 1
        k += 1
