"""Recomputation of values: which ops are replayed, in which order, and what is freed when."""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import RecomputeMismatchError
from . import source_location
from .backend import replaying
from .memory.geometry import view_over
from .memory.records import Op, Operand, Value, View
from .memory.tensors import counters
from .randomness import draw_again
from .retention import fetch, hold, lend, writable_copy
from .sharding import ShardedParameters, sharded_parameters

__all__ = [
    "NeededOp",
    "Needs",
    "ReplayObserver",
    "decode_for_autograd",
    "find_needs",
    "flat",
    "outer_values",
    "replay",
    "values_used",
]

NeededOp = tuple[Op, list[Value]]  # an op to replay, and the values that are needed of it
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


def find_needs(wanted: Iterable[Operand], inputs: Mapping[Value, Any]) -> Needs:
    """Find the ops that compute what is wanted from the nearest values that are held."""
    uses: dict[Value, int] = {}
    needed: dict[int, NeededOp] = {}
    provided: list[Value] = []
    lent: dict[Value, Tensor] = {}
    values = [operand if type(operand) is Value else operand.value for operand in wanted]
    for value in values:  # grows in the loop
        if value in uses:
            uses[value] += 1
            continue
        uses[value] = 1
        op, held = value.op, value.held
        if held is not None and (op is None or held.tensor._version == held.version):
            continue
        if value.holders and (tensor := lend(value)) is not None:
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


def values_used(wanted: Iterable[Operand]) -> Iterable[Value]:
    """Return the values that a recomputation of what is wanted would use; for observers."""
    guard = replaying.take()
    try:
        with guard:  # what is lent is a view, which is no op of the program
            return find_needs(wanted, {}).uses
    finally:
        replaying.give(guard)


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
    holds: Collection[Value] = (),
) -> list[Tensor]:
    """Compute what is wanted, with parameters that FSDP has resharded gathered for as long."""
    shards = sharded_parameters(needed.ops)
    if shards is None:
        return _replay(wanted, needed, given, observer, holds, None)
    try:
        return _replay(wanted, needed, given, observer, holds, shards)
    finally:
        shards.release()


def _replay(
    wanted: list[Operand],
    needed: Needs,
    given: Mapping[Value, Tensor],
    observer: ReplayObserver | None,
    holds: Collection[Value],
    shards: ShardedParameters | None,
) -> list[Tensor]:
    """Compute what is wanted, each op once, and free each value after its last use.

    Values in `holds` are held afterwards. Call it below autograd, autocast and modes. Random ops
    draw the same numbers as before, and their generators are restored.
    """
    values = dict(given)
    began = time.perf_counter() if observer is not None else 0.0
    uses = needed.uses
    uses |= {value: uses[value] + 1 for value in holds if value in uses}  # no in-place write
    for number, (op, makes) in enumerate(needed.ops):
        if shards is not None:
            shards.before(number)
        try:
            _run(op, makes, values, uses, given)
        except Exception as error:
            _note_location(error, op)
            raise
        if holds:
            _hold_on(makes, holds, values)
        for value in op.reads:
            if uses[value] == 1:
                values.pop(value, None)
            else:
                uses[value] -= 1
        if shards is not None:
            shards.after(number)
        if observer is not None:
            observer.replaying(values)
    if observer is not None:
        observer.replayed(needed.ops, time.perf_counter() - began)
    return [decode_for_autograd(operand, values) for operand in wanted]


def _note_location(error: Exception, op: Op) -> None:
    """Add to an error where the op was called that failed; a mismatch says it by itself."""
    if not isinstance(error, RecomputeMismatchError):
        error.add_note(
            f"{op.traits.func} failed when it was recomputed for the backward pass. It was "
            f"called by {source_location.describe(op.location)}."
        )


def _hold_on(makes: list[Value], holds: Collection[Value], values: Mapping[Value, Tensor]) -> None:
    """Hold what an op made, as far as it is to stay."""
    for value in makes:
        if value in holds and value.held is None:
            hold(value, values[value])


