"""Which schedule is best for a loop of this many steps and these bytes, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Literal

from ..errors import BudgetTooSmallError
from ..sizes import counted, format_bytes, parse_bytes, shown
from ..tables import Table
from .actions import Schedule, Sizes
from .blocks import Blocks, best_blocks
from .check import amount, options_by_name, whole_number
from .mixed import Mixed
from .multistage import Multistage
from .revolve import Revolve
from .simulate import simulate
from .staged import Staged, best_staged
from .store_all import StoreAll
from .uniform import Uniform

__all__ = ["Disk", "LoopPlan", "ScheduleOption", "Unit", "default_checkpoints", "plan_loop"]

Unit = Literal["bytes", "states"]

# What the dynamic programmes may cost: about a tenth of a second, and about a second.
_MIXED_WORK = 10**8
_DISK_WORK = 10**8


@dataclass(frozen=True, slots=True)
class Disk:
    """Slots on disk; a write and a read take as long as so many forward steps."""

    slots: int
    write_cost: float = 1.0
    read_cost: float = 1.0


@dataclass(frozen=True)
class ScheduleOption:
    """A schedule and what it is predicted to cost."""

    name: str
    schedule: Schedule
    evaluations: int
    cost: float  # in forward steps: evaluations, recordings, disk reads and disk writes
    sizes: Sizes
    working_bytes: int

    @cached_property
    def peak_bytes(self) -> int:
        """What is held at most, the pass's own working set included."""
        return self.working_bytes + _held_bytes(self.schedule, self.sizes)

    @property
    def disk_slots(self) -> int:
        tiers = isinstance(self.schedule, Multistage | Staged)
        return self.schedule.disk_slots if tiers else 0  # type: ignore[attr-defined]


@dataclass(frozen=True)
class LoopPlan:
    """The schedule to run, why, and what the others would cost."""

    steps: int
    best: ScheduleOption
    alternatives: tuple[ScheduleOption, ...]
    reason: str
    unit: Unit = "bytes"  # of peaks; without `state_bytes` it is states

    def __repr__(self) -> str:
        others = ", ".join(option.name for option in self.alternatives)
        return (
            f"<LoopPlan: {counted(self.steps, 'step')} by {self.name}, "
            f"{counted(self.evaluations, 'evaluation')}, peak {self._amount(self.peak_bytes)}; "
            f"alternatives: {others or 'none'}>"
        )

    def _repr_html_(self) -> str:
        return self.table(self.reason).html()

    def table(self, reason: str) -> Table:
        """Return one schedule a row, the best first and marked, and why it is."""
        options = (self.best, *self.alternatives)
        with_disk = any(option.disk_slots for option in options)
        headings = ["schedule", "evaluations", "per step", "cost", "peak"]
        rows = [
            [
                f"{'*' if option is self.best else ' '} {option.name}",
                f"{option.evaluations:,}",
                f"{option.evaluations / max(1, self.steps):.2f}",
                f"{option.cost:,.6g}" if option.cost < 1e6 else f"{option.cost:,.0f}",
                self._amount(option.peak_bytes),
                *[counted(option.disk_slots, "state") if option.disk_slots else "-"] * with_disk,
            ]
            for option in options
        ]
        title = f"Schedules for {counted(self.steps, 'step')}"
        headings += ["on disk"] * with_disk
        return Table(headings, rows, title, notes=[f"* best: {reason}"])

    def _amount(self, peak: int) -> str:
        return format_bytes(peak) if self.unit == "bytes" else counted(peak, "state")

    @property
    def name(self) -> str:
        return self.best.name

    @property
    def schedule(self) -> Schedule:
        return self.best.schedule

    @property
    def evaluations(self) -> int:
        return self.best.evaluations

    @property
    def peak_bytes(self) -> int:
        return self.best.peak_bytes


def default_checkpoints(steps: int) -> int:
    """Return the number of checkpoints when none is given: sqrt(steps)."""
    return isqrt(steps)


