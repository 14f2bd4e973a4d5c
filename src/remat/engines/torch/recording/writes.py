"""In-place writes: what is overwritten is copied first, if it is needed and not recomputable."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ....core.records import Op, Origin, Value
from ....core.retention import drop
from ..memory.external_memory import overlap
from ..memory.geometry import geometry_of, may_overlap
from ..memory.tensors import (
    alias,
    copy_storage,
    flat,
    is_plain,
    parts_of,
    share_a_counter,
    version_of,
)
from ..memory.values import note_geometry, note_views
from ..retention import hold, hold_copy, save_before_write
from ..schema import Key, SchemaTraits
from .storages import StorageTable, base_of, key_of

__all__ = ["Write", "WriteTracker"]

_NOISE = 1  # the position of `noise` in rrelu_with_noise


class Write(NamedTuple):
    """A tensor that an op writes to."""

    argument: tuple[Key, int]
    tensor: Tensor
    before: Value
    followers: list[ref[Value]]  # values over the same storage that are still held


class WriteTracker:
    """Tracks the writes of ops."""

    def __init__(self, table: StorageTable) -> None:
        self._table = table

    # -- before an op runs -------------------------------------------------------------------------

    def before(self, traits: SchemaTraits, args: Any, kwargs: dict[str, Any]) -> list[Write]:
        """Copy what an op is about to overwrite."""
        targets = _targets(traits, args, kwargs)
        # An op that only writes to an external tensor is never replayed.
        alone = len(targets) == 1 and not traits.makes_memory
        return [
            Write(key, tensor, *self._before_write(traits, tensor, alone=alone))
            for key, tensor in targets
        ]

    def _before_write(
        self, traits: SchemaTraits, tensor: Tensor, *, alone: bool
    ) -> tuple[Value, list[ref[Value]]]:
        table = self._table
        if table.seen(tensor) is None and not is_plain(tensor):
            self._before_write_to_parts(traits, tensor)
        self._initialize(traits, tensor)
        if not alone:
            table.operand(tensor)  # a replay reads it
        followers = self._save(tensor)
        operand = table.operand(tensor)
        value = operand if type(operand) is Value else operand.value
        if traits.uncounted and value.held is not None and not value.held.is_copy:
            hold_copy(value)  # its version counter will not show the write
        return value, followers

    def _initialize(self, traits: SchemaTraits, tensor: Tensor) -> None:
        value = self._table.current(tensor)
        if value.origin is Origin.UNINITIALIZED:
            if traits.overwrites_all and _covers(tensor):
                value.origin = Origin.COMPUTED  # this write makes it recomputable
            else:
                self._table.operand(tensor)  # it is read, so it is held

    def _save(self, tensor: Tensor) -> list[ref[Value]]:
        """Copy what is needed of all values over a tensor's storage; return those still held."""
        table = self._table
        members = [ref(value) for value in table.current(tensor).with_aliases()]
        target = geometry_of(tensor) if is_plain(tensor) else None
        followers = []
        for reference in members:
            value = reference()
            if value is None:
                continue
            if value.geometry is None or target is None or may_overlap(value.geometry, target):
                table.overwritten(value)
            save_before_write(value, target)
            if value.held is not None and value.op is None and not value.held.is_copy:
                followers.append(reference)
        return followers

    def _before_write_to_parts(self, traits: SchemaTraits, tensor: Tensor) -> None:
        """Copy the parts of a tensor; they are external inputs when they are read next."""
        for part in parts_of(tensor):
            self._before_write(traits, part, alone=False)
            if is_plain(part):
                self._table.forget(part.untyped_storage())

    def without_hidden(self, traits: SchemaTraits, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments without those that the op writes but does not read.

        What was read from them before is copied; they are external inputs when they are read next.
        """
        positions = traits.hidden_targets(args)
        for position in positions:
            tensor = args[position]
            if isinstance(tensor, Tensor) and self._table.known(tensor) is not None:
                self._before_write(traits, tensor, alone=False)
                self._table.forget(tensor.untyped_storage())
        return tuple(
            _replacement(arg, args[0]) if position in positions else arg
            for position, arg in enumerate(args)
        )

    def before_direct_write(self, tensor: Tensor) -> None:
        """Copy what a write outside of the dispatcher overwrites; it is an external input then."""
        if is_plain(tensor):
            self._table.seen(tensor)
            self._save(tensor)
            self._table.forget(tensor.untyped_storage())

    # -- other storages over the same memory -------------------------------------------------------

    def save_overlapping(self, traits: SchemaTraits, args: Any, kwargs: dict[str, Any]) -> set[int]:
        """Before a write, copy values of other storages over the same memory; return their keys.

        DLPack and NumPy make such storages. Their version counters are separate.
        """
        tensors = [tensor for _, tensor in _targets(traits, args, kwargs)]
        tensors += [args[position] for position in traits.hidden_targets(args)]
        table = self._table
        found: set[int] = set()
        for tensor in tensors:
            if isinstance(tensor, Tensor) and is_plain(tensor):
                storage = tensor.untyped_storage()
                if table.shared or not storage.resizable():
                    table.encode([*args, *kwargs.values()])  # adds all of them to the table
                    found |= self._overlapping(storage)
        for key in found:
            for value in table.values[key].with_aliases():
                self._save_overlapped(value, tensors)
        return found

    def _overlapping(self, storage: Any) -> set[int]:
        """Return the keys of other storages that overlap, or whose address is unknown."""
        values, own = self._table.values, key_of(storage)
        keys = self._table.shared & values.keys() if storage.resizable() else values.keys()
        return {key for key in keys if key != own and _may_be_over(values[key], storage)}

    def _save_overlapped(self, value: Value, written: list[Any]) -> None:
        for holder in value.living_holders():
            holder.drop()
        held = value.held
        if held is None or not is_plain(held.tensor):
            return
        self._table.parameters.pop(id(held.tensor), None)
        if any(overlap(held.tensor.untyped_storage(), t.untyped_storage()) for t in written):
            if value.op is not None:
                drop(value)
            elif not held.is_copy:
                hold_copy(value)

    # -- after an op has run -----------------------------------------------------------------------

    def after(self, op: Op, write: Write, *, keep: bool) -> Value:
        """Add the value that an op has written. `keep` holds it, if the op must not be replayed."""
        table, traits = self._table, op.traits
        tensor, before = write.tensor, write.before
        if traits.replaces_storage and is_plain(tensor):
            known = table.values.get(key_of(tensor.untyped_storage()))
            if known is not None:
                note_views(known)
                return known  # its data is unchanged, and it has its own version counter
        version = _version_after(traits, write)
        # What a custom Function fills, without grad mode, it may hand to a kernel next.
        is_scratch = traits.overwrites_all and not torch.is_grad_enabled()
        if before.origin.is_external or keep or is_scratch:
            after = _kept_after(write, version)
        else:
            after = Value(ref(tensor), version)
            after.op, after.argument, after.tensor = op, write.argument, before.tensor
            if before.geometry is not None:
                after.geometry = before.geometry
                after.size, after.dtype = before.size, before.dtype
        after.is_leaf, after.is_shared = before.is_leaf, before.is_shared
        after.part_of = before.part_of
        if is_plain(tensor):
            if traits.uncounted:
                table.forget(tensor.untyped_storage())
            else:
                table.note(tensor.untyped_storage(), after)
        return after

    def after_unrecorded(self, traits: SchemaTraits, write: Write) -> None:
        """Note a write by an op that is not recorded."""
        _follow(write, _version_after(traits, write))
        if is_plain(write.tensor):
            self._table.forget(write.tensor.untyped_storage())


def _version_after(traits: SchemaTraits, write: Write) -> int:
    """Return the version that a tensor will have when autograd has counted the write.

    It does so after the op has been dispatched, but not for a tensor that it saved before.
    """
    is_noise = traits.saves_before_write and write.argument[0] == _NOISE
    return version_of(write.tensor) + (not traits.counts_writes and not is_noise)


def _kept_after(write: Write, version: int) -> Value:
    """Return the held value after a write. Values that share its counter follow."""
    tensor, before = write.tensor, write.before
    base = base_of(tensor) if before.origin.is_external else tensor
    after = Value(ref(base), version)
    after.origin = Origin.EXTERNAL if before.origin.is_external else Origin.OPAQUE
    after.is_rewritten = before.is_leaf
    if is_plain(base):
        note_geometry(after, base)
    hold(after, alias(base))
    assert after.held is not None
    after.held.version = version
    after.aliases = tuple(_follow(write, version))
    return after


def _follow(write: Write, version: int) -> list[ref[Value]]:
    """Update the versions of values held over the same storage; return those alive."""
    alive = []
    for reference in write.followers:
        value = reference()
        if value is not None and value.held is not None:
            alive.append(reference)
            if share_a_counter(write.tensor, value.held.tensor):
                value.held.version = version
    return alive


def _targets(
    traits: SchemaTraits, args: Any, kwargs: dict[str, Any]
) -> list[tuple[tuple[Key, int], Tensor]]:
    """Return the tensors that an op writes to, with their arguments."""
    named = [(k, kwargs.get(k) if isinstance(k, str) else args[k : k + 1]) for k in traits.writes]
    return [
        ((key, number), tensor)
        for key, target in named
        for number, tensor in enumerate(flat(target))
        if isinstance(tensor, Tensor)
    ]


def _may_be_over(value: Value, storage: Any) -> bool:
    """Return whether a value overlaps a storage, or its address is unknown."""
    made, held = value.tensor(), value.held
    if made is None and held is not None and not held.is_copy:
        made = held.tensor
    if made is None or value.is_snapshot:
        return True
    return not is_plain(made) or overlap(made.untyped_storage(), storage)


def _replacement(statistics: Any, values: Tensor) -> Value | None:
    """Return the replacement of statistics in a replay: None, or a copy if dtypes are mixed."""
    if not isinstance(statistics, Tensor) or statistics.dtype is values.dtype:
        return None
    value = Value(ref(statistics), 0)
    value.origin = Origin.EXTERNAL
    value.is_leaf = True
    hold(value, copy_storage(statistics))
    return value


def _covers(tensor: Tensor) -> bool:
    """Return whether a tensor covers all bytes of its storage, each once."""
    if tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    distance = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != distance:
            return False  # elements overlap or leave gaps
        distance *= size
    return True
