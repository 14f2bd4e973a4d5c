"""The books of a recorder: which state of which memory a tensor is.

A storage carries a note of which state its bytes are in, by number; storages of parameters, which
are held, carry none and are known by their addresses. What is met for the first time comes from
outside of the region: it is held, and never computed.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from ...errors import UnsupportedError
from .kinds import is_ordinary, plain_types
from .leavings import Leavings
from .records import (
    Op,
    Piece,
    State,
    View,
    alias,
    counting_writes,
    fresh_copy,
    parts_of,
    version_of,
)
from .regions import Region
from .replay import flat
from .sharing import SMALL, checksum, same_bytes
from .watch import nbytes_of

__all__ = ["NO_SUBCLASSES", "Books", "key_of", "nothing", "somebody", "whole_of"]


class Books:
    """Knows the states of all memory that was met, or made, since the first region was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Region] = []
        self.region: Region  # the innermost of them
        self._left = Leavings()
        self._many = _MANY
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._states: dict[int, State] = {}  # by the keys of their storages
        self._outside: dict[int, State] = {}  # by id, for leaves, which are held, so ids stay
        self._shared: set[int] = set()  # keys of storages that lie over memory of others
        self._dead = 0  # bytes that are held although their tensors are gone, perhaps for nobody
        self._much = _MUCH

    def _balance(self) -> int:
        """Return how many bytes gradients of leaves will take, less those of other inputs."""
        leaves = sum(
            state.held.nbytes for state in self._outside.values() if state.held is not None
        )
        return leaves - sum(
            nbytes_of(state.held)
            for state in self._states.values()
            if state.outside and not state.leaf and state.held is not None
        )

    def _encode(self, value: Any) -> Any:
        """Return an argument with pieces in place of tensors."""
        if isinstance(value, Tensor):
            piece = self.piece(value)
            (piece if type(piece) is State else piece.state).read = True
            return piece
        if type(value) in _LISTS and any(isinstance(part, Tensor) for part in value):
            return [self._encode(part) for part in value]
        return value

    def piece(self, tensor: Tensor) -> Piece:
        """Return which piece of which state a tensor is now."""
        state = self._outside.get(id(tensor))
        if (
            state is not None
            and state.version == tensor._version
            and tensor.stride() == state.stride
            and tensor.shape == state.size
            and tensor.dtype is state.dtype
        ):
            return state
        return self._piece(tensor)

    def _piece(self, tensor: Tensor) -> Piece:
        """Return the same of one that is not known to be a leaf from outside."""
        state = self._known(tensor)
        if state is None:
            return self._meet(tensor)
        made = state.tensor()
        if made is not tensor:
            if type(tensor) not in plain_types and not is_ordinary(tensor):
                return self._odd(tensor)
        elif state.viewed and not state.lies_like(tensor):
            self._was_put_elsewhere(state, tensor)
            made = None
        if state.outside:
            if made is not tensor and (made is None or made is not tensor._base):
                return self._sibling(state, tensor)
            if state.version != tensor._version or (state.copied and _is_stale(state, tensor)):
                return self._meet(tensor)  # somebody wrote to it unseen
            if state.fragile and state.held is not None:
                state.fragile = False
                state.hold_a_copy()
            if state.sums is not None:
                _sum_up(state, tensor)
        elif state.blank:
            self._keep_blank(state, tensor)
            return state
        elif made is None and state.held is not None:
            self._renew(state, tensor)
        return state if made is tensor else View(state, tensor)

    def _known(self, tensor: Tensor) -> State | None:
        """Return the state a tensor is in, if it was noted and not written to unseen."""
        try:
            storage = tensor.untyped_storage()
            # (`key_of`, at once: this is called for every argument of every op)
            state = self._states.get(getattr(storage, "_remat", None) or storage._cdata)
            if state is not None and (
                (state.version == tensor._version and storage.resizable()) or state.outside
            ):
                return state  # what has become a NumPy array is not: somebody may write to it
        except RuntimeError:  # no storage, no version
            pass
        return None

    def _was_put_elsewhere(self, state: State, tensor: Tensor) -> None:
        """Note that a tensor lies over the same bytes in another way: its .data was assigned.

        What it was is known by the bytes; what it is now, is another tensor over them.
        """
        state.tensor = nothing
        if state.held is tensor:  # a leaf, which is held by itself
            self._outside.pop(id(tensor), None)
            if tensor.dtype is not state.dtype:
                raise UnsupportedError(
                    f"a leaf that requires grad, of {state.dtype} {list(state.size)}, was made "
                    f"{tensor.dtype} over the same memory, by assignment to its .data, inside of a "
                    "checkpointed region that needs what it was; assign a copy (.clone()), or "
                    "before the region"
                )
            with torch._C._DisableTorchDispatch(), counting_writes():
                state.held = tensor.detach().as_strided(state.size, state.stride, state.offset)

    def _sibling(self, state: State, tensor: Tensor) -> Piece:
        """Return what another tensor from outside over the same bytes is.

        It may count its writes by itself, so it is held for itself, too.
        """
        whole = whole_of(tensor)
        for sibling in state.family():
            if sibling.tensor() is whole and sibling.version == whole._version:
                if sibling.copied and _is_stale(sibling, whole):
                    continue
                if sibling.lies_like(whole):
                    break
                self._was_put_elsewhere(sibling, whole)
        else:
            sibling = self._held_from_outside(whole, whole.untyped_storage())
            state.add(sibling)
        if sibling.sums is not None:
            _sum_up(sibling, tensor)
        return sibling if whole is tensor else View(sibling, tensor)

    def _meet(self, tensor: Tensor) -> Piece:
        """Note a tensor whose bytes come from outside, or were written unseen: it is held."""
        if not is_ordinary(tensor):
            return self._odd(tensor)
        whole = whole_of(tensor)
        storage = whole.untyped_storage()
        state = self._held_from_outside(whole, storage)
        if state.held is not whole:
            note = getattr(storage, "_remat", None)
            if note is not None and note not in self._states:
                state.heirs = self._left.heirs(whole, note)
            self._expect_the_end(state, whole, storage)
        self._note(storage, state)
        if state.sums is not None:
            _sum_up(state, tensor)
        return state if whole is tensor else View(state, tensor)

    def _odd(self, tensor: Tensor) -> State:
        """Return what a tensor is that is no plain memory: it is held, never computed.

        What a sparse one consists of counts its writes by itself, so it is held beside that: a
        write that we see there copies it before. Ops on wrappers are never run again.
        """
        beside: list[State] = []
        for part in parts_of(tensor) if type(tensor) in plain_types else ():
            self.piece(part)  # so that it is known
            beside += [state] if (state := self._known(part)) is not None else []
        for known in beside[0].family() if beside else ():
            if (
                known.tensor() is tensor
                and known.version == version_of(tensor)
                and all(known in other.family() for other in beside)
            ):
                return known
        state = self._held_from_outside(tensor, None)
        for other in beside:
            other.add(state)
        return state

    def _held_from_outside(self, tensor: Tensor, storage: Any) -> State:
        state = State(tensor, version := version_of(tensor))
        state.outside = True
        if storage is not None:
            state.viewed = True  # perhaps
            state.note_geometry(tensor)
            if not storage.resizable():
                state.shared = True
        # A view is not asked: autograd would renew its history, if its base was written to.
        if not tensor._is_view() and tensor.is_leaf:
            state.leaf = True
        is_parameter = type(tensor) is Parameter
        if (
            state.leaf
            and tensor.requires_grad
            and type(tensor) in NO_SUBCLASSES
            and not tensor.dtype.is_complex  # it could become its conjugate
            and (is_parameter or not state.shared)
        ):
            state.held = tensor
            state.held_version = version
            state.held_storage = storage
            self._outside[id(tensor)] = state
            if not is_parameter and storage is not None:
                self._dead += storage.nbytes()  # it may be: nobody tells when only we have got it
        elif tensor.is_inference():
            state.hold(fresh_copy(tensor))  # it does not count its writes, so we could not see one
        else:
            # Not the tensor itself: a write may give it a history that leads back to us. Leaves
            # that require grad, the parameters, never get one.
            state.hold(alias(tensor))
            if storage is not None and not is_parameter:
                self._mind_unseen_writes(state, tensor, storage)
        return state

    def _mind_unseen_writes(self, state: State, tensor: Tensor, storage: Any) -> None:
        """Hold a copy of what is small, and sum up what is large, if somebody may write unseen.

        That is memory of NumPy and the like, and all that may be statistics of a batch norm or the
        scale of an observer of quantisation: autograd does not count what these write.
        """
        if storage.nbytes() <= SMALL and not tensor.requires_grad:
            if state.shared or tensor.dim() <= 1:
                state.hold_a_copy()
                state.copied = True
        elif state.shared and tensor.device.type == "cpu":
            state.sums = {}

    def _expect_the_end(self, state: State, tensor: Tensor, storage: Any) -> None:
        """Count the bytes of a state that is held, once its tensor is gone."""
        nbytes = storage.nbytes()
        if nbytes > _LITTLE:
            state.tensor = ref(tensor, partial(self._ended, nbytes))

    def _ended(self, nbytes: int, _: Any) -> None:
        self._dead += nbytes

    def _note(self, storage: Any, state: State) -> None:
        """Note that the bytes of a storage are in this state from now on."""
        if state.held_storage is None:
            self._states.pop(storage._cdata, None)
            key = storage._remat = state.note = next(_notes)
        else:
            key = storage._cdata
            if getattr(storage, "_remat", None) is not None:
                storage._remat = None
        self._states[key] = state
        if state.shared:
            self._shared.add(key)
        if len(self._states) > self._many or self._dead > self._much:
            self._forget_the_dead()

    def _forget(self, storage: Any) -> None:
        """Forget which state a storage is in: whoever reads it meets it anew."""
        self._states.pop(storage._cdata, None)
        if getattr(storage, "_remat", None) is not None:
            storage._remat = None  # not deleted: another thread may do the same at this time

    def _renew(self, state: State, tensor: Tensor) -> None:
        """Hold a state by the tensor that the program has got of it.

        What factory functions make reaches the program as another tensor over the same memory,
        which counts its writes by itself.
        """
        held = state.held
        assert held is not None
        if held.untyped_storage() is not tensor.untyped_storage():
            return  # a copy, which nobody writes to
        if tensor.dtype is held.dtype and not (tensor.is_conj() or tensor.is_neg()):
            with torch._C._DisableTorchDispatch(), counting_writes():
                same = tensor.detach().as_strided(held.size(), held.stride(), held.storage_offset())
            state.hold(same)
            state.tensor = ref(tensor) if same.is_set_to(tensor) else somebody

    def _forget_the_dead(self) -> None:
        """Forget states that nobody refers to any more: a long region is not to hold them."""
        freed = 0
        for address, state in list(self._outside.items()):
            held = state.held
            if held is not None and sys.getrefcount(held) == _ONLY_HERE:
                freed += nbytes_of(held)
                state.held = alias(held)  # only we have got this leaf: let it go
                del self._outside[address]
        held = None
        for key in reversed(list(self._states)):  # the last ones first: they refer to others
            state = self._states[key]
            if sys.getrefcount(state) == _ONLY_HERE and _is_over(state, key):
                if state.held is not None:
                    freed += nbytes_of(state.held)
                del self._states[key]
        for region in self.opened:
            region.forget_the_dead()
        self._many = max(_MANY, 2 * len(self._states))
        # If most of what seemed dead is still needed, it is not worth a look so soon again.
        self._much = _MUCH if 2 * freed > self._dead else 2 * self._much
        self._dead = 0

    def _keep_blank(self, state: State, tensor: Tensor) -> None:
        """Hold memory that is read before we saw anything written to it: somebody else wrote."""
        state.blank = False
        self._keep(state, tensor)

    def _keep(self, state: State, tensor: Tensor) -> None:
        """Hold a state that was not read yet, by a tensor over it; it is not computed again."""
        state.op = None
        state.tensor = ref(tensor)
        state.note_geometry(tensor)
        state.viewed = True
        state.hold(alias(tensor))
        self._expect_the_end(state, tensor, tensor.untyped_storage())

    def _made(self, tensor: Tensor, op: Op, output: int) -> State | None:
        """Note an output. Over a storage that we know it is a view, and there is nothing to do."""
        states = self._states
        try:
            storage = tensor.untyped_storage()
            known = states.get(getattr(storage, "_remat", None) or storage._cdata)
            if known is not None:
                known.has_views()
                return None
            state = State(tensor, 0, op, output)
        except RuntimeError:  # a sparse or nested one: whoever reads it will meet it
            return None
        storage._remat = state.note = note = next(_notes)  # type: ignore[attr-defined]
        states[note] = state
        return state

    def _made_several(self, out: Any, op: Op, *, keep: bool) -> list[tuple[State, Tensor]]:
        made = []
        for number, tensor in enumerate(flat(out)):
            if isinstance(tensor, Tensor) and is_ordinary(tensor):
                state = self._made(tensor, op, number)
                if state is not None:
                    made.append((state, tensor))
                    state.blank = op.kind.blank
                    if keep:
                        self._keep(state, tensor)
        if len(made) > 1 and not keep:
            self._keep_by_products(made)
            self.region.is_partly_light |= op.kind.light
        return made

    def _keep_by_products(self, made: list[tuple[State, Tensor]]) -> None:
        """Hold what is tiny beside the rest, as the statistics of a norm: else all is run again."""
        much = max(tensor.nbytes for _, tensor in made) // _TIMES
        for state, tensor in made:
            if tensor.nbytes <= min(much, _LITTLE):
                state.hold(alias(tensor))