@options_by_name
def plan_loop(
    steps: int,
    *,
    slots: int | None = None,
    memory_bytes: int | str | None = None,
    state_bytes: int | str | None = None,
    tape_bytes: int | str | None = None,
    tape_input_bytes: int | str = 0,
    working_bytes: int | str | None = None,
    disk: Disk | None = None,
    recording_cost: int = 0,
    tolerance: float = 0.0,
    exact: bool = True,
) -> LoopPlan:
    """Choose the best schedule for a loop of `steps` steps.

    Give the room either as `slots` (so many states, for checkpoints alone) or as `memory_bytes`
    (the peak of the whole pass). `tape_bytes` is what one held step takes, its output included;
    `tape_input_bytes` of it are the step's input, not paid twice where that is held anyway.
    Without `tape_bytes` only states are held. `working_bytes` is what the pass needs beside its
    checkpoints, by default one state and one tape. `recording_cost` is for a runner that goes back
    through several tapes at once: what that costs it each time beside the steps, in forward steps.
    With a `tolerance` of 0.01, up to one percent more forward work is accepted for the sake of a
    lower peak. The optimal schedule for states and tapes keeps a table of 4 bytes for each step and
    state that fits (8 with a `recording_cost`); `exact=False` does without.

    >>> plan = plan_loop(1000, memory_bytes="64MB", state_bytes="1MB", tape_bytes="3MB")
    >>> plan.name, plan.evaluations
    ('mixed', 2327)
    >>> plan
    <LoopPlan: 1,000 steps by mixed, 2,327 evaluations, peak 64.0 MB;
    alternatives: blocks, revolve, uniform>
    """
    steps = whole_number(steps, "steps")
    if (slots is None) == (memory_bytes is None):
        raise ValueError(
            "give either slots or memory_bytes, got "
            f"slots={slots!r} and memory_bytes={memory_bytes!r}"
        )
    amount(tolerance, "tolerance", "a fraction of the work")
    _check_disk(disk)
    sizes, working = _read_sizes(state_bytes, tape_bytes, tape_input_bytes, working_bytes, slots)
    room = _read_room(steps, slots, memory_bytes, sizes, working)
    recording_cost = whole_number(recording_cost, "recording_cost")
    tapes = tape_bytes is not None
    loop = _Loop(steps, sizes, working, disk, recording_cost, tapes=tapes, exact=exact)
    best, others = _choose(loop, room, tolerance)
    reason = _full_reason(loop, room, best, others, tolerance)
    unit: Unit = "states" if state_bytes is None else "bytes"
    return LoopPlan(steps, best, others, reason, unit)


def _choose(
    loop: _Loop, room: int, tolerance: float
) -> tuple[ScheduleOption, tuple[ScheduleOption, ...]]:
    """Return the best schedule, and the others in order."""
    options = list(loop.options(room))
    best = min(options, key=_rank)
    if tolerance:
        best = loop.thriftiest(room, best.cost * (1 + tolerance))
        options = [best] + [option for option in options if option.name != best.name]
    return best, tuple(sorted((option for option in options if option is not best), key=_rank))


def _full_reason(
    loop: _Loop,
    room: int,
    best: ScheduleOption,
    others: tuple[ScheduleOption, ...],
    tolerance: float,
) -> str:
    reason, disk = _reason(best, others, loop.steps, tapes=loop.tapes), loop.disk
    if best.name == "multistage" and disk and loop.disk_slots < min(disk.slots, loop.steps):
        reason += f"; only {loop.disk_slots} of {disk.slots} disk slots are planned: "
        reason += f"more would take too long for {loop.steps} steps"
    if isinstance(best.schedule, Mixed) and not best.schedule.has_closed_form:
        unit, most = best.schedule.sizes.state, _mixed_width(loop.steps)
        if best.schedule.room >= most:
            reason += f"; only {most // unit} of {room // loop.sizes.state} slots are planned: "
            reason += f"more would take too long for {loop.steps} steps"
    if tolerance:
        reason += f"; up to {tolerance:.3g} times more work was accepted for a lower peak"
    return reason


def _check_disk(disk: Disk | None) -> None:
    if disk is None:
        return
    if not isinstance(disk, Disk):
        raise TypeError(f"disk must be a remat.schedules.Disk, got {shown(disk)}")
    whole_number(disk.slots, "disk_slots")
    amount(disk.write_cost, "write_cost", "a number of forward steps")
    amount(disk.read_cost, "read_cost", "a number of forward steps")


