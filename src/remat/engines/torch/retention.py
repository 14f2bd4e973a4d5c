"""How data of tensors is held that others may write to: external inputs, and what is overwritten.

1. External inputs are held when they are first seen (`protect`): parameters as themselves, other
   tensors by an alias, small tensors whose writes may not be counted as a copy.
2. Values that cannot be recomputed are held (`keep`): outputs of opaque ops, and memory that is
   read before a write to it was recorded. So are random numbers smaller than the generator's state.
3. Before memory is overwritten, what was read of it and cannot be recomputed is copied.
4. An input that was modified after it was read is an error (`fetch`), never a wrong gradient.

What is kept of computed values is decided in `core.retention`.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Parameter

from ...core.records import Geometry, Held, Operand, Origin, Value
from ...errors import ModifiedInputError
from .backend import (
    below_autograd,
    current_graph_task,
    is_flat_parameter,
    with_version_counters,
    without_dispatch_modes,
)
from .memory.external_memory import SMALL, checksum
from .memory.geometry import may_overlap, view_over
from .memory.tensors import alias, copy_extent, copy_storage, is_plain, version_of
from .memory.uncounted_writes import optimizer_steps_of
from .memory.values import held_by, lies_like, note_geometry

__all__ = [
    "fetch",
    "hold",
    "hold_alias",
    "hold_copy",
    "hold_made",
    "hold_old_geometry",
    "hold_old_shape",
    "keep",
    "made_by_op",
    "note_read",
    "protect",
    "save_before_write",
    "writable_copy",
]

_current_pass = current_graph_task


# -- holding ---------------------------------------------------------------------------------------


def hold(value: Value, tensor: Tensor) -> None:
    """Hold a value by a detached tensor with the original geometry."""
    # `held_by`, inlined: this is called for most ops.
    value.held = Held(tensor, -1 if tensor.is_inference() else tensor._version)


def made_by_op(value: Value, tensor: Tensor) -> Tensor:
    """Return an alias of what an op has made, in the geometry of the value.

    An in-place op may have written through a view: the value is all of the memory under it.
    """
    result = alias(tensor)
    if value.argument is None or value.geometry is None:
        return result
    with without_dispatch_modes(), with_version_counters():
        return view_over(result, value.geometry)


def hold_made(value: Value, tensor: Tensor) -> None:
    """Hold a value that an op has just made. Autograd counts a write when the op is done."""
    if value.argument is not None and value.geometry is None and value.tensor() is not tensor:
        # The op has written through a view of memory whose own geometry nobody has noted. A replay
        # would give it, and what is held would have another one.
        before = value.version
        keep(value, tensor)
        value.version = before
    else:
        hold(value, made_by_op(value, tensor))
    assert value.held is not None
    value.held.version = value.version


def hold_copy(value: Value) -> None:
    """Replace what is held of a value by a copy."""
    assert value.held is not None
    value.held = held_by(_copy_of(value.held), is_copy=True)


def hold_alias(held: Held) -> None:
    """Hold an alias of a parameter instead of the parameter itself."""
    held.tensor = alias(held.tensor)


def hold_old_shape(held: Held) -> None:
    """Hold a parameter by an alias, because an op is about to change its shape in place."""
    hold_alias(held)
    held.storage = None


def hold_old_geometry(held: Held, geometry: Geometry) -> None:
    """Hold a parameter with the geometry that it had before its .data was assigned."""
    size, stride, offset, *_ = geometry
    with without_dispatch_modes(), with_version_counters():
        held.tensor = held.tensor.detach().as_strided(size, stride, offset)


def keep(value: Value, tensor: Tensor) -> None:
    """Hold a value that was not read yet, and never recompute it."""
    value.origin = Origin.OPAQUE
    value.op = None
    value.tensor = ref(tensor)
    note_geometry(value, tensor)
    hold(value, alias(tensor))


def protect(value: Value, tensor: Tensor, storage: Any) -> None:
    """Hold an external input. `storage` is None if it is no plain memory."""
    if value.origin is Origin.PARAMETER:
        value.held = Held(tensor, -1 if tensor.is_inference() else tensor._version)
        value.held.storage = storage
        value.held.optimizer_steps = optimizer_steps_of(tensor)
    elif tensor.is_inference():
        # Inference tensors have no version counter, so a write could not be detected.
        value.held = held_by(copy_storage(tensor), is_copy=True)
    else:
        # Not the tensor itself: an in-place op may give it a graph that refers to this value.
        # Leaves that require grad, the parameters, never get one.
        hold(value, alias(tensor))
        if storage is not None and type(tensor) is not Parameter:
            _expect_uncounted_writes(value, tensor, storage)


def _expect_uncounted_writes(value: Value, tensor: Tensor, storage: Any) -> None:
    """Hold a copy or a checksum of a tensor whose writes may not be counted.

    That is shared memory (NumPy, DLPack), and all that may be the statistics of a batch norm or the
    scale of a quantization observer. Small tensors are copied, large ones get a checksum.
    """
    if storage.nbytes() <= SMALL and not tensor.requires_grad:
        if value.is_shared or tensor.dim() <= 1:
            hold_copy(value)
            value.is_snapshot = True
    elif value.is_shared and tensor.device.type == "cpu":
        assert value.held is not None
        value.held.checksums = {}


def note_read(value: Value, geometry: Geometry) -> None:
    """Note what is read of an external input: it is copied before it is overwritten."""
    held = value.held
    if held is None:
        return
    if value.reads is None:
        value.reads = set()
    if geometry in value.reads:
        return
    value.reads.add(geometry)
    if held.checksums is not None:
        held.checksums[geometry] = checksum(held.tensor.untyped_storage(), geometry)
    if value.is_rewritten and not held.is_copy and _nbytes(geometry) <= SMALL:
        _copy_part(held, geometry)


# -- before writes ---------------------------------------------------------------------------------


def save_before_write(value: Value, target: Geometry | None) -> None:
    """Copy what is about to be overwritten of a value that cannot be recomputed.

    A value that can be recomputed is dropped. Its version counter would not always show the write:
    tensors over shared memory have separate counters.
    """
    for holder in value.living_holders():
        holder.drop()
    held = value.held
    if held is None or held.is_copy:
        return
    if value.op is not None:
        value.held = None
    elif version_of(held.tensor) == held.version:  # otherwise it is stale already
        if value.origin.is_external and target is not None and is_plain(held.tensor):
            for geometry in _reads_of(value):
                if may_overlap(geometry, target):
                    _copy_part(held, geometry)
        else:
            hold_copy(value)


def _reads_of(value: Value) -> set[Geometry]:
    reads = value.reads or set()
    if value.origin is Origin.PARAMETER and value.geometry is not None:
        return reads | {value.geometry}  # reads of whole parameters are not noted, to save time
    return reads


def _copy_part(held: Held, geometry: Geometry) -> None:
    if geometry not in held.copies:
        with without_dispatch_modes(), below_autograd():
            held.copies[geometry] = copy_extent(view_over(held.tensor, geometry))
        if held.checksums is not None:
            held.checksums.pop(geometry, None)


def _nbytes(geometry: Geometry) -> int:
    count: int = geometry.dtype.itemsize
    for n in geometry.size:
        count *= int(n)
    return count


# -- fetching --------------------------------------------------------------------------------------


def fetch(operand: Operand) -> Tensor:
    """Return the tensor of an operand whose value is held. Call it below autograd.

    Raises ModifiedInputError if it was modified, as autograd does.
    """
    value = operand if type(operand) is Value else operand.value
    held = value.held
    assert held is not None
    if held.copies and (copy := held.copies.get(_geometry_of(operand))) is not None:
        found: Tensor = copy
        return found
    tensor: Tensor = held.tensor
    if held.storage is not None:
        _check_parameter(value, held)
    if tensor._version != held.version:
        raise _modified(held)
    if held.checksums:
        _compare_checksums(held)
    if value.lends_to:
        for reference in value.lends_to:
            if (saved := reference()) is not None:
                saved.borrow(tensor)
    return tensor if type(operand) is Value else view_over(tensor, operand.geometry)


def _geometry_of(operand: Operand) -> Geometry:
    geometry = operand.geometry
    assert geometry is not None
    return geometry


def writable_copy(value: Value, tensor: Tensor | None) -> Tensor:
    """Return a copy of a value for an in-place op: of `tensor`, or of what is held."""
    if tensor is not None:
        return copy_storage(tensor)
    held = value.held
    assert held is not None
    if not held.copies:
        fetch(value)  # raises if it was modified
    return _copy_of(held)


def _copy_of(held: Held) -> Tensor:
    """Return a copy of what is held, with overwritten parts restored."""
    copy = copy_storage(held.tensor)
    with without_dispatch_modes(), below_autograd():
        for geometry, part in held.copies.items():
            view_over(copy, geometry).copy_(part)
    return copy


def _check_parameter(value: Value, held: Held) -> None:
    """Raise if a parameter was given another storage or geometry, or was modified or freed."""
    tensor, storage = held.tensor, held.storage
    if tensor.untyped_storage() is not storage or not lies_like(value, tensor):
        if is_flat_parameter(tensor):
            raise _resharded(tensor)  # FSDP1
        raise ModifiedInputError(
            "one of the variables needed for gradient computation has been given other memory, or "
            f"another shape over it: [{tensor.dtype} {list(tensor.shape)}], by assignment to its "
            ".data. A checkpointed region needs the old values to recompute its activations; "
            "assign after the backward pass"
        )
    if optimizer_steps_of(tensor) != held.optimizer_steps:
        raise ModifiedInputError(
            f"one of the variables needed for gradient computation, a parameter [{tensor.dtype} "
            f"{list(tensor.shape)}], has been modified by the step of a fused optimizer. A "
            "checkpointed region needs the old values to recompute its activations; call "
            "optimizer.step() after the backward pass"
        )
    if not storage.nbytes() and tensor.numel():
        raise _resharded(tensor)


def _resharded(tensor: Tensor) -> ModifiedInputError:
    return ModifiedInputError(
        f"the memory of a parameter [{tensor.dtype} {list(tensor.shape)}] has been freed, as "
        "FullyShardedDataParallel does with the parameters of a module that has been run. A "
        "checkpointed region needs it to recompute its activations: checkpoint each sharded "
        "module by itself instead of several in one region or scope, or use fully_shard, whose "
        "parameters are gathered when they are needed"
    )


def _compare_checksums(held: Held) -> None:
    """Raise if shared memory was modified. It is checked once per backward pass."""
    current = _current_pass()
    if current == held.checked_in != -1:
        return
    held.checked_in = current
    assert held.checksums is not None
    storage = held.tensor.untyped_storage()
    for geometry, before in held.checksums.items():
        if checksum(storage, geometry) != before:
            raise ModifiedInputError(
                "one of the variables needed for gradient computation has been modified through "
                f"memory that it shares: [{geometry.dtype} {list(geometry.size)}] came from a "
                "NumPy array, DLPack or a buffer. A checkpointed region needs the old values to "
                "recompute its activations; pass a copy (.clone()), or write after the backward "
                "pass"
            )


def _modified(held: Held) -> ModifiedInputError:
    tensor = held.tensor
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return ModifiedInputError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.dtype} {shape}] is at version {tensor._version}; a checkpointed "
        f"region read it at version {held.version} and needs it to recompute its activations. "
        "Write to a copy (x = x + 1 instead of x += 1), or after the backward pass"
    )
