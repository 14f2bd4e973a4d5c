"""The simulator of plans: runs a plan on numbers, and says what is held when and what runs again.

It shares no code with the planners. The rules:

- Forward: a value lives as long as the program refers to it, and beyond if the plan keeps it and
  backward needs it. What belongs to the caller is always there and not counted. What cannot be
  computed again and is needed is kept.
- Backward: in the node of an op its saved values, the gradients of its results and of what it
  reads, and its workspace are alive. A gradient lives from the first node that adds to it up to the
  node of the op that made its value; that of a parameter in the nodes that make it only.
- Recomputation: see `plan.py`. What is between is freed after its last use in the same replay, and
  what is recomputed for a stage after its last use in the stage, unless the stage holds it on. What
  is kept or held on is freed when nothing needs it any more.
- An in-place op takes over the memory that it writes to, unless what was there is still needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .check import check_plan, check_trace
from .plan import Plan, Stage
from .trace import Kind, Op, Trace

__all__ = ["Alive", "Moment", "Simulation", "Simulator", "simulate", "simulate_plain"]

Phase = Literal["forward", "recompute", "backward"]


class Moment(NamedTuple):
    """What was held while an op, or its backward, ran."""

    phase: Phase
    op: int
    nbytes: int


class Alive(NamedTuple):
    """Something that is held: a value, the gradient of one, or the workspace of a backward."""

    what: Literal["value", "gradient", "workspace"]
    number: int  # of the value; of the op for a workspace
    nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Simulation:
    """What a plan takes: the peak, what is alive there, memory over time, and what runs again."""

    peak_bytes: int
    extra_seconds: float
    peak: Moment
    alive: tuple[Alive, ...]  # at the peak, the largest first
    memory: tuple[Moment, ...]
    recomputed: tuple[tuple[int, ...], ...]  # the ops of each stage's recomputation
    kept_bytes: int  # between forward and backward

    def __repr__(self) -> str:
        return (
            f"Simulation(peak_bytes={self.peak_bytes}, extra_seconds={self.extra_seconds!r}, "
            f"peak={self.peak})"
        )


def simulate(trace: Trace, plan: Plan) -> Simulation:
    """Run a plan on numbers.

    >>> from remat.plans import Kind, Op, Plan, Trace, Value, simulate
    >>> values = [Value(8, kind=Kind.INPUT)]
    >>> values += [Value(8, made_by=i, freed_after=i + 1) for i in range(2)]
    >>> values += [Value(8, made_by=2)]
    >>> ops = [Op("sin", (i,), (i + 1,), 0.5, saves=(i,)) for i in range(3)]
    >>> trace = Trace(tuple(ops), tuple(values))
    >>> simulate(trace, Plan(keep=frozenset({1, 2}))).extra_seconds
    0.0
    >>> simulate(trace, Plan(keep=frozenset())).extra_seconds
    1.0
    """
    return Simulator(trace).simulate(plan)


class Simulator:
    """Simulates many plans of one trace."""

    def __init__(self, trace: Trace) -> None:
        check_trace(trace)
        self._facts = _TraceFacts(trace)

    def simulate(self, plan: Plan) -> Simulation:
        """Return all about a plan."""
        check_plan(self._facts.trace, plan)
        return _PlanRun(self._facts, _Logic(self._facts, plan), remembers=True).simulation()

    def score(self, plan: Plan) -> tuple[int, float, int]:
        """Return the peak bytes and extra seconds of a plan, and how many ops and nodes ran."""
        run = _PlanRun(self._facts, _Logic(self._facts, plan), remembers=False)
        run.run()
        return run.memory.peak.nbytes, run.extra_seconds, len(run.memory.moments)


def simulate_plain(trace: Trace) -> Simulation:
    """Run a pass that keeps all that autograd saves."""
    return simulate(trace, Plan(frozenset(trace.saved)))


class _TraceFacts:
    """What the simulator reads of a trace for every plan."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        values = trace.values
        self.order = trace.backward_order
        self.is_external = [value.kind.is_external for value in values]
        self.fixed = [n for n, value in enumerate(values) if value.kind is Kind.FIXED]
        own = [not external for external in self.is_external]
        self.saves = [[v for v in dict.fromkeys(op.saves) if own[v]] for op in trace.ops]
        self.reads = [[v for v in dict.fromkeys(op.reads) if own[v]] for op in trace.ops]
        self.values = [Alive("value", n, value.nbytes) for n, value in enumerate(values)]
        self.gradients = [Alive("gradient", n, value.nbytes) for n, value in enumerate(values)]
        self.freed_after: list[list[int]] = [[] for _ in trace.ops]
        for number, value in enumerate(values):
            if value.freed_after is not None:
                self.freed_after[value.freed_after].append(number)


# -- what is recomputed when -------------------------------------------------------------------
#
# A node at position p of backward has two times: its replay, if it starts one, is at 2p, and it
# runs at 2p + 1.


