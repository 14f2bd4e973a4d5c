"""Maps every storage to its current value.

A storage carries the number of its value as an attribute. Storages of parameters carry none; they
are found by address, which is safe because they are held. A storage that is seen for the first time
is an external input: it is held and never recomputed. Nothing else is attached to tensors, so a
tensor that outlives the recording keeps no part of it alive.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import Tensor
from torch.nn import Parameter

from ....core.records import Op, Operand, Origin, Value, View, no_tensor
from ....errors import UnsupportedError
from ..backend import is_function_output, with_version_counters, without_dispatch_modes
from ..memory.external_memory import same_bytes
from ..memory.geometry import geometry_of
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
from ..memory.values import lies_like, note_geometry, note_views
from ..output_reuse import OutputReuse
from ..retention import hold, hold_alias, hold_old_geometry, keep, note_read, protect

__all__ = ["StorageTable", "base_of", "key_of"]


# Called with the value of memory and another tensor over it, which a custom Function has returned;
# returns the value that the tensor has now.
OnFunctionOutput = Callable[[Value, Tensor], Value]


class StorageTable:
    """Maps storages to values, since the outermost region was opened."""

    def __init__(self, reuse: OutputReuse, on_function_output: OnFunctionOutput) -> None:
        self._reuse = reuse
        self._on_function_output = on_function_output
        self._many = _MANY
        self.reset()
        # Buffers that regions wrote to, and that ops of earlier regions still refer to.
        self._rewritten: WeakValueDictionary[int, Value] | None = None

    def reset(self) -> None:
        """Clear the table: what is read next is an external input."""
        self.values: dict[int, Value] = {}  # by the keys of their storages
        self.parameters: dict[int, Value] = {}  # by id, which is safe because they are held
        self.shared: set[int] = set()  # keys of storages over shared memory
        self.dead_bytes = 0  # held although their tensors are freed; perhaps not needed
        self._much = _MUCH

    # -- from tensors to values --------------------------------------------------------------------

    def operand(self, tensor: Tensor) -> Operand:
        """Return the current value of a tensor, or a view of it."""
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
        elif value.geometry is not None and not lies_like(value, tensor):
            self._geometry_changed(value, tensor)
            made = None
        if value.origin.is_external:
            return self._external(value, tensor, made)
        if value.origin is Origin.UNINITIALIZED:
            self.keep(value, tensor)  # it may have been written to outside of the dispatcher
            return value
        return value if made is tensor else self._another(value, tensor, made)

    def encode(self, argument: Any) -> Any:
        """Return an argument of an op with tensors replaced by operands."""
        if isinstance(argument, Tensor):
            return self.operand(argument)
        if type(argument) in _LISTS and any(isinstance(part, Tensor) for part in argument):
            return [self.encode(part) for part in argument]
        return argument

    def known(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor's storage, if it is known and its version is unchanged."""
        try:
            storage = tensor.untyped_storage()
            # `key_of`, inlined: this is called for every argument of every op.
            value = self.values.get(getattr(storage, "_remat", None) or storage._cdata)
            if value is not None and (
                (value.version == tensor._version and storage.resizable())
                or value.origin.is_external
            ):
                return value  # but not if it was exported to NumPy, which may write to it
        except RuntimeError:  # no storage, no version
            pass
        return None

    def seen(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor as `known` does, and notice what Functions return."""
        value = self.known(tensor)
        if value is None or value.op is None or value.tensor() is tensor:
            return value
        return self._on_function_output(value, tensor) if is_function_output(tensor) else value

    def _another(self, value: Value, tensor: Tensor, made: Tensor | None) -> Operand:
        """Return the operand of another tensor than the original of a computed value."""
        if value.op is not None and is_function_output(tensor):
            return self._on_function_output(value, tensor)
        if made is None and value.held is not None:
            self._renew(value, tensor)
        return View(value, geometry_of(tensor))

    def _external(self, value: Value, tensor: Tensor, made: Tensor | None) -> Operand:
        if made is not tensor and (made is None or made is not base_of(tensor)):
            return self._alias(value, tensor)
        if value.version != tensor._version or _is_stale(value, tensor):
            return self.first_seen(tensor)  # it was modified outside of the recording
        return _read(value, tensor, made)

    def _alias(self, value: Value, tensor: Tensor) -> Operand:
        """Return the operand of another external tensor over the same storage.

        It may have its own version counter, so it is held as a value of its own.
        """
        base = base_of(tensor)
        for other in value.with_aliases():
            if other.tensor() is base and other.version == base._version:
                if other.is_overwritten or _is_stale(other, base):
                    continue
                if lies_like(other, base):
                    break
                self._geometry_changed(other, base)
        else:
            other = self._hold_external(base, base.untyped_storage())
            other.part_of = value.part_of
            value.add_alias(other)
        return _read(other, tensor, base)

    # -- external inputs ---------------------------------------------------------------------------

    def current(self, tensor: Tensor) -> Value:
        """Return the value of a tensor's storage, without noting a read."""
        value = self.known(tensor)
        if value is None:
            operand = self.first_seen(tensor, is_read=False)
            value = operand if type(operand) is Value else operand.value
        return value

    def first_seen(self, tensor: Tensor, *, is_read: bool = True) -> Operand:
        """Add an external input: a tensor from outside, or modified outside of the recording."""
        if not is_plain(tensor):
            return self._not_plain(tensor)
        base = base_of(tensor)
        storage = base.untyped_storage()
        value = self._hold_external(base, storage)
        if value.origin is not Origin.PARAMETER:
            note = getattr(storage, "_remat", None)
            whole = self.values.get(note) if note is not None else None
            if whole is not None:
                value.part_of = whole.part_of if whole.op is None else ref(whole)
            if note is not None and note not in self.values:
                value.lends_to = self._reuse.users_of(base, note)
            self._count_when_freed(value, base, storage)
        earlier = None if self._rewritten is None else self._rewritten.get(storage._cdata)
        if earlier is not None:
            value.aliases = tuple(ref(other) for other in earlier.with_aliases())
        self.note(storage, value)
        if not is_read:
            return value
        return _read(value, tensor, base)

    def _hold_external(self, tensor: Tensor, storage: Any) -> Value:
        value = Value(ref(tensor), version_of(tensor))
        value.origin = Origin.EXTERNAL
        if storage is not None:
            note_geometry(value, tensor)
            value.is_shared = not storage.resizable() or is_exposed(storage)
        # Views are not asked: `is_leaf` may make autograd regenerate their grad_fn.
        value.is_leaf = not tensor._is_view() and tensor.is_leaf
        if storage is not None and _is_parameter(value, tensor):
            value.origin = Origin.PARAMETER
            self.parameters[id(tensor)] = value
            if type(tensor) is not Parameter:
                # There is no notification when the program frees it.
                self.dead_bytes += storage.nbytes()
        protect(value, tensor, storage)
        return value

    def _not_plain(self, tensor: Tensor) -> Value:
        """Return the value of a sparse tensor or a wrapper: it is held and never recomputed.

        The parts of a sparse tensor have their own version counters, so they are aliases of it: a
        recorded write to a part copies the tensor first. Ops on wrappers are never replayed.
        """
        beside: list[Value] = []
        for part in parts_of(tensor) if type(tensor) in PLAIN_TYPES else ():
            self.operand(part)  # so that it is known
            beside += [value] if (value := self.known(part)) is not None else []
        for known in beside[0].with_aliases() if beside else ():
            if (
                known.tensor() is tensor
                and known.version == version_of(tensor)
                and all(known in other.with_aliases() for other in beside)
            ):
                return known
        value = self._hold_external(tensor, None)
        for other in beside:
            other.add_alias(value)
        return value

    # -- outputs of ops ----------------------------------------------------------------------------

    def made_and_held(self, tensor: Tensor) -> Value | None:
        """Add the output of an op that is not recorded: it is held."""
        value = self.made(tensor, None, 0)
        if value is not None:
            value.origin = Origin.OPAQUE
            hold(value, alias(tensor))
        return value

    def made(self, tensor: Tensor, op: Op | None, output: int) -> Value | None:
        """Add an output of an op. Return None if it is a view of a known storage."""
        values = self.values
        try:
            storage = tensor.untyped_storage()
            known = values.get(getattr(storage, "_remat", None) or storage._cdata)
            if known is not None:
                note_views(known)
                return None
            value = Value(ref(tensor), 0, op, output)
            value.size, value.dtype = tensor.shape, tensor.dtype
        except RuntimeError:  # sparse or nested: an external input when it is read
            return None
        storage._remat = value.note = note = next(_notes)  # type: ignore[attr-defined]
        values[note] = value
        return value

    def keep(self, value: Value, tensor: Tensor) -> None:
        """Hold a value that must not be recomputed."""
        keep(value, tensor)
        self._count_when_freed(value, tensor, tensor.untyped_storage())

    def note(self, storage: Any, value: Value) -> None:
        """Set the current value of a storage."""
        # `key_of`, inlined.
        self.values.pop(getattr(storage, "_remat", None) or storage._cdata, None)
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
            if self._rewritten is None:
                self._rewritten = WeakValueDictionary()
            self._rewritten[storage._cdata] = value
        if len(self.values) > self._many or self.dead_bytes > self._much:
            self._remove_dead()

    def overwritten(self, value: Value) -> None:
        """Note that the storage of a value is about to be overwritten."""
        value.is_overwritten = True
        if value.held is not None:
            self.parameters.pop(id(value.held.tensor), None)

    def forget(self, storage: Any) -> None:
        """Remove a storage from the table: it is an external input when it is read next."""
        self.values.pop(storage._cdata, None)
        if getattr(storage, "_remat", None) is not None:
            storage._remat = None  # not deleted: another thread may do the same

    # -- tensors whose .data was assigned ----------------------------------------------------------

    def _geometry_changed(self, value: Value, tensor: Tensor) -> None:
        """Note that a tensor has another geometry over the same storage: its .data was assigned.

        The value keeps the old geometry; the tensor is a view of it from now on.
        """
        value.tensor = no_tensor
        held, geometry = value.held, value.geometry
        if held is None or held.tensor is not tensor or geometry is None:
            return
        # A parameter is held as itself.
        self.parameters.pop(id(tensor), None)
        if tensor.dtype is not geometry.dtype:
            raise UnsupportedError(
                f"a leaf that requires grad, of {geometry.dtype} {list(geometry.size)}, was made "
                f"{tensor.dtype} over the same memory, by assignment to its .data, inside of a "
                "checkpointed region that needs the old tensor; assign a copy (.clone()), or "
                "before the region"
            )
        hold_old_geometry(held, geometry)

    def _renew(self, value: Value, tensor: Tensor) -> None:
        """Hold a value by the tensor that the program has.

        Outputs of factory functions reach the program as another tensor over the same storage, with
        its own version counter.
        """
        assert value.held is not None
        held = value.held.tensor
        if held.untyped_storage() is not tensor.untyped_storage():
            return  # a copy
        if tensor.dtype is held.dtype and not (tensor.is_conj() or tensor.is_neg()):
            with without_dispatch_modes(), with_version_counters():
                same = tensor.detach().as_strided(held.size(), held.stride(), held.storage_offset())
                is_same = same.is_set_to(tensor)
            hold(value, same)
            value.tensor = ref(tensor) if is_same else no_tensor

    # -- values that are no longer needed ----------------------------------------------------------

    def _count_when_freed(self, value: Value, tensor: Tensor, storage: Any) -> None:
        """Count the bytes of a held value as dead once its tensor is freed."""
        nbytes = storage.nbytes()
        if nbytes > _LITTLE:
            value.tensor = ref(tensor, partial(self._freed, nbytes))

    def _freed(self, nbytes: int, _: Any) -> None:
        self.dead_bytes += nbytes

    def _remove_dead(self) -> None:
        """Remove values that are no longer referenced, so that a long region does not hold them."""
        freed = 0
        for address, value in list(self.parameters.items()):
            held = value.held
            if held is not None and sys.getrefcount(held.tensor) == _ONLY_HELD:
                freed += nbytes_of(held.tensor)
                hold_alias(held)  # only this table refers to the leaf: release it
                del self.parameters[address]
        for key in reversed(list(self.values)):  # the latest first: they refer to earlier ones
            value = self.values[key]
            if sys.getrefcount(value) == _ONLY_HERE and _is_unreachable(value, key):
                if value.held is not None:
                    freed += nbytes_of(value.held.tensor)
                del self.values[key]
        self._many = max(_MANY, 2 * len(self.values))
        # If most of it was still needed, wait longer until the next scan.
        self._much = _MUCH if 2 * freed > self.dead_bytes else 2 * self._much
        self.dead_bytes = 0


def _read(value: Value, tensor: Tensor, base: Tensor | None) -> Operand:
    """Return the operand of a tensor over an external input, and note the read."""
    operand = value if base is tensor else View(value, geometry_of(tensor))
    if value.origin is not Origin.PARAMETER or operand is not value:
        geometry = value.geometry if operand is value else operand.geometry
        if geometry is not None:
            note_read(value, geometry)
    return operand


def _is_parameter(value: Value, tensor: Tensor) -> bool:
    """Return whether a leaf can be held as itself: it never gets a grad_fn."""
    return (
        value.is_leaf
        and tensor.requires_grad
        and type(tensor) in EXACT_TYPES
        and not tensor.dtype.is_complex  # its conjugate flag could change
        and (type(tensor) is Parameter or not value.is_shared)
        and not tensor.is_inference()
    )


def _is_stale(value: Value, tensor: Tensor) -> bool:
    """Return whether a tensor differs from the copy that is held of it."""
    return (
        value.is_snapshot and value.held is not None and not same_bytes(tensor, value.held.tensor)
    )


def base_of(tensor: Tensor) -> Tensor:
    """Return the base of a view, which has the version counter, or the tensor itself."""
    base = tensor._base
    if base is None or not is_plain(base):
        return tensor
    # Autograd also sets `_base` on tensors that were made from a Python number.
    return base if base.untyped_storage()._cdata == tensor.untyped_storage()._cdata else tensor


def key_of(storage: Any) -> int:
    """Return the number that a storage carries, or its address."""
    key: int = getattr(storage, "_remat", None) or storage._cdata
    return key


def _is_unreachable(value: Value, key: int) -> bool:
    """Return whether no storage leads to a value by this key any more."""
    made = value.tensor()
    return made is None or key_of(made.untyped_storage()) != key


# What sys.getrefcount says differs between versions of Python: from 3.14 on, an argument that is a
# local variable does not count twice. So it is asked here, in the same way as above.


def _in_a_dict_and_a_variable() -> int:
    table = {0: object()}
    thing = table[0]
    return sys.getrefcount(thing)


def _in_an_attribute() -> int:
    holder = _StorageHolder()
    return sys.getrefcount(holder.thing)


class _StorageHolder:
    __slots__ = ("thing",)

    def __init__(self) -> None:
        self.thing = object()


_ONLY_HERE = _in_a_dict_and_a_variable()
_ONLY_HELD = _in_an_attribute()
_LISTS = (list, tuple)
_MANY = 2000  # values, before dead ones are removed
_MUCH = 4 << 20  # bytes, before dead values are removed
_LITTLE = 1 << 12  # bytes below which a value is not counted
_notes = itertools.count(-1, -1)  # unique over all recordings; never an address or zero
