"""Retention: the one place that holds, drops and lends the bytes of values.

1. What comes from outside is held from the first time that it is seen (`protect`): a parameter as
   itself, other tensors by an alias, small ones that may be written to unseen as a copy.
2. What cannot be computed again is held (`keep`): results of opaque ops, memory that is read before
   a write to it was seen, and random numbers that take no more bytes than their generator's state.
3. By-products that are tiny beside what their op is run for are held with it.
4. What a policy says to keep, and what the program marks, is held (`Retention`, `hold`).
5. Before memory is overwritten, what was read of it and cannot be computed again is copied.
6. A replay starts from the nearest bytes that anybody holds: a value itself, or a saved tensor that
   waits for autograd to ask for it (`lend`).
7. Bytes that were changed behind our back are an error (`fetch`), never a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor
from torch.nn import Parameter

from ...errors import ModifiedInputError
from ...plans.policy import (
    Candidate,
    Decision,
    Policy,
    SaveBelow,
    SaveEverything,
    SaveNames,
    SaveNothing,
)
from .backend import below_autograd, current_graph_task, without_dispatch_modes
from .memory.external_memory import SMALL, checksum
from .memory.geometry import Geometry, may_overlap, view_over
from .memory.records import Held, Holder, Operand, Origin, Value
from .memory.tensors import alias, copy_extent, copy_storage, is_plain, nbytes_of, version_of
from .memory.uncounted_writes import optimizer_steps_of

__all__ = [
    "CallPolicy",
    "Retention",
    "drop",
    "fetch",
    "hold",
    "hold_copy",
    "is_available",
    "keep",
    "keep_by_products",
    "lend",
    "note_read",
    "protect",
    "save_before_write",
    "writable_copy",
]

_TINY = 1 << 12  # bytes that are not worth to be counted
_TINY_SHARE = 1000  # as large as its by-products is what an op is run for
_SMALL_SHARE = 16  # by-products up to this part are worth to be held with what is held
_current_pass = current_graph_task


# -- holding ---------------------------------------------------------------------------------------


def hold(value: Value, tensor: Tensor) -> None:
    """Hold a value by a tensor without history, which lies as the one made with it."""
    value.held = Held(tensor)


def hold_copy(value: Value) -> None:
    """Hold a value in memory of its own."""
    assert value.held is not None
    value.held = Held(_copy_of(value.held), is_copy=True)


def keep(value: Value, tensor: Tensor) -> None:
    """Hold a value that was not read yet, by a tensor over it; it is never computed again."""
    value.origin = Origin.OPAQUE
    value.op = None
    value.tensor = ref(tensor)
    value.note_geometry(tensor)
    hold(value, alias(tensor))


def protect(value: Value, tensor: Tensor, storage: Any) -> None:
    """Hold a value from outside. `storage` is None if it is no plain memory."""
    if value.origin is Origin.PARAMETER:
        value.held = Held(tensor)
        value.held.storage = storage
        value.held.optimizer_steps = optimizer_steps_of(tensor)
    elif tensor.is_inference():
        # It does not count its writes, so we could not see one.
        value.held = Held(copy_storage(tensor), is_copy=True)
    else:
        # Not the tensor itself: a write may give it a history that leads back to us. Leaves that
        # require grad, the parameters, never get one.
        hold(value, alias(tensor))
        if storage is not None and type(tensor) is not Parameter:
            _expect_unseen_writes(value, tensor, storage)


def _expect_unseen_writes(value: Value, tensor: Tensor, storage: Any) -> None:
    """Hold a copy of what is small, a checksum of what is large, if it may be written to unseen.

    That is memory of NumPy and the like, and all that may be statistics of a batch norm or the
    scale of an observer of quantization: autograd does not count what these write.
    """
    if storage.nbytes() <= SMALL and not tensor.requires_grad:
        if value.is_shared or tensor.dim() <= 1:
            hold_copy(value)
            value.is_snapshot = True
    elif value.is_shared and tensor.device.type == "cpu":
        assert value.held is not None
        value.held.checksums = {}


def note_read(value: Value, geometry: Geometry) -> None:
    """Note what is read of a value from outside: it is saved before somebody overwrites it."""
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


def keep_by_products(made: Sequence[tuple[Value, Tensor]]) -> None:
    """Hold what is tiny beside the rest, as the statistics of a norm: else all is run again.

    What is small beside the rest (the logsumexp of an attention) is held as long as the tensor that
    the op is run for lives, and on if that one is held.
    """
    main, largest = max(made, key=lambda pair: pair[1].nbytes)
    small = []
    for value, tensor in made:
        if tensor.nbytes <= min(largest.nbytes // _TINY_SHARE, _TINY):
            hold(value, alias(tensor))
        elif tensor.nbytes <= largest.nbytes // _SMALL_SHARE:
            hold(value, alias(tensor))
            small.append(ref(value))
    for reference in small:
        by_product = reference()
        if by_product is not None:
            by_product.companion = ref(largest, partial(_drop_by_product, ref(main), reference))


def _drop_by_product(main: ref[Value], by_product: ref[Value], _: Any) -> None:
    """The tensor that an op was run for is gone: unless it is held, drop its by-product."""
    value, small = main(), by_product()
    if small is not None and small.op is not None and (value is None or not _is_held(value)):
        small.held = None


def _is_held(value: Value) -> bool:
    return value.held is not None or any(h.tensor is not None for h in value.living_holders())


# -- dropping --------------------------------------------------------------------------------------


def drop(value: Value) -> None:
    """Hold a value no longer, if it can be computed again."""
    if value.op is not None:
        value.held = None
    for holder in value.living_holders():
        holder.drop()


def save_before_write(value: Value, target: Geometry | None, *, is_needed: bool) -> None:
    """Save what is about to be overwritten of a value that cannot be computed again.

    What can be computed again is dropped. Autograd would see by its version that a saved tensor was
    written to, but not for all: some lie over the memory of others and count by themselves.
    """
    for holder in value.living_holders():
        holder.drop()
    held = value.held
    if held is None or held.is_copy:
        return
    if value.op is not None or not is_needed:
        value.held = None
    elif version_of(held.tensor) == held.version:  # or it is stale already
        if value.is_external and target is not None and is_plain(held.tensor):
            for geometry in _reads_of(value):
                if may_overlap(geometry, target):
                    _copy_part(held, geometry)
        else:
            hold_copy(value)


def _reads_of(value: Value) -> set[Geometry]:
    reads = value.reads or set()
    if value.origin is Origin.PARAMETER and value.geometry is not None:
        return reads | {value.geometry}  # (that it is read is not noted: it is the usual case)
    return reads


def _copy_part(held: Held, geometry: Geometry) -> None:
    if geometry not in held.copies:
        with without_dispatch_modes(), below_autograd():
            held.copies[geometry] = copy_extent(view_over(held.tensor, geometry))
        if held.checksums is not None:
            held.checksums.pop(geometry, None)


def _nbytes(geometry: Geometry) -> int:
    count = geometry.dtype.itemsize
    for n in geometry.size:
        count *= int(n)
    return count


# -- lending and fetching --------------------------------------------------------------------------


def is_available(value: Value) -> bool:
    """Return whether a value is held; one that can be computed again also unchanged."""
    held = value.held
    return held is not None and (value.op is None or held.tensor._version == held.version)


def lend(value: Value) -> Tensor | None:
    """Return the bytes of a value that a saved tensor has, if one does.

    A backward may have written to them since: then nobody has them. To be called below autograd.
    """
    for holder in value.living_holders():
        tensor = holder.unchanged_tensor()
        if tensor is not None:
            if type(holder.operand) is Value:
                return tensor
            if value.geometry is not None:
                return view_over(tensor, value.geometry)
    return None


def fetch(operand: Operand) -> Tensor:
    """Return the tensor of an operand whose value is held. To be called below autograd.

    Raises, as autograd does, if it was written to since.
    """
    value = operand if type(operand) is Value else operand.value
    held = value.held
    assert held is not None
    if held.copies and (copy := held.copies.get(_geometry_of(operand))) is not None:
        return copy
    tensor = held.tensor
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
    """Return a copy of a value that an op may write to: of `tensor`, or of what is held."""
    if tensor is not None:
        return copy_storage(tensor)
    held = value.held
    assert held is not None
    if not held.copies:
        fetch(value)  # raises if it was changed
    return _copy_of(held)


def _copy_of(held: Held) -> Tensor:
    """Return a copy of what is held, with the parts that were overwritten since as they were."""
    copy = copy_storage(held.tensor)
    with without_dispatch_modes(), below_autograd():
        for geometry, part in held.copies.items():
            view_over(copy, geometry).copy_(part)
    return copy


def _check_parameter(value: Value, held: Held) -> None:
    """Raise if a parameter lies over other memory than it did, or in another way."""
    tensor, storage = held.tensor, held.storage
    if tensor.untyped_storage() is not storage or not value.lies_like(tensor):
        if getattr(tensor, "_is_flat_param", False):
            raise _resharded(tensor)  # FSDP1
        raise ModifiedInputError(
            "one of the variables needed for gradient computation has been given other memory, or "
            f"another shape over it: [{tensor.dtype} {list(tensor.shape)}], by assignment to its "
            ".data. A checkpointed region needs what it was to compute again what it dropped; "
            "assign after the backward pass"
        )
    if optimizer_steps_of(tensor) != held.optimizer_steps:
        raise ModifiedInputError(
            f"one of the variables needed for gradient computation, a parameter [{tensor.dtype} "
            f"{list(tensor.shape)}], has been modified by the step of a fused optimizer. A "
            "checkpointed region needs what it was to compute again what it dropped; call "
            "optimizer.step() after the backward pass"
        )
    if not storage.nbytes() and tensor.numel():
        raise _resharded(tensor)


def _resharded(tensor: Tensor) -> ModifiedInputError:
    return ModifiedInputError(
        f"the memory of a parameter [{tensor.dtype} {list(tensor.shape)}] has been freed, as "
        "FullyShardedDataParallel does with the parameters of a module that has been run. A "
        "checkpointed region needs it to compute again what it dropped: checkpoint each sharded "
        "module by itself instead of several in one region or scope, or use fully_shard, whose "
        "parameters are gathered when they are needed"
    )


def _compare_checksums(held: Held) -> None:
    """Raise if memory that is shared with others was written to, once in a backward pass."""
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
                "NumPy array, DLPack or a buffer. A checkpointed region needs what it was to "
                "compute again what it dropped; give it a copy (.clone()), or write after the "
                "backward pass"
            )


def _modified(held: Held) -> ModifiedInputError:
    tensor = held.tensor
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return ModifiedInputError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.dtype} {shape}] is at version {tensor._version}; a checkpointed "
        f"region read it at version {held.version} and needs it to compute again what it dropped. "
        "Write to a copy (x = x + 1 instead of x += 1), or after the backward pass"
    )


# -- policies --------------------------------------------------------------------------------------


class CallPolicy(Policy):
    """A policy that is asked about the call of an op: the tensors that went in and came out."""

    __slots__ = ()

    def decide(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision:
        raise NotImplementedError


class Retention:
    """What one region keeps: asks a policy about values that are made, saved and named.

    With a `limit` it keeps all that autograd saves, up to that many bytes; if that is not enough,
    it keeps nothing.
    """

    def __init__(self, policy: Policy | None, limit: int | None = None) -> None:
        self.policy = policy
        self._was_asked = self._has_kept = False
        self.asks_about_made = policy is not None and not isinstance(policy, _ABOUT_SAVED)
        self._room = limit
        self._counted = WeakSet[Value]()  # that take of the room
        self._kept: list[ref[Holder]] = []

    @property
    def matched_nothing(self) -> bool:
        """Whether a policy was asked and has kept nothing."""
        return self.policy is not None and self._was_asked and not self._has_kept

    def made(
        self, made: Sequence[tuple[Value, Tensor]], args: Any, kwargs: dict[str, Any], out: Any
    ) -> None:
        """Decide about what an op made; all that it made goes with what the op is run for."""
        policy = self.policy
        self._was_asked = True
        main, tensor = max(made, key=lambda pair: pair[1].nbytes)
        if isinstance(policy, CallPolicy):
            assert main.op is not None
            decision = policy.decide(main.op.traits.func, args, kwargs, out)
        else:
            decision = self._ask(main, tensor)
        if decision is Decision.KEEP:
            self._has_kept = True
            for value, result in made:
                if value.op is not None:
                    hold(value, alias(result))

    def named(self, value: Value, tensor: Tensor) -> None:
        """Decide about a value that the program has given a name."""
        if self._ask(value, tensor) is Decision.KEEP and not _is_held(value):
            self._has_kept = True
            hold(value, alias(tensor))

    def saved(self, saved: Any, value: Value, tensor: Tensor) -> None:
        """Decide about a tensor that autograd saves."""
        if value.must_recompute:
            return
        if self._room is None:
            if self._ask(value, tensor, is_saved=True) is Decision.KEEP:
                self._has_kept = True
                saved.keep(tensor)
            return
        if value not in self._counted:
            self._counted.add(value)
            self._room -= nbytes_of(tensor)
        if self._room >= 0:
            saved.keep(tensor)
            self._kept.append(ref(saved))
        else:
            self._keep_nothing()

    def _keep_nothing(self) -> None:
        """There is not enough room: drop what was kept so far."""
        self._room = None
        for reference in self._kept:
            if (saved := reference()) is not None:
                saved.drop()
        self._kept.clear()

    def _ask(self, value: Value, tensor: Tensor, *, is_saved: bool = False) -> Decision:
        policy = self.policy
        if policy is None or value.must_recompute or isinstance(policy, CallPolicy):
            return Decision.RECOMPUTE
        self._was_asked = True
        op = value.op
        reads = () if op is None else tuple(tuple(read.size) for read in op.reads)
        name = "" if op is None else str(op.traits.func)
        shapes = (tuple(tensor.shape), *reads)
        return policy(Candidate(name, shapes, nbytes_of(tensor), value.name, is_saved))


_ABOUT_SAVED = (SaveNothing, SaveEverything, SaveBelow, SaveNames)