@dataclass(slots=True)
class _HeldValue:
    """A value that is there for a while, because it is kept, held on, or recomputed for a stage."""

    until: float  # when it may be freed: never, or after its last use in a stage
    last_use: int = -1


@dataclass(slots=True)
class _StageReplay:
    ops: list[int]
    remade: set[int]  # what it makes that was not there
    last_read: dict[int, int]  # the last op of the replay that reads what it has remade
    held_values: dict[int, _HeldValue]  # what it makes and is still there afterwards


class _Logic:
    """Follows backward without looking at memory: which values are there, and which are used."""

    def __init__(self, facts: _TraceFacts, plan: Plan) -> None:
        self._trace = facts.trace
        self._facts = facts
        self._stages = plan.stages
        self.order = facts.order
        self._stage_of = _stage_numbers(plan.stages, len(self._trace.ops))
        self._uses = self._uses_by_stage()
        kept = plan.keep.union(facts.fixed)
        self.kept = {n: _HeldValue(math.inf) for n in kept if not facts.is_external[n]}
        self._there = dict(self.kept)
        self.replays: dict[int, _StageReplay] = {}  # by position
        self.recomputed: list[tuple[int, ...]] = [() for _ in plan.stages]
        for position in range(len(self.order)):
            self._go_through(position)

    def _uses_by_stage(self) -> list[dict[int, int]]:
        """Return for each stage the values that its nodes use, with the position of the last."""
        uses: list[dict[int, int]] = [{} for _ in self._stages]
        for position, op in enumerate(self.order):
            for value in self._facts.saves[op]:
                uses[self._stage_of[op]][value] = position
        return uses

    def _go_through(self, position: int) -> None:
        op = self.order[position]
        saves = self._facts.saves[op]
        if not all(self._is_there(value, 2 * position) for value in saves):
            self._replay(position, self._stage_of[op])
        for value in saves:
            self._there[value].last_use = 2 * position + 1

    def _is_there(self, number: int, time: int) -> bool:
        held_value = self._there.get(number)
        return held_value is not None and held_value.until >= time

    def _replay(self, position: int, stage: int) -> None:
        time = 2 * position
        wanted = {v: 2 * p + 1 for v, p in self._uses[stage].items() if p >= position}
        missing = [value for value in wanted if not self._is_there(value, time)]
        ops = self._closure(missing, time)
        made = {value for op in ops for value in self._trace.ops[op].makes}
        replay = _StageReplay(ops, {v for v in made if not self._is_there(v, time)}, {}, {})
        self._note_reads(replay, time)
        for value in replay.remade & self._stages[stage].hold:
            replay.held_values[value] = _HeldValue(math.inf)
        for value in missing:
            replay.held_values.setdefault(value, _HeldValue(wanted[value]))
        self._there |= replay.held_values
        for value, last in wanted.items():  # also what is there for another stage, for now
            self._there[value].until = max(self._there[value].until, last)
        self.replays[position] = replay
        self.recomputed[stage] = tuple(ops)

    def _note_reads(self, replay: _StageReplay, time: int) -> None:
        for op in replay.ops:
            for read in self._facts.reads[op]:
                if read in replay.remade:
                    replay.last_read[read] = op
                else:
                    self._there[read].last_use = time

    def _closure(self, missing: Iterable[int], time: int) -> list[int]:
        """Return the ops that make the missing values from what is there, in forward order."""
        ops: set[int] = set()
        todo = list(missing)
        while todo:
            maker = self._trace.values[todo.pop()].made_by
            assert maker is not None  # what no op makes belongs to the caller
            if maker not in ops:
                ops.add(maker)
                reads = self._facts.reads[maker]
                todo += [read for read in reads if not self._is_there(read, time)]
        return sorted(ops)


def _stage_numbers(stages: tuple[Stage, ...], ops: int) -> list[int]:
    numbers: list[int] = []
    for number, stage in enumerate(stages):
        end = stages[number + 1].first_op if number + 1 < len(stages) else ops
        numbers += [number] * (end - stage.first_op)
    return numbers


# -- what is held when -------------------------------------------------------------------------


class _HeldBytes:
    """Adds up what is held."""

    def __init__(self, *, remembers: bool) -> None:
        self.total = 0
        self.moments: list[Moment] = []
        self.peak = Moment("forward", 0, 0)
        self._remembers = remembers
        self._changes: list[tuple[Alive, int]] = []
        self._changes_at_peak = 0

    def add(self, thing: Alive) -> None:
        self.total += thing.nbytes
        if self._remembers:
            self._changes.append((thing, 1))

    def remove(self, thing: Alive) -> None:
        self.total -= thing.nbytes
        if self._remembers:
            self._changes.append((thing, -1))

    def note(self, phase: Phase, op: int) -> None:
        moment = Moment(phase, op, self.total)
        self.moments.append(moment)
        if moment.nbytes > self.peak.nbytes:
            self.peak = moment
            self._changes_at_peak = len(self._changes)

    def alive_at_peak(self) -> tuple[Alive, ...]:
        counts: Counter[Alive] = Counter()
        for thing, change in self._changes[: self._changes_at_peak]:
            counts[thing] += change
        alive = (thing for thing in counts.elements() if thing.nbytes)
        return tuple(sorted(alive, key=lambda thing: (-thing.nbytes, thing)))


