"""Recomputation of values: which ops are replayed, in which order, and what is freed when."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from .engine import Engine, Gathered, NeededOp
from .records import Operand, Value
from .retention import hold, lend

__all__ = ["Needs", "ReplayObserver", "find_needs", "outer_values", "replay", "values_used"]

Tensor = Any  # an array of the engine
_new_needs = tuple.__new__  # faster than Needs(), which parses its arguments


class ReplayObserver(Protocol):
    """Is notified about replays."""

    def replaying(self, values: Mapping[Value, Tensor]) -> None:
        """These values exist now."""

    def replayed(self, ops: list[NeededOp], seconds: float) -> None: ...


class Needs(NamedTuple):
    """What a recomputation needs."""

    ops: list[NeededOp]  # in order
    inputs: list[Value]  # provided by the parent region
    lent: dict[Value, Tensor]  # held by saved tensors
    uses: dict[Value, int]


def find_needs(wanted: Iterable[Operand], inputs: Mapping[Value, Any], engine: Engine) -> Needs:
    """Find the ops that compute what is wanted from the nearest values that are held."""
    uses: dict[Value, int] = {}
    needed: dict[int, NeededOp] = {}
    provided: list[Value] = []
    lent: dict[Value, Tensor] = {}
    version = engine.version
    values = [operand if type(operand) is Value else operand.value for operand in wanted]
    for value in values:  # grows in the loop
        if value in uses:
            uses[value] += 1
            continue
        uses[value] = 1
        op, held = value.op, value.held
        if held is not None and (op is None or version(held.tensor) == held.version):
            continue
        if value.holders and (tensor := lend(value, engine)) is not None:
            lent[value] = tensor
        elif value in inputs:
            provided.append(value)
        else:
            assert op is not None, "a value is neither held nor recomputable"
            if op.number in needed:
                needed[op.number][1].append(value)
            else:
                needed[op.number] = op, [value]
                values += op.reads
    ops = [needed[number] for number in sorted(needed)]
    return _new_needs(Needs, (ops, provided, lent, uses))


def values_used(wanted: Iterable[Operand], engine: Engine) -> Iterable[Value]:
    """Return the values that a recomputation of what is wanted would use; for observers."""
    guard = engine.replaying.take()
    try:
        with guard:  # what is lent is a view, which is no op of the program
            return find_needs(wanted, {}, engine).uses
    finally:
        engine.replaying.give(guard)


def outer_values(wanted: Iterable[Operand], start: int) -> list[Value]:
    """Return the values made before op `start` from which what is wanted is computed.

    Those that are held are among them.
    """
    values = [operand if type(operand) is Value else operand.value for operand in wanted]
    seen = set(values)
    outer = []
    for value in values:  # grows in the loop
        op = value.op
        if op is None:
            continue
        if op.number < start:
            outer.append(value)
            continue
        if value.held is not None:
            continue
        for read in op.reads:
            if read not in seen:
                seen.add(read)
                values.append(read)
    return outer


def replay(
    wanted: list[Operand],
    needed: Needs,
    given: Mapping[Value, Tensor],
    observer: ReplayObserver | None,
    holds: Collection[Value],
    engine: Engine,
) -> list[Tensor]:
    """Compute what is wanted, with inputs that are not there gathered for as long."""
    gathered = engine.gather(needed.ops)
    if gathered is None:
        return _replay(wanted, needed, given, observer, holds, engine, None)
    try:
        return _replay(wanted, needed, given, observer, holds, engine, gathered)
    finally:
        gathered.release()


def _replay(
    wanted: list[Operand],
    needed: Needs,
    given: Mapping[Value, Tensor],
    observer: ReplayObserver | None,
    holds: Collection[Value],
    engine: Engine,
    gathered: Gathered | None,
) -> list[Tensor]:
    """Compute what is wanted, each op once, and free each value after its last use.

    Values in `holds` are held afterwards. Call it under a guard of the engine. Random ops draw the
    same numbers as before, and their generators are restored.
    """
    values = dict(given)
    began = time.perf_counter() if observer is not None else 0.0
    uses, run = needed.uses, engine.run
    uses |= {value: uses[value] + 1 for value in holds if value in uses}  # no in-place write
    for number, (op, makes) in enumerate(needed.ops):
        if gathered is not None:
            gathered.before(number)
        run(op, makes, values, uses, given)
        for value in makes if holds else ():
            if value in holds and value.held is None:
                hold(value, values[value], engine)
        for value in op.reads:
            if uses[value] == 1:
                values.pop(value, None)
            else:
                uses[value] -= 1
        if gathered is not None:
            gathered.after(number)
        if observer is not None:
            observer.replaying(values)
    if observer is not None:
        observer.replayed(needed.ops, time.perf_counter() - began)
    return [engine.decode(operand, values) for operand in wanted]