def _references() -> int:
    """Return what getrefcount says of a thing that is in one table and has one name."""
    table = {0: object()}
    thing = table[0]
    return sys.getrefcount(thing)


_ONLY_HERE = _references()
NO_SUBCLASSES = {Tensor, Parameter}
_LISTS = (list, tuple)
_MANY = 2000  # states, before it is worth a look which of them are dead
_MUCH = 4 << 20  # bytes, likewise
_LITTLE = 1 << 12  # bytes that are not worth to be counted
_TIMES = 1000  # as large as its by-products is what an op is run for
_notes = itertools.count(-1, -1)  # numbers that no two recordings share, and no addresses or zero


def _is_stale(state: State, tensor: Tensor) -> bool:
    """Return whether a tensor is no longer what the copy says that is held of it."""
    return state.held is not None and not same_bytes(tensor, state.held)


def _sum_up(state: State, tensor: Tensor) -> None:
    """Note what a tensor is now, whose memory others may write to unseen."""
    geometry = View(state, tensor).geometry
    assert state.sums is not None
    if geometry not in state.sums:
        state.sums[geometry] = checksum(tensor.untyped_storage(), geometry)


def whole_of(tensor: Tensor) -> Tensor:
    """Return what a tensor is a view of, which counts writes for all its views, or itself."""
    base = tensor._base
    return tensor if base is None or not is_ordinary(base) else base


def key_of(storage: Any) -> int:
    """Return the note on a storage, or else where it is: that serves for one that is held."""
    key: int = getattr(storage, "_remat", None) or storage._cdata
    return key


def _is_over(state: State, key: int) -> bool:
    """Return whether nobody will come across a state again by its key."""
    made: Any = state.tensor()
    if made is None:
        return True
    return made is not somebody and key_of(made.untyped_storage()) != key


def somebody() -> Any:
    """Stand for a tensor that is no one's."""
    return somebody


def nothing() -> None:
    return None
