"""Settled passes: a plan that has been followed, and whose measured peak fits, is followed again.

Such a pass checks that each op is the expected one, and does nothing else that its plan does not
need. An op is recorded if a recomputation may replay it; what a plan keeps is held; all other ops
just run. A pass that differs is recorded from that op on. What was not recorded before is then held
as an external input, so that gradients are right whatever the program does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..plans import Kind, Plan, Trace
from .engine import Engine
from .following import Planned
from .records import Made, Value
from .tracing import Key, OpFacts

__all__ = ["JUST_RUN", "SettledPass", "Step", "steps_of"]


class Step:
    """What to do about one op of a settled pass."""

    __slots__ = (
        "begins_part", "func", "held_on", "is_attended", "is_held", "is_recorded", "keeps",
        "nbytes", "next_stage", "stage",
    )  # fmt: skip

    def __init__(self, func: Any, stage: int) -> None:
        self.func = func
        self.stage = stage  # of its backward, if it saves what it has made for that, or -1
        self.next_stage = stage  # of the backward of the op after it
        self.nbytes = -1  # of the memory of its one output; -1 if that is not checked
        self.is_recorded = True
        self.is_held = False  # its output, if it is not recorded
        self.is_attended = False  # it is recorded, and something is to be done about its outputs
        self.keeps: tuple[bool, ...] = ()  # which of its outputs are held
        self.held_on: dict[int, list[int]] = {}  # stages that hold an output once it is recomputed
        self.begins_part = False  # it reads nothing that the pass has made


JUST_RUN = Step(None, -1)  # an op that no plan knows and that has no gradient
JUST_RUN.is_recorded = False


def steps_of(planned: Planned, facts: OpFacts) -> list[Step] | None:
    """Return what to do about each op of a plan; None if the pass is more than a list of ops."""
    trace, keys = planned.trace, planned.keys
    if len(keys) != len(trace.ops) or any(facts.is_function(key[0]) for key in keys):
        return None
    recorded = _recorded(trace, planned.plan, keys, facts)
    steps = []
    for number, (op, key) in enumerate(zip(trace.ops, keys, strict=True)):
        step = Step(key[0], planned.stage_of(number) if facts.saves_its_output(key[0]) else -1)
        step.next_stage = planned.stage_of(min(number + 1, len(keys) - 1))
        step.is_recorded = number in recorded
        step.keeps = planned.keeps[number] or ()
        step.nbytes = key[2][0] if len(key[2]) == 1 else -1
        reads = (trace.values[read] for read in op.reads)
        step.begins_part = all(v.made_by is None or not v.requires_grad for v in reads)
        step.is_held = any(step.keeps) or any(_is_fixed(trace, made) for made in op.makes)
        step.is_attended = any(step.keeps)
        steps.append(step)
    for (number, output), stages in planned.held_on.items():
        steps[number].held_on[output], steps[number].is_attended = stages, True
    return steps


def _recorded(trace: Trace, plan: Plan, keys: list[Key], facts: OpFacts) -> set[int]:
    """Return the ops that a recomputation may replay, and all whose writes have to be known."""
    values = trace.values
    needed = set(trace.saved) | {number for stage in plan.stages for number in stage.hold}
    todo = [number for number in needed if number not in plan.keep]
    recorded: set[int] = set()
    for number, op in enumerate(trace.ops):
        # An output that is held by itself needs no record of its op; all other cases do.
        is_simple = len(op.makes) <= 1 and len(op.makes) == len(keys[number][2])
        overwrites = any(values[made].overwrites is not None for made in op.makes)
        if not is_simple or overwrites or not facts.just_runs(keys[number][0]):
            recorded.add(number)
    recorded |= {
        before.made_by
        for value in values
        if value.overwrites is not None and (before := values[value.overwrites]).made_by is not None
    }
    todo += [read for number in recorded for read in trace.ops[number].reads]
    seen = set()
    while todo:
        number = todo.pop()
        maker = values[number].made_by
        if number in seen or maker is None:
            continue
        seen.add(number)
        is_held = (number in plan.keep and number in needed) or _is_fixed(trace, number)
        if not is_held:
            recorded.add(maker)
        if maker in recorded:
            todo += trace.ops[maker].reads
    return recorded


def _is_fixed(trace: Trace, number: int) -> bool:
    return trace.values[number].kind is Kind.FIXED


class SettledPass:
    """Where a pass is in the steps of its plan."""

    def __init__(self, planned: Planned, steps: list[Step], first: Any, facts: OpFacts) -> None:
        self.planned = planned
        self.index = 1  # of the next op: the first one has run
        self.op_number = -1  # of the last op, if it was recorded
        self.held: Value | None = None  # made by the last op, if it was not recorded
        self._steps = steps
        self._step = steps[0]
        self._reads_results = facts.reads_results
        self._first = first  # op of the program: another pass may begin with it

    @property
    def is_complete(self) -> bool:
        return self.index == len(self._steps)

    @property
    def kept_bytes(self) -> int:
        """The bytes that the plan holds by now."""
        trace = self.planned.trace
        makes = (made for op in trace.ops[: self.index] for made in op.makes)
        return sum(trace.values[n].nbytes for n in makes if n in self.planned.plan.keep)

    def next(self, func: Any, args: tuple[Any, ...]) -> Step | None:
        """Take an op if it is the expected one, and no other pass can begin with it."""
        index = self.index
        if index < len(self._steps):
            step = self._steps[index]
            if step.func is func and (
                func is not self._first or step.begins_part or self._reads_results(args)
            ):
                self.index, self._step, self.held = index + 1, step, None
                return step
        return None

    def take(self, func: Any) -> Step | None:
        """Take an op if it is the expected one."""
        if self.is_complete or self._steps[self.index].func is not func:
            return None
        self._step, self.held = self._steps[self.index], None
        self.index += 1
        return self._step

    def begins_part(self, func: Any) -> bool:
        """Return whether the plan goes on with this op, from nothing but what was there before."""
        step = None if self.is_complete else self._steps[self.index]
        return step is not None and step.func is func and step.begins_part

    def hold(self, made: Made, engine: Engine) -> Mapping[int, Sequence[int]]:
        """Hold what the last op has made as planned; return the stages that hold outputs later."""
        step = self._step
        for (value, tensor), keeps in zip(made, step.keeps, strict=False):
            if keeps and value.op is not None:
                value.dies_with = None
                if value.held is None and not value.must_recompute:
                    engine.hold_made(value, tensor)
        return step.held_on

    def stage_for(self, value: Value) -> int:
        """Return the stage that a value is saved in now: inputs are saved before their op runs."""
        step, op = self._step, value.op
        if step.stage >= 0 and (
            value is self.held or (op is not None and op.number == self.op_number)
        ):
            return step.stage
        return step.next_stage