def _read_sizes(
    state: int | str | None,
    tape: int | str | None,
    tape_input: int | str,
    working: int | str | None,
    slots: int | None,
) -> tuple[Sizes, int]:
    if state is None and slots is None:
        raise ValueError("memory_bytes needs state_bytes: give the bytes of one state")
    state = 1 if state is None else parse_bytes(state, name="state_bytes")
    if state == 0:
        raise ValueError("state_bytes must be at least 1, got 0")
    taken = 0 if tape is None else parse_bytes(tape, name="tape_bytes")
    # A tape contains the step's output, so it cannot be smaller than a state.
    sizes = Sizes(state, max(taken, state), 0)
    tape_input = min(parse_bytes(tape_input, name="tape_input_bytes"), state, sizes.tape - 1)
    if working is None:
        working = state + taken
    return sizes._replace(tape_input=tape_input), parse_bytes(working, name="working_bytes")


def _read_room(
    steps: int, slots: int | None, memory: int | str | None, sizes: Sizes, working: int
) -> int:
    """Return the bytes that may be held beside the working set."""
    if slots is not None:
        return whole_number(slots, "slots") * sizes.state
    assert memory is not None
    bytes_ = parse_bytes(memory, name="memory_bytes")
    if bytes_ < working and steps:
        raise BudgetTooSmallError(
            f"one step alone needs {format_bytes(working)} (state, tape and what goes back "
            f"through it), the budget is {format_bytes(bytes_)}; raise memory_bytes to at least "
            f"{working}"
        )
    return max(0, bytes_ - working)


@dataclass(frozen=True, slots=True)
class _Loop:
    """All that the options depend on, but for the room."""

    steps: int
    sizes: Sizes
    working: int
    disk: Disk | None
    recording_cost: int
    tapes: bool
    exact: bool

    @property
    def _affordable_slots(self) -> int:
        """How many slots of either kind can be planned; neither kind cuts the other short."""
        return _DISK_WORK // (2 * max(1, self.steps * self.steps))

    @property
    def disk_slots(self) -> int:
        return min(self.disk.slots, self._affordable_slots) if self.disk else 0

    def option(self, name: str, schedule: Schedule, cost: float, recordings: int) -> ScheduleOption:
        price = float(cost + self.recording_cost * recordings)
        return ScheduleOption(name, schedule, schedule.evaluations, price, self.sizes, self.working)

    def options(self, room: int) -> Iterator[ScheduleOption]:
        steps, sizes = self.steps, self.sizes
        slots = room // sizes.state
        for name, states in ("revolve", Revolve(steps, slots)), ("uniform", Uniform(steps, slots)):
            yield self.option(name, states, states.evaluations, recordings=steps)
        if self.tapes:
            if (steps - 1) * (sizes.tape - sizes.tape_input) <= room:
                yield self.option("all", StoreAll(steps), steps, recordings=min(1, steps))
            blocks = best_blocks(steps, room, sizes)
            if blocks is not None:
                yield self.option("blocks", blocks, blocks.evaluations, blocks.recordings)
            mixed = _mixed(steps, room, sizes, self.recording_cost)
            if mixed is not None and (self.exact or mixed.has_closed_form):
                yield self.option("mixed", mixed, mixed.cost, recordings=0)  # they are in its cost
        if self.disk is not None:
            costs = self.disk.write_cost, self.disk.read_cost
            staged = best_staged(steps, room, self.disk.slots, sizes, *costs, tapes=self.tapes)
            if staged is not None:
                yield self.option("staged", staged, staged.cost, staged.recordings)
            slots = min(slots, self._affordable_slots)
            # Without tapes it would be no cheaper than this, even if the disk took no time.
            least = Revolve(steps, slots + self.disk_slots).evaluations
            if self.disk_slots and (staged is None or least < staged.cost):
                tiers = Multistage(steps, slots, self.disk_slots, *costs)
                yield self.option("multistage", tiers, tiers.cost, recordings=steps)

    def thriftiest(self, room: int, allowed: float) -> ScheduleOption:
        """Return the best option of the least room in which the cost is still allowed."""
        low, high = 0, room
        # More room never costs more, so bisection finds the edge.
        while high - low > 1:
            middle = (low + high) // 2
            if min(self.options(middle), key=_rank).cost <= allowed:
                high = middle
            else:
                low = middle
        return min(self.options(high), key=_rank)


