"""Computing states again: which ops it takes, in which order, and what may be freed when."""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import RecomputeMismatchError
from . import places
from .guards import Guards
from .records import Op, Piece, State, View, fresh_copy, over
from .sharing import checksum

__all__ = [
    "Needed",
    "Needs",
    "flat",
    "is_there",
    "needs",
    "replay",
    "unseen",
    "value_of",
]


# An op that is to be run again, and the states it is run for.
Needed = tuple[Op, list[State]]


class Needs(NamedTuple):
    """What it takes to compute states."""

    ops: list[Needed]  # in order
    outer: list[State]  # made before the region, and held by nobody
    uses: dict[State, int]
    generators: list[torch.Generator]  # that its ops drew from


# Autograd, autocast, transforms and modes: a replay passes them by.
_after_views = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.ADInplaceOrView)
_not_ours = (torch._C._dispatch_keyset_full() - _after_views) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.Python
)
unseen = Guards(partial(torch._C._ExcludeDispatchKeyGuard, _not_ours))
_current_pass = torch._C._current_graph_task_id
_new_needs = tuple.__new__  # quicker than Needs(), which parses its arguments


def is_there(state: State) -> bool:
    """Return whether a state is held, and was not written to since if it can be computed again."""
    held = state.held
    return held is not None and (state.op is None or held._version == state.held_version)


def needs(wanted: Iterable[Piece], start: int, given: Mapping[State, Any]) -> Needs:
    """Find the ops, from number `start` on, that lead from what is there to what is wanted."""
    uses: dict[State, int] = {}
    needed: dict[int, Needed] = {}
    outer: list[State] = []
    generators: list[torch.Generator] = []
    states = [piece if type(piece) is State else piece.state for piece in wanted]
    for state in states:  # which grow on the way
        if state in uses:
            uses[state] += 1
            continue
        uses[state] = 1
        op = state.op
        held = state.held
        if held is not None and (op is None or held._version == state.held_version):
            continue  # it is there
        if state in given:
            continue
        if op is None or (number := op.number) < start:
            outer.append(state)
        elif number in needed:
            needed[number][1].append(state)
        else:
            needed[number] = op, [state]
            states += op.reads
            if op.random is not None:
                generators.append(op.random[0])
    ops = [needed[number] for number in sorted(needed)]
    return _new_needs(Needs, (ops, outer, uses, generators))


def replay(
    wanted: list[Piece], needed: Needs, given: Mapping[State, Tensor], watch: Any
) -> list[Tensor]:
    """Compute what is wanted, each op once, and free each value after its last use.

    Ops run below autograd and autocast, unseen by any mode; random ones draw the numbers that
    they drew before, and leave their generators as they found them.
    """
    values = dict(given) if given else {}
    ops, _, uses, generators = needed
    began = time.perf_counter() if watch is not None else 0.0
    random = [(g, g.get_state()) for g in generators] if generators else ()
    guard = unseen.take()
    try:
        with guard:
            for op, makes in ops:
                try:
                    _run(op, makes, values, uses, given)
                except RecomputeMismatchError:
                    raise
                except Exception as error:
                    error.add_note(
                        f"{op.kind.func} was to be run again for the backward pass. It was called "
                        f"by {places.describe(op.place)}."
                    )
                    raise
                for state in op.reads:
                    if uses[state] == 1:
                        values.pop(state, None)
                    else:
                        uses[state] -= 1
                if watch is not None:
                    watch.replaying(values)
            if watch is not None:
                watch.replayed(ops, time.perf_counter() - began)
            return [_decode(piece, values) for piece in wanted]
    finally:
        unseen.give(guard)
        for generator, before in reversed(random):
            generator.set_state(before)


