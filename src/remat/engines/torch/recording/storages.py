"""Maps every storage to its current value.

A storage carries the number of its value; storages of parameters, which are held, carry none and
are known by their addresses. A storage that is seen for the first time is an external input: it is
held, and never recomputed. Nothing else is attached to tensors, so one that outlives the recording
keeps nothing of it alive.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import Tensor
from torch.nn import Parameter

from ....errors import UnsupportedError
from ..backend import with_version_counters, without_dispatch_modes
from ..memory.external_memory import same_bytes
from ..memory.records import Op, Operand, Origin, Value, View
from ..memory.tensors import (
    EXACT_TYPES,
    PLAIN_TYPES,
    alias,
    is_plain,
    nbytes_of,
    parts_of,
    version_of,
)
from ..memory.uncounted_writes import is_exposed
from ..output_reuse import OutputReuse
from ..retention import hold, keep, note_read, protect

__all__ = ["StorageTable", "base_of", "key_of"]


class StorageTable:
    """Knows the values of all memory that was seen, or made, since the first region was opened."""

    def __init__(self, reuse: OutputReuse) -> None:
        self._reuse = reuse
        self._many = _MANY
        self.reset()
        # Buffers that regions wrote to, and that recipes of earlier regions still refer to.
        self._rewritten = WeakValueDictionary[int, Value]()

    def reset(self) -> None:
        """Forget all: whatever is read next is an external input."""
        self.values: dict[int, Value] = {}  # by the keys of their storages
        self.parameters: dict[int, Value] = {}  # by id: they are held, so ids stay
        self.shared: set[int] = set()  # keys of storages that lie over memory of others
        self.dead_bytes = 0  # that are held although their tensors are gone, perhaps for nobody
        self._much = _MUCH

    # -- from tensors to values --------------------------------------------------------------------

    def operand(self, tensor: Tensor) -> Operand:
        """Return which value a tensor is now, or which view of it."""
        value = self.parameters.get(id(tensor))
        if value is not None and value.version == tensor._version:
            geometry = value.geometry
            if (
                geometry is not None
                and tensor.stride() == geometry.stride
                and tensor.shape == geometry.size
                and tensor.dtype is geometry.dtype
            ):
                return value
        value = self.known(tensor)
        if value is None:
            return self.first_seen(tensor)
        made = value.tensor()
        if made is not tensor:
            if type(tensor) not in PLAIN_TYPES and not is_plain(tensor):
                return self._not_plain(tensor)
        elif value.geometry is not None and not value.lies_like(tensor):
            self._was_put_elsewhere(value, tensor)
            made = None
        if value.is_external:
            return self._external(value, tensor, made)
        if value.origin is Origin.UNINITIALIZED:
            self.keep(value, tensor)  # somebody else has written to it
            return value
        if made is None and value.held is not None:
            self._renew(value, tensor)
        return value if made is tensor else View(value, tensor)

    def encode(self, argument: Any) -> Any:
        """Return an argument of an op with operands in place of tensors."""
        if isinstance(argument, Tensor):
            return self.operand(argument)
        if type(argument) in _LISTS and any(isinstance(part, Tensor) for part in argument):
            return [self.encode(part) for part in argument]
        return argument

    def known(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor's storage, if it is known and was not written to unseen."""
        try:
            storage = tensor.untyped_storage()
            # (`key_of`, at once: this is called for every argument of every op)
            value = self.values.get(getattr(storage, "_remat", None) or storage._cdata)
            if value is not None and (
                (value.version == tensor._version and storage.resizable()) or value.is_external
            ):
                return value  # what has become a NumPy array is not: somebody may write to it
        except RuntimeError:  # no storage, no version
            pass
        return None

    def _external(self, value: Value, tensor: Tensor, made: Tensor | None) -> Operand:
        if made is not tensor and (made is None or made is not base_of(tensor)):
            return self._alias(value, tensor)
        if value.version != tensor._version or _is_stale(value, tensor):
            return self.first_seen(tensor)  # somebody wrote to it unseen
        return _read(value, tensor, made)

    def _alias(self, value: Value, tensor: Tensor) -> Operand:
        """Return what another tensor from outside over the same bytes is.

        It may count its writes by itself, so it is held for itself, too.
        """
        base = base_of(tensor)
        for other in value.family():
            if other.tensor() is base and other.version == base._version:
                if other.is_overwritten or _is_stale(other, base):
                    continue
                if other.lies_like(base):
                    break
                self._was_put_elsewhere(other, base)
        else:
            other = self._hold_external(base, base.untyped_storage())
            value.add_alias(other)
        return _read(other, tensor, base)

    # -- what is seen for the first time -----------------------------------------------------------

    def current(self, tensor: Tensor) -> Value:
        """Return the value of a tensor's storage, without noting that it is read."""
        value = self.known(tensor)
        if value is None:
            operand = self.first_seen(tensor, is_read=False)
            value = operand if type(operand) is Value else operand.value
        return value

    def first_seen(self, tensor: Tensor, *, is_read: bool = True) -> Operand:
        """Hold a tensor whose bytes come from outside, or were written unseen."""
        if not is_plain(tensor):
            return self._not_plain(tensor)
        base = base_of(tensor)
        storage = base.untyped_storage()
        value = self._hold_external(base, storage)
        if value.origin is not Origin.PARAMETER:
            note = getattr(storage, "_remat", None)
            if note is not None and note not in self.values:
                value.lends_to = self._reuse.users_of(base, note)
            self._expect_the_end(value, base, storage)
        earlier = self._rewritten.get(storage._cdata)
        if earlier is not None:
            value.aliases = tuple(ref(other) for other in earlier.family())
        self.note(storage, value)
        if not is_read:
            return value
        return _read(value, tensor, base)

    def _hold_external(self, tensor: Tensor, storage: Any) -> Value:
        value = Value(tensor, version_of(tensor))
        value.origin = Origin.EXTERNAL
        if storage is not None:
            value.note_geometry(tensor)
            value.is_shared = not storage.resizable() or is_exposed(storage)
        # A view is not asked: autograd would renew its history, if its base was written to.
        value.is_leaf = not tensor._is_view() and tensor.is_leaf
        if storage is not None and _is_parameter(value, tensor):
            value.origin = Origin.PARAMETER
            self.parameters[id(tensor)] = value
            if type(tensor) is not Parameter:
                # It may be gone any time: nobody tells when only we have got it.
                self.dead_bytes += storage.nbytes()
        protect(value, tensor, storage)
        return value

    def _not_plain(self, tensor: Tensor) -> Value:
        """Return what a tensor is that is no plain memory: it is held, never computed.

        What a sparse one consists of counts its writes by itself, so it is held beside that: a
        write that we see there copies it before. Ops on wrappers are never run again.
        """
        beside: list[Value] = []
        for part in parts_of(tensor) if type(tensor) in PLAIN_TYPES else ():
            self.operand(part)  # so that it is known
            beside += [value] if (value := self.known(part)) is not None else []
        for known in beside[0].family() if beside else ():
            if (
                known.tensor() is tensor
                and known.version == version_of(tensor)
                and all(known in other.family() for other in beside)
            ):
                return known
        value = self._hold_external(tensor, None)
        for other in beside:
            other.add_alias(value)
        return value

    # -- what ops make -----------------------------------------------------------------------------

    def made(self, tensor: Tensor, op: Op, output: int) -> Value | None:
        """Note an output. Over a storage that is known it is a view, and there is nothing to do."""
        values = self.values
        try:
            storage = tensor.untyped_storage()
            known = values.get(getattr(storage, "_remat", None) or storage._cdata)
            if known is not None:
                known.note_views()
                return None
            value = Value(tensor, 0, op, output)
        except RuntimeError:  # a sparse or nested one: whoever reads it sees it for the first time
            return None
        storage._remat = value.note = note = next(_notes)  # type: ignore[attr-defined]
        values[note] = value
        return value

    def keep(self, value: Value, tensor: Tensor) -> None:
        """Hold a value that is not to be computed again."""
        keep(value, tensor)
        self._expect_the_end(value, tensor, tensor.untyped_storage())

    def note(self, storage: Any, value: Value) -> None:
        """Note that the bytes of a storage are this value from now on."""
        self.values.pop(key_of(storage), None)
        if value.origin is Origin.PARAMETER:
            key = storage._cdata
            if getattr(storage, "_remat", None) is not None:
                storage._remat = None
        else:
            self.values.pop(storage._cdata, None)
            key = storage._remat = value.note = next(_notes)
        self.values[key] = value
        if value.is_shared:
            self.shared.add(key)
        if value.is_rewritten:
            self._rewritten[storage._cdata] = value
        if len(self.values) > self._many or self.dead_bytes > self._much:
            self._forget_dead()

    def overwritten(self, value: Value) -> None:
        """Note that the bytes of a value are about to change: no tensor is it from then on."""
        value.is_overwritten = True
        if value.held is not None:
            self.parameters.pop(id(value.held.tensor), None)

    def forget(self, storage: Any) -> None:
        """Forget which value a storage is in: whoever reads it sees it for the first time."""
        self.values.pop(storage._cdata, None)
        if getattr(storage, "_remat", None) is not None:
            storage._remat = None  # not deleted: another thread may do the same at this time

    # -- tensors that are put over other memory ----------------------------------------------------

    def _was_put_elsewhere(self, value: Value, tensor: Tensor) -> None:
        """Note that a tensor lies over the same bytes in another way: its .data was assigned.

        What it was is known by the bytes; what it is now, is another tensor over them.
        """
        value.tensor = gone
        held, geometry = value.held, value.geometry
        if held is None or held.tensor is not tensor or geometry is None:
            return
        # A parameter, which is held by itself.
        self.parameters.pop(id(tensor), None)
        if tensor.dtype is not geometry.dtype:
            raise UnsupportedError(
                f"a leaf that requires grad, of {geometry.dtype} {list(geometry.size)}, was made "
                f"{tensor.dtype} over the same memory, by assignment to its .data, inside of a "
                "checkpointed region that needs what it was; assign a copy (.clone()), or "
                "before the region"
            )
        with without_dispatch_modes(), with_version_counters():
            held.tensor = tensor.detach().as_strided(
                geometry.size, geometry.stride, geometry.offset
            )

    def _renew(self, value: Value, tensor: Tensor) -> None:
        """Hold a value by the tensor that the program has got of it.

        What factory functions make reaches the program as another tensor over the same memory,
        which counts its writes by itself.
        """
        assert value.held is not None
        held = value.held.tensor
        if held.untyped_storage() is not tensor.untyped_storage():
            return  # a copy, which nobody writes to
        if tensor.dtype is held.dtype and not (tensor.is_conj() or tensor.is_neg()):
            with without_dispatch_modes(), with_version_counters():
                same = tensor.detach().as_strided(held.size(), held.stride(), held.storage_offset())
                is_same = same.is_set_to(tensor)
            hold(value, same)
            value.tensor = ref(tensor) if is_same else gone

    # -- what nobody needs any more ----------------------------------------------------------------

    def is_needed(self, value: Value, references: int) -> bool:
        """Return whether somebody refers to a value beside this table and its caller.

        `references` is what sys.getrefcount says of it in the caller.
        """
        own = sum(1 for known in (self._entry(value), self._parameter(value)) if known is value)
        return references > _LOCALS + own

    def _entry(self, value: Value) -> Value | None:
        if value.origin is Origin.PARAMETER and value.held is not None:
            return self.values.get(value.held.storage._cdata)
        return self.values.get(value.note)

    def _parameter(self, value: Value) -> Value | None:
        return None if value.held is None else self.parameters.get(id(value.held.tensor))

    def _expect_the_end(self, value: Value, tensor: Tensor, storage: Any) -> None:
        """Count the bytes of a value that is held, once its tensor is gone."""
        nbytes = storage.nbytes()
        if nbytes > _LITTLE:
            value.tensor = ref(tensor, partial(self._ended, nbytes))

    def _ended(self, nbytes: int, _: Any) -> None:
        self.dead_bytes += nbytes

    def _forget_dead(self) -> None:
        """Forget values that nobody refers to any more: a long region is not to hold them."""
        freed = 0
        for address, value in list(self.parameters.items()):
            held = value.held
            if held is not None and sys.getrefcount(held.tensor) == _ONLY_HELD:
                freed += nbytes_of(held.tensor)
                held.tensor = alias(held.tensor)  # only we have got this leaf: let it go
                del self.parameters[address]
        for key in reversed(list(self.values)):  # the last ones first: they refer to others
            value = self.values[key]
            if sys.getrefcount(value) == _ONLY_HERE and _is_over(value, key):
                if value.held is not None:
                    freed += nbytes_of(value.held.tensor)
                del self.values[key]
        self._many = max(_MANY, 2 * len(self.values))
        # If most of what seemed dead is still needed, it is not worth a look so soon again.
        self._much = _MUCH if 2 * freed > self.dead_bytes else 2 * self._much
        self.dead_bytes = 0