def _mixed(steps: int, room: int, sizes: Sizes, recording_cost: int) -> Mixed | None:
    """Return the optimal schedule in a unit that does not depend on the room, if it is affordable.

    The unit depends on the sizes alone and the table is cut off at a width that depends on the
    steps alone: so more room never gives a worse plan.
    """
    if sizes.state == sizes.tape and not sizes.tape_input and not recording_cost:
        return Mixed(steps, room // sizes.state)
    units, unit = _coarse(sizes)
    width = min(int(room / unit), _mixed_width(steps))
    if width < units.state or steps > 5000:
        return None
    return Mixed(steps, width, units, recording_cost)


def _mixed_width(steps: int) -> int:
    """Return the most units of room that a table is made for."""
    return 2 * _MIXED_WORK // max(1, steps * steps)


def _coarse(sizes: Sizes) -> tuple[Sizes, float]:
    """Return sizes in a few units, and the bytes of a unit: so large that nothing is cut off."""
    candidates = [_in_units(sizes, parts) for parts in (1, 2, 3, 4)]

    def waste(candidate: tuple[Sizes, float]) -> float:
        units, unit = candidate
        return max(unit * units.state / sizes.state, unit * units.tape / sizes.tape)

    return next((c for c in candidates if waste(c) <= 1.03), min(candidates, key=waste))


def _in_units(sizes: Sizes, parts: int) -> tuple[Sizes, float]:
    """Cut a state into `parts` units."""
    state, tape, tape_input = sizes
    if tape_input == state:  # what a tape adds to its input is what counts
        added = max(1, round(parts * (tape - state) / state))
        unit = max(state / parts, (tape - state) / added)
        return Sizes(parts, parts + added, parts), unit
    whole = max(parts, round(parts * tape / state))
    unit = max(state / parts, tape / whole)
    return Sizes(parts, whole, min(int(tape_input / unit), whole - 1)), unit


def _rank(option: ScheduleOption) -> tuple[float, int]:
    # Equal costs: the simpler schedule.
    order = ("all", "revolve", "uniform", "blocks", "mixed", "multistage", "staged")
    return option.cost, order.index(option.name)


def _held_bytes(schedule: Schedule, sizes: Sizes) -> int:
    useful = max(0, schedule.steps - 2)  # states 1 … n - 2 are worth a slot
    match schedule:
        case StoreAll(steps):
            return max(0, steps - 1) * (sizes.tape - sizes.tape_input)
        case Blocks() | Staged():
            return schedule.peak(sizes)
        case Revolve(slots=slots) | Uniform(slots=slots) | Multistage(slots=slots):
            return min(slots, useful) * sizes.state
        case Mixed(steps, room) if schedule.has_closed_form:
            return min(room // schedule.sizes.state, max(0, steps - 1)) * sizes.tape
        case _:
            return simulate(schedule, schedule.steps, sizes=sizes).peak_memory


def _reason(
    best: ScheduleOption, others: tuple[ScheduleOption, ...], steps: int, *, tapes: bool
) -> str:
    why = {
        "all": "every tape fits, so no step runs twice",
        "revolve": "the fewest evaluations for slots that hold states",
        "blocks": "states at block starts and the tapes of one block at a time use the room best",
        "mixed": "optimal for states and tapes",
        "staged": "states on disk cut the loop into parts, each short enough for the memory",
        "multistage": "the disk holds what memory cannot, and is worth its reads and writes",
    }[best.name]
    if best.name == "revolve" and not tapes:
        why += " (the bytes of a tape are not known; with tape_bytes there may be better)"
    each = f"{best.evaluations / steps:.2f} evaluations a step" if steps else "nothing to run"
    dearer = [option for option in others if option.cost >= best.cost]
    runner_up = f"; next is {dearer[0].name} at cost {dearer[0].cost:,.0f}" if dearer else ""
    return f"{why}: {each}{runner_up}"