def _run(
    op: Op,
    makes: list[Value],
    values: dict[Value, Tensor],
    uses: dict[Value, int],
    given: Mapping[Value, Tensor],
) -> None:
    """Replay an op and add its outputs to the values."""
    source: MutableMapping[Value, Tensor] = values
    if op.traits.writes:
        source = _with_own_targets(op, values, uses, given)
    args = []
    for arg in op.args:
        if type(arg) is Value:  # inlined, for speed
            tensor = source.get(arg)
            args.append(fetch(arg) if tensor is None else tensor)
        else:
            args.append(_decode(arg, source))
    if op.keywords is None and op.drawn is None and not op.traits.needs_grad_mode:
        out = op.call(*args)
    else:
        out = _call(op, args, source)
    for value in makes:
        if value.argument is not None:
            values[value] = source[op.overwritten(value.argument)]
            continue
        output = out if type(out) is Tensor else flat(out)[value.output]
        if output.shape != value.size or output.dtype is not value.dtype:
            raise _mismatch(op, value, output)
        values[value] = output


def _with_own_targets(
    op: Op, values: dict[Value, Tensor], uses: dict[Value, int], given: Mapping[Value, Tensor]
) -> MutableMapping[Value, Tensor]:
    """Return values in which the targets of an in-place op are copies if they are needed later."""
    source: MutableMapping[Value, Tensor] = values
    for operand in op.targets():
        value = operand if type(operand) is Value else operand.value
        if uses[value] > 1 or value not in values or value in given:
            tensor = values.get(value)
            source = ChainMap({value: writable_copy(value, tensor)}, source)
    return source


def _call(op: Op, args: list[Any], source: Mapping[Value, Tensor]) -> Any:
    """Call an op that has keywords, draws random numbers, or needs grad mode."""
    keywords = {name: _decode(value, source) for name, value in (op.keywords or {}).items()}
    call = partial(op.call, *args, **keywords)
    with torch.set_grad_enabled(op.traits.needs_grad_mode or torch.is_grad_enabled()):
        if op.drawn is None:
            return call()
        repeatable = op.traits.overwrites_all or not op.traits.writes
        return draw_again(op.drawn, call, repeatable=repeatable)


def _decode(value: Any, values: Mapping[Value, Tensor]) -> Any:
    """Return an argument with operands replaced by tensors."""
    kind = type(value)
    if kind is Value:
        tensor = values.get(value)
        return fetch(value) if tensor is None else tensor
    if kind is View:
        tensor = values.get(value.value)
        return fetch(value) if tensor is None else view_over(tensor, value.geometry)
    if kind is list:
        return [_decode(part, values) for part in value]
    return value


def decode_for_autograd(operand: Operand, values: Mapping[Value, Tensor]) -> Tensor:
    """Return the tensor of an operand. A view shares the version counter of its base.

    So a backward that writes to one saved tensor is detected by the others over the same memory.
    """
    if type(operand) is Value:
        tensor: Tensor = _decode(operand, values)
        return tensor
    counting = counters.take()
    try:
        with counting:
            view: Tensor = _decode(operand, values)
            return view
    finally:
        counters.give(counting)


def _mismatch(op: Op, value: Value, output: Tensor) -> RecomputeMismatchError:
    if output.dtype is value.dtype:
        before, after = f"the shape {list(value.size)}", str(list(output.shape))
        cause = (
            "an input was modified without its version counter: through .data, or a NumPy array "
            "that shares its memory"
        )
    else:
        before, after = str(value.dtype), str(output.dtype)
        cause = "torch.set_default_dtype was called inside a region: pass dtype= instead"
    return RecomputeMismatchError(
        f"{op.traits.func} gave {before} in the forward pass and {after} when it was recomputed "
        f"for the backward pass. It was called by {source_location.describe(op.location)}. Likely "
        f"cause: {cause}"
    )


def flat(out: Any) -> list[Any]:
    """Return the outputs of an op as a flat list."""
    if not isinstance(out, list | tuple):
        return [out]
    return [leaf for part in out for leaf in flat(part)]
