"""Following a plan: which outputs of an op are kept, and to which stage it belongs."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from ..plans import PassRecord, Plan, Trace
from .tracing import Key

_MOST_LEFTS = 6

__all__ = ["Follower", "Planned", "needed_keeps"]


class Planned:
    """A plan for a program that is recognised by its ops."""

    def __init__(self, keys: list[Key], trace: Trace, plan: Plan, seconds: list[float]) -> None:
        self.keys = keys
        self.trace = trace
        self.plan = plan
        self.seconds = seconds  # the least that every op has taken
        self.passes = 0  # that followed it to the end
        # What to plan with when backward has ended: a trace, and the least seconds of its ops.
        self.refined: tuple[Trace, list[float]] | None = None
        self.record: PassRecord | None = None  # of the last pass that was measured
        self.is_settled = False  # it fits: passes follow it without being measured
        self._lefts = 0  # by settled passes
        self._passes_since = 0  # that were measured since
        self.reserved = 0  # bytes of the budget that are left for what the trace does not know
        self.starts = [stage.first_op for stage in plan.stages]
        keep = needed_keeps(trace, plan)
        self.keeps = [
            tuple(number in keep for number in op.makes) if not keep.isdisjoint(op.makes) else None
            for op in trace.ops
        ]
        self.held_on: dict[tuple[int, int], list[int]] = {}  # stages by op and output
        for stage, part in enumerate(plan.stages):
            for number in part.hold:
                made_by = trace.values[number].made_by
                assert made_by is not None
                output = trace.ops[made_by].makes.index(number)
                self.held_on.setdefault((made_by, output), []).append(stage)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed."""
        return not self.plan.extra_seconds and not any(stage.hold for stage in self.plan.stages)

    @property
    def has_settled(self) -> bool:
        """Whether it is settled, or was until a pass left it."""
        return self.is_settled or self._lefts > 0

    def fits(self, *, is_plain: bool) -> None:
        """A measured pass fits: let the next ones be settled, if they are no more than their ops.

        After a settled pass has left the plan it takes more passes each time.
        """
        self._passes_since += 1
        if is_plain and self._passes_since >= 2**self._lefts:
            self.is_settled = True

    def was_left(self) -> None:
        """A settled pass was not the one that was planned."""
        self.is_settled = False
        self._lefts, self._passes_since = min(self._lefts + 1, _MOST_LEFTS), 0

    @property
    def needs_nothing(self) -> bool:
        """Whether nothing is recomputed, and by a good margin."""
        margin = self.plan.memory_budget or 0
        return self.passes > 0 and self.keeps_all and self.plan.peak_bytes <= 0.9 * margin

    def stage_of(self, op: int) -> int:
        return max(bisect_right(self.starts, op) - 1, 0)


def needed_keeps(trace: Trace, plan: Plan) -> frozenset[int]:
    """Return the values to keep that backward or a recomputation reads.

    The simulator takes no account of others, so a planner may leave them in.
    """
    found = set(trace.saved)
    todo = [number for number in found if number not in plan.keep]
    while todo:
        maker = trace.values[todo.pop()].made_by
        new = [] if maker is None else [n for n in trace.ops[maker].reads if n not in found]
        found.update(new)
        todo += [number for number in new if number not in plan.keep]
    return plan.keep & found


class Follower:
    """Recognises which of the planned programs is running."""

    def __init__(self, planned: list[Planned]) -> None:
        self._planned = planned  # the one that ran last comes first
        self._seen: list[Key] = []
        self.current: Planned | None = planned[0] if planned else None

    def step(self, key: Any) -> Planned | None:
        """Take the next op; return the plan that it belongs to, None from where there is none."""
        number = len(self._seen)
        if self.current is not None:
            self.current = self.next_plan(key)
        self._seen.append(key if self.current is None else self.current.keys[number])
        return self.current

    def next_plan(self, key: Any) -> Planned | None:
        """Return the plan in which an op comes next, if there is one; it is not taken."""
        number, current = len(self._seen), self.current
        if current is not None and _has(current, number, key):
            return current
        return next(
            (
                other
                for other in self._planned
                if _has(other, number, key) and other.keys[:number] == self._seen[:number]
            ),
            None,
        )

    def begins_part(self, func: Any) -> bool:
        """Return whether the plan goes on with this op, from nothing but what was there before."""
        number, current = len(self._seen), self.current
        if current is None or number >= len(current.keys) or current.keys[number][0] is not func:
            return False
        values = current.trace.values
        reads = (values[read] for read in current.trace.ops[number].reads)
        return all(value.made_by is None or not value.requires_grad for value in reads)

    @property
    def is_complete(self) -> bool:
        """Whether the program has run as planned, to its end."""
        return self.current is not None and len(self._seen) == len(self.current.keys)


def _has(planned: Planned, number: int, key: Key) -> bool:
    return number < len(planned.keys) and planned.keys[number] == key
