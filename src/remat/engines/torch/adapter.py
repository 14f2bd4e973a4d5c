"""The adapter of the core to PyTorch: runs ops again, tells versions, geometries and passes."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ...core.engine import Memory
from ...core.records import Op, Operand, Value, View, value_of
from ...errors import RecomputeMismatchError
from . import source_location
from .backend import current_graph_task, queue_callback, replaying
from .memory.geometry import view_over
from .memory.tensors import alias, counters, flat, is_plain, nbytes_of, storage_number
from .memory.values import current_tensor
from .randomness import draw_again
from .retention import fetch, hold_made, writable_copy
from .sharding import sharded_parameters

__all__ = ["TORCH", "decode_for_autograd"]


def _note_location(error: Exception, op: Op) -> None:
    """Add to an error where the op was called that failed; a mismatch says it by itself."""
    if not isinstance(error, RecomputeMismatchError):
        error.add_note(
            f"{op.traits.func} failed when it was recomputed for the backward pass. It was "
            f"called by {source_location.describe(op.location)}."
        )


def _run(
    op: Op,
    makes: list[Value],
    values: dict[Value, Tensor],
    uses: Mapping[Value, int],
    given: Mapping[Value, Tensor],
) -> None:
    """Replay an op and add its outputs to the values."""
    try:
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
    except Exception as error:
        _note_location(error, op)
        raise


def _with_own_targets(
    op: Op, values: dict[Value, Tensor], uses: Mapping[Value, int], given: Mapping[Value, Tensor]
) -> MutableMapping[Value, Tensor]:
    """Return values in which the targets of an in-place op are copies if they are needed later."""
    source: MutableMapping[Value, Tensor] = values
    for operand in op.targets():
        value = value_of(operand)
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


class TorchAdapter:
    """What the core asks of PyTorch (core.engine.Engine)."""

    replaying = replaying
    version: Callable[[Any], int] = attrgetter("_version")
    alias = staticmethod(alias)
    view = staticmethod(view_over)
    nbytes = staticmethod(nbytes_of)
    current_tensor = staticmethod(current_tensor)
    hold_made = staticmethod(hold_made)
    fetch = staticmethod(fetch)
    run = staticmethod(_run)
    decode = staticmethod(decode_for_autograd)
    gather = staticmethod(sharded_parameters)
    current_pass = staticmethod(current_graph_task)
    at_end_of_pass = staticmethod(queue_callback)
    is_differentiating = staticmethod(torch.is_grad_enabled)

    def await_release(
        self, value: Value, tensor: Tensor, callback: Callable[[Any], None]
    ) -> object:
        return ref(tensor, callback)

    def stride(self, tensor: Tensor) -> tuple[int, ...] | None:
        return None if tensor.is_contiguous() else tensor.stride()

    def memory(self, tensor: Tensor) -> Memory | None:
        if not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        return Memory(storage_number(storage), storage, storage.nbytes())


TORCH = TorchAdapter()
