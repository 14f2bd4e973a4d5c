"""Checks that a trace and a plan make sense, before anybody works on them."""

from __future__ import annotations

import math
from itertools import pairwise

from .plan import Plan
from .trace import Op, Trace, Value

__all__ = ["check_plan", "check_trace"]


def check_trace(trace: Trace) -> None:
    """Raise a ValueError that names the first op or value that cannot be."""
    for number, value in enumerate(trace.values):
        _check_value(trace, number, value)
    seen: set[int] = {n for n, value in enumerate(trace.values) if value.made_by is None}
    for number, op in enumerate(trace.ops):
        _check_op(trace, number, op, seen)
        seen.update(op.makes)
    _require(len(seen) == len(trace.values), "a value names an op that does not make it")
    count = len(trace.ops)
    _require(all(0 <= op < count for op in trace.used), "`used` names an op that is not there")


def _check_value(trace: Trace, number: int, value: Value) -> None:
    what = f"value {number}"
    _require(value.nbytes >= 0, f"{what} has {value.nbytes} bytes")
    if value.made_by is None:
        _require(value.kind.is_external, f"{what} is {value.kind.value}, but no op makes it")
    else:
        _require(not value.kind.is_external, f"{what} is {value.kind.value}, but an op makes it")
        _require(0 <= value.made_by < len(trace.ops), f"{what}: there is no op {value.made_by}")
        freed = value.freed_after
        within = freed is None or value.made_by <= freed < len(trace.ops)
        _require(within, f"{what} is freed after op {freed}")
    before = value.overwrites
    _require(before is None or 0 <= before < len(trace.values), f"{what} overwrites {before}")


def _check_op(trace: Trace, number: int, op: Op, seen: set[int]) -> None:
    what = f"op {number} ({op.name})"
    for read in op.reads:
        _require(read in seen, f"{what} reads value {read}, which is not there yet")
    for made in op.makes:
        known = 0 <= made < len(trace.values) and trace.values[made].made_by == number
        _require(known and made not in seen, f"{what} makes value {made}, which is not its own")
        before = trace.values[made].overwrites
        _require(before is None or before in seen, f"{what} overwrites value {before}")
    for saved in op.saves:
        known = saved in seen or saved in op.makes
        _require(known, f"{what} saves value {saved}, which is not there yet")
    for seconds in (op.seconds, op.backward_seconds):
        _require(math.isfinite(seconds) and seconds >= 0, f"{what} takes {seconds} s")
    _require(op.workspace_bytes >= 0, f"{what} has {op.workspace_bytes} bytes of workspace")


def check_plan(trace: Trace, plan: Plan) -> None:
    """Raise a ValueError if a plan cannot be one for a trace."""
    firsts = [stage.first_op for stage in plan.stages]
    _require(bool(firsts) and firsts[0] == 0, "the first stage of a plan begins at op 0")
    _require(all(a < b for a, b in pairwise(firsts)), "the stages of a plan are not in order")
    _require(firsts[-1] < max(1, len(trace.ops)), f"a stage begins at op {firsts[-1]}")
    count = len(trace.values)
    for numbers in (plan.keep, *(stage.hold for stage in plan.stages)):
        _require(all(0 <= n < count for n in numbers), "the plan keeps a value that is not there")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(f"the trace or plan is inconsistent: {problem}")