class _PlanRun:
    """Carries a plan out on numbers."""

    def __init__(self, facts: _TraceFacts, logic: _Logic, *, remembers: bool) -> None:
        self._trace = facts.trace
        self._facts = facts
        self._logic = logic
        self.memory = _HeldBytes(remembers=remembers)
        self._resident: dict[int, Alive] = {}  # values that the program or the plan holds
        self._gradients: set[int] = set()
        self._kept_bytes = 0

    @property
    def extra_seconds(self) -> float:
        ops = self._trace.ops
        return math.fsum(ops[op].seconds for row in self._logic.recomputed for op in row)

    def simulation(self) -> Simulation:
        self.run()
        return Simulation(
            peak_bytes=self.memory.peak.nbytes,
            extra_seconds=self.extra_seconds,
            peak=self.memory.peak,
            alive=self.memory.alive_at_peak(),
            memory=tuple(self.memory.moments),
            recomputed=tuple(self._logic.recomputed),
            kept_bytes=self._kept_bytes,
        )

    def run(self) -> None:
        self._forward()
        self._kept_bytes = self.memory.total
        self._backward()

    def _is_kept(self, number: int) -> bool:
        held_value = self._logic.kept.get(number)
        return held_value is not None and held_value.last_use >= 0

    # -- forward --

    def _forward(self) -> None:
        for number, op in enumerate(self._trace.ops):
            for made in op.makes:
                self._make(made)
            self.memory.note("forward", number)
            for value in self._facts.freed_after[number]:
                if value in self._resident and not self._is_kept(value):
                    self._release(value)

    def _make(self, number: int) -> None:
        before = self._trace.values[number].overwrites
        thing = self._facts.values[number]
        if before is not None and not self._is_kept(before):
            if before in self._resident:
                self._release(before)
            elif self._facts.is_external[before] and not self._is_kept(number):
                thing = Alive("value", number, 0)  # it is in the caller's memory
        self._resident[number] = thing
        self.memory.add(thing)

    def _release(self, number: int) -> None:
        self.memory.remove(self._resident.pop(number))

    # -- backward --

    def _backward(self) -> None:
        freed: dict[int, list[int]] = {}
        for value, held_value in self._logic.kept.items():
            if self._is_kept(value) and self._trace.values[value].freed_after is not None:
                freed.setdefault(held_value.last_use, []).append(value)
        for position, number in enumerate(self._logic.order):
            replay = self._logic.replays.get(position)
            if replay is not None:
                self._replay(replay, 2 * position, freed)
            self._node(self._trace.ops[number], number)
            for value in freed.get(2 * position + 1, ()):
                self._release(value)

    def _replay(self, replay: _StageReplay, time: int, freed: dict[int, list[int]]) -> None:
        local: dict[int, Alive] = {}
        for number in replay.ops:
            for made in self._trace.ops[number].makes:
                self._remake(made, number, replay, local)
            self.memory.note("recompute", number)
            op = self._trace.ops[number]
            for value in dict.fromkeys((*op.reads, *op.makes)):
                if value in local and self._is_done(value, number, replay):
                    self.memory.remove(local.pop(value))
        for value, held_value in replay.held_values.items():
            thing = local.pop(value)
            if held_value.last_use > time:
                self._resident[value] = thing
                freed.setdefault(held_value.last_use, []).append(value)
            else:  # held on for nothing
                self.memory.remove(thing)
        for value in freed.get(time, ()):
            self._release(value)

    def _remake(self, made: int, op: int, replay: _StageReplay, local: dict[int, Alive]) -> None:
        before = self._trace.values[made].overwrites
        if before is not None and before in local and self._is_done(before, op, replay):
            self.memory.remove(local.pop(before))
        thing = local[made] = self._facts.values[made]
        self.memory.add(thing)

    def _is_done(self, value: int, op: int, replay: _StageReplay) -> bool:
        return value not in replay.held_values and replay.last_read.get(value, -1) <= op

    def _node(self, op: Op, number: int) -> None:
        only_here = [Alive("workspace", number, op.workspace_bytes)]
        for value in dict.fromkeys((*op.makes, *op.reads)):
            about = self._trace.values[value]
            if about.requires_grad and about.kind is Kind.PARAMETER:
                only_here.append(self._facts.gradients[value])
            elif about.requires_grad and value not in self._gradients:
                self._gradients.add(value)
                self.memory.add(self._facts.gradients[value])
        for thing in only_here:
            self.memory.add(thing)
        self.memory.note("backward", number)
        for thing in only_here:
            self.memory.remove(thing)
        for made in op.makes:
            if made in self._gradients:
                self._gradients.discard(made)
                self.memory.remove(self._facts.gradients[made])