def _run(
    op: Op,
    states: list[State],
    values: dict[State, Tensor],
    uses: dict[State, int],
    given: Mapping[State, Tensor],
) -> None:
    """Run an op again and put what it makes among the values."""
    _, kind, given_args, _, given_keywords, random, _ = op
    source: MutableMapping[State, Tensor] = values
    if kind.writes:
        for before in op.overwrites():
            if uses[before] > 1 or before not in values or before in given:
                # Somebody else needs what is overwritten here, so this op writes to a copy.
                source = ChainMap({before: fresh_copy(_value(before, values))}, source)
    args = []
    for arg in given_args:
        if type(arg) is State:  # at once, without a call
            value = source.get(arg)
            args.append(value_of(arg) if value is None else value)
        else:
            args.append(_decode(arg, source))
    if random is not None:
        random[0].set_state(random[1])
    if given_keywords is None and not kind.needs_grad_mode:
        out = kind.call(*args)
    else:
        keywords = {name: _decode(value, source) for name, value in (given_keywords or {}).items()}
        with torch.set_grad_enabled(kind.needs_grad_mode or torch.is_grad_enabled()):
            out = kind.call(*args, **keywords)
    for state in states:
        if state.argument is not None:
            values[state] = source[op.overwritten(state.argument)]
            continue
        output = out if type(out) is Tensor else flat(out)[state.output]
        if output.shape != state.size or output.dtype is not state.dtype:
            raise _mismatch(op, state, output)
        values[state] = output


def _decode(value: Any, values: Mapping[State, Tensor]) -> Any:
    kind = type(value)
    if kind is State:
        return _value(value, values)
    if kind is View:
        return over(value, _value(value.state, values))
    if kind is list:
        return [_decode(part, values) for part in value]
    return value


def _value(state: State, values: Mapping[State, Tensor]) -> Tensor:
    value = values.get(state)
    return value_of(state) if value is None else value


def value_of(state: State) -> Tensor:
    """Return a state that is held. Raise, as autograd does, if it was written to since."""
    held = state.held
    assert held is not None
    if state.held_storage is not None and (
        held.untyped_storage() is not state.held_storage
        or held.stride() != state.stride
        or held.shape != state.size
        or held.storage_offset() != state.offset
        or held.dtype is not state.dtype
    ):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been given other memory, or "
            f"another shape over it: [{held.dtype} {list(held.shape)}], by assignment to its "
            ".data. A checkpointed region needs what it was to compute again what it forgot; "
            "assign after the backward pass"
        )
    if held._version == state.held_version:
        if state.sums:
            _compare_sums(state, held)
        if state.heirs:
            for reference in state.heirs:
                if (handle := reference()) is not None:
                    handle.region.borrow(handle, held)
        return held
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{held.dtype} {_shape_of(held)}] is at version {held._version}; a "
        f"checkpointed region read it at version {state.held_version} and needs it to compute "
        "again what it forgot. Write to a copy (x = x + 1 instead of x += 1), or after the "
        "backward pass"
    )


def _compare_sums(state: State, held: Tensor) -> None:
    """Raise if memory that is shared with others was written to, once in a backward pass."""
    assert state.sums is not None
    current = _current_pass()
    if current == state.summed_in != -1:
        return
    state.summed_in = current
    storage = held.untyped_storage()
    for geometry, before in state.sums.items():
        if checksum(storage, geometry) != before:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified through "
                f"memory that it shares: [{geometry.dtype} {list(geometry.size)}] came from a "
                "NumPy array, DLPack or a buffer. A checkpointed region needs what it was to "
                "compute again what it forgot; give it a copy (.clone()), or write after the "
                "backward pass"
            )


def _shape_of(tensor: Tensor) -> Any:
    return "nested" if tensor.is_nested else list(tensor.shape)


def _mismatch(op: Op, state: State, output: Tensor) -> RecomputeMismatchError:
    if output.dtype is state.dtype:
        before, after = f"the shape {list(state.size)}", str(list(output.shape))
        cause = (
            "an input was changed since in a way that PyTorch does not count: through .data, or a "
            "NumPy array that shares its memory"
        )
    else:
        before, after = str(state.dtype), str(output.dtype)
        cause = "torch.set_default_dtype was called in the middle of a region: say dtype= instead"
    return RecomputeMismatchError(
        f"{op.kind.func} gave {before} in the forward pass and {after} when it was run again for "
        f"the backward pass. It was called by {places.describe(op.place)}. Likely causes: {cause}"
    )


def flat(out: Any) -> list[Any]:
    """Return the outputs of an op as one list."""
    if not isinstance(out, list | tuple):
        return [out]
    return [leaf for part in out for leaf in flat(part)]