def _read(value: Value, tensor: Tensor, base: Tensor | None) -> Operand:
    """Return the operand for a tensor over an external value, and note that it is read."""
    operand = value if base is tensor else View(value, tensor)
    if value.origin is not Origin.PARAMETER or operand is not value:
        geometry = value.geometry if operand is value else operand.geometry
        if geometry is not None:
            note_read(value, geometry)
    return operand


def _is_parameter(value: Value, tensor: Tensor) -> bool:
    """Return whether a leaf is to be held as itself: it never gets a history."""
    return (
        value.is_leaf
        and tensor.requires_grad
        and type(tensor) in EXACT_TYPES
        and not tensor.dtype.is_complex  # it could become its conjugate
        and (type(tensor) is Parameter or not value.is_shared)
        and not tensor.is_inference()
    )


def _is_stale(value: Value, tensor: Tensor) -> bool:
    """Return whether a tensor is no longer what the copy says that is held of it."""
    return (
        value.is_snapshot and value.held is not None and not same_bytes(tensor, value.held.tensor)
    )


def base_of(tensor: Tensor) -> Tensor:
    """Return what a tensor is a view of, which counts writes for all its views, or itself."""
    base = tensor._base
    if base is None or not is_plain(base):
        return tensor
    # (Autograd also says so of what we make of a number, which is no tensor to us.)
    return base if base.untyped_storage()._cdata == tensor.untyped_storage()._cdata else tensor


def key_of(storage: Any) -> int:
    """Return the number of a storage's value, or else its address: that serves for one held."""
    key: int = getattr(storage, "_remat", None) or storage._cdata
    return key


def _is_over(value: Value, key: int) -> bool:
    """Return whether nobody will come across a value again by its key."""
    made = value.tensor()
    return made is None or key_of(made.untyped_storage()) != key


def gone() -> None:
    """Stand for a weak reference to a tensor that is not there, or is of no use."""


def _references() -> int:
    """Return what getrefcount says of a thing that is in one table and has one name."""
    table = {0: object()}
    thing = table[0]
    return sys.getrefcount(thing)


_ONLY_HERE = _references()
_ONLY_HELD = _ONLY_HERE - 1  # by an attribute, and without a name
_LOCALS = _ONLY_HERE - 1  # without the table
_LISTS = (list, tuple)
_MANY = 2000  # values, before it is worth a look which of them are dead
_MUCH = 4 << 20  # bytes, likewise
_LITTLE = 1 << 12  # bytes that are not worth to be counted
_notes = itertools.count(-1, -1)  # numbers that no two recordings share, and no addresses or zero
