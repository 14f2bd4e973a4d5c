"""The recorder: a dispatch mode that notes ops, and hooks that give autograd recipes.

One recorder serves a thread from the outermost region to its end. It sees every op below autograd
and autocast, with the very tensors that autograd handles. Nothing is attached to tensors; a
storage carries a note of which state its bytes are in, by number, so that a tensor that outlives
the recording keeps nothing of it alive. Storages of parameters, which are held, carry none: they
are known by their addresses.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import UnsupportedError
from .kinds import Kind, is_ordinary, kind_of, kinds, plain_types
from .leavings import Leavings
from .places import CALL, Place, here, users
from .randomness import generator_of
from .records import (
    Op,
    Piece,
    State,
    View,
    alias,
    count_together,
    counting_writes,
    fresh_copy,
    minding_conjugates,
    parts_of,
    version_of,
)
from .regions import Handle, Region, unpack
from .replay import flat
from .sharing import SMALL, checksum, overlap, same_bytes
from .watch import WatchedHandle, nbytes_of

__all__ = ["Recorder", "recorder_of_this_thread", "without_recorder"]


class Recorder(TorchDispatchMode):
    """Notes what ops do to memory while at least one region is open in its thread."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Region] = []
        self.region: Region  # the innermost of them
        self.idle = 0  # regions that are open, but record nothing because gradients are off
        self._states: dict[int, State] = {}  # by the keys of their storages
        self._many = _MANY
        self._dead = 0  # bytes that are held although their tensors are gone, perhaps for nobody
        self._much = _MUCH
        self._outside: dict[int, State] = {}  # by id, for leaves, which are held, so ids stay
        self._shared: set[int] = set()  # keys of storages that lie over memory of others
        self._ops = 0
        self._hook = self._pack  # one object, to be recognised
        self._left = Leavings()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each op would pass through a wrapper that switches the compiler off

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled; what it makes comes from outside for us

    # Regions open and close in order; the first one switches the recorder on, the last one off.

    def open(self, region: Region) -> None:
        region.start = self._ops
        if self.opened:
            region.parent = self.region
            self.region.children = (*self.region.children, ref(region))
            region.has_hooks = self._hooks_are_covered()
            if region.has_hooks:
                _push_hooks(self._hook, unpack)
        else:
            try:
                _push_hooks(self._hook, unpack)
            except RuntimeError as error:  # somebody has forbidden them
                raise UnsupportedError(
                    "checkpointing needs hooks on saved tensors, which are switched off here: "
                    f"{error}"
                ) from error
            # What a mode's __enter__ does beyond this is to set flags, for all threads, by which
            # a compiler sees that a mode is on; it need not care about ours.
            _push_mode(self)
        self.opened.append(region)
        self.region = region

    def _hooks_are_covered(self) -> bool:
        """Return whether somebody has set other hooks since ours."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is None or top[0] is not self._hook

    def close(self, region: Region) -> None:
        if self.opened and self.opened[-1] is region:
            self.opened.pop()
        elif region in self.opened:
            while self.opened.pop() is not region:
                pass  # inner ones that were left open
        else:
            return  # an outer one was closed before it, and took it along
        if region.has_hooks:
            _pop_hooks()
        if self.opened:
            self.region = self.opened[-1]
        else:
            _pop_mode(None)
            _pop_hooks()
            del self.region
        if region.watch is not None:
            region.watch.closed(region)
        if not self.opened:
            self._left.regions.append(ref(region))
            self._states = {}
            self._outside = {}
            self._shared = set()
            self._dead = 0
            self._much = _MUCH

    # What autograd saves.

    def _pack(self, tensor: Tensor) -> Handle | State:
        known = self._outside.get(id(tensor))
        if (
            known is not None
            and known.version == tensor._version
            and self.region.watch is None
            and tensor.stride() == known.stride
            and tensor.shape == known.size
            and tensor.dtype is known.dtype
        ):
            known.read = True
            return known  # a parameter: the usual case
        piece = self.piece(tensor) if known is not None else self._piece(tensor)
        state = piece if type(piece) is State else piece.state
        state.read = True
        region = self.region
        watch = region.watch
        if piece is state and state.outside and watch is None:
            return state  # it stays held, so it serves as its own handle
        handle = Handle(piece, region) if watch is None else WatchedHandle(piece, region)
        if not state.outside:
            region.all_handles.append(ref(handle))
            if not tensor.is_contiguous():
                handle.stride = tensor.stride()
            if region.room is not None and state.held is None:
                region.hold_if_there_is_room(handle, tensor)
        if watch is not None:
            watch.saved(handle, tensor)
        return handle

    def hold(self, tensor: Tensor) -> None:
        """Hold what a tensor is now, although it could be computed again."""
        piece = self.piece(tensor)
        state = piece if type(piece) is State else piece.state
        if state.held is None:
            made: Any = state.tensor()
            if made is None or made is _somebody:
                self._meet(tensor)  # its shape is forgotten: from here on it is one from outside
            else:
                state.hold(alias(made))
                self.region.marks = (*self.region.marks, state)

    # What ops do. This runs for every op: it is long so that it need not call for the usual ones.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind = kinds.get(id(func)) or kind_of(func)
        if kind.special or kwargs or types or self.region.watch is not None:
            return self._run(kind, args, kwargs or {}, keep=kind.opaque or bool(types))
        quick = kind if _function_modes() else kind.of_tensors
        encoded = list(args)
        for number, arg in enumerate(args):
            if type(arg) in _NO_SUBCLASSES:
                encoded[number] = piece = self.piece(arg)
                if type(piece) is State:
                    piece.read = True
                else:
                    piece.state.read = True
            else:
                quick = kind
                encoded[number] = self._encode(arg)
        out = quick.call(*args)
        frame = _getframe(1)
        code, back = frame.f_code, frame.f_back
        if id(code) in users and (back is None or back.f_code is not CALL):
            place: Place = code, frame.f_lasti, None  # what `here` says, at once
        else:
            place = here(frame)
        op = _new_op(Op, (self._ops, quick, encoded, None, None, place))
        self._ops += 1
        if type(out) is Tensor:
            self._made(out, op, 0)
        else:
            self._made_several(out, op, keep=False)
        return out

    def _run(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool) -> Any:
        """Run an op, and note all that can be noted of one; keep what it makes, if need be."""
        if kind.view or (kind.reshapes and is_ordinary(args[0])):
            return self._run_view(kind, args, kwargs)
        twins = self._before_writes_to_twins(kind, args, kwargs) if kind.may_write else ()
        written = self._before_writes(kind, args, kwargs)
        noted = args if kind.hidden_writes is None else self._without_hidden(kind, args)
        encoded = [self._encode(arg) for arg in noted]
        keywords = {name: self._encode(value) for name, value in kwargs.items()}
        random = None
        if kind.random and kind.draws(args, kwargs):
            generator = generator_of(args, kwargs)
            random = generator, generator.get_state()
        began = time.perf_counter()
        try:
            out = _call(kind, args, kwargs)
        except BaseException:
            # Nobody knows what it has written: whoever reads that meets it anew.
            for _, tensor, _ in written:
                if is_ordinary(tensor):
                    self._forget(tensor.untyped_storage())
            raise
        finally:
            for key in twins:
                self._states.pop(key, None)  # whoever reads it meets it anew
        seconds = time.perf_counter() - began
        op = Op(self._ops, kind, encoded, keywords or None, random, here(_getframe(2)))
        self._ops += 1
        made = [(self._after_write(op, *write, keep=keep), write[1]) for write in written]
        made += self._made_several(out, op, keep=keep)
        if kind.saved_early:
            for (_, _, before), (after, _) in zip(written, made, strict=False):
                self.region.hand_over(before, after)
        if random is not None:
            self._keep_what_was_drawn(random[1], made)
        for region in self.opened:
            if region.watch is not None:
                region.watch.ran(op, made, seconds)
        return out

    def _run_view(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that touches no bytes: nothing to note, but that autograd may count it."""
        tensor: Tensor = args[0]
        if kind.same:
            return kind.call(*args, **kwargs)
        state = self._known(tensor)
        if not kind.reshapes:
            if state is not None:
                state.has_views()
            return kind.call(*args, **kwargs)
        family = [] if state is None else state.family()
        for sibling in family:
            if sibling.held is tensor:  # a leaf, which is held by itself: its shape is needed, too
                self._outside.pop(id(tensor), None)
                sibling.held = alias(tensor)
        out = kind.call(*args, **kwargs)
        for sibling in family:
            # No byte changes, but autograd will count it, also for what shares its counter.
            made, held = sibling.tensor(), sibling.held
            if not isinstance(made, Tensor) or count_together(tensor, made):
                sibling.version += 1
            if (
                held is not None
                and version_of(held) == sibling.held_version
                and count_together(tensor, held)
            ):
                sibling.held_version += 1
            sibling.tensor = _nothing
        return out

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
            # (`_key_of`, at once: this is called for every argument of every op)
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
        state.tensor = _nothing
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
        whole = _whole_of(tensor)
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
        whole = _whole_of(tensor)
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
            state.shared = not storage.resizable()
        # A view is not asked: autograd would renew its history, if its base was written to.
        state.leaf = not tensor._is_view() and tensor.is_leaf
        is_parameter = type(tensor) is torch.nn.Parameter
        if (
            state.leaf
            and tensor.requires_grad
            and type(tensor) in _NO_SUBCLASSES
            and not tensor.is_complex()  # it could become its conjugate
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
            state.tensor = ref(tensor) if same.is_set_to(tensor) else _somebody

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

    # Writes. What is overwritten is copied before if it is needed and cannot be computed again.

    def _before_writes(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[tuple[Any, int], Tensor, State]]:
        targets = _targets(kind, args, kwargs)
        alone = len(targets) == 1 and not kind.fresh
        return [
            (key, tensor, self._before_write(kind, tensor, alone=alone)) for key, tensor in targets
        ]

    def _before_writes_to_twins(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> set[int]:
        """Save what other storages over the same memory hold of it, and return their keys.

        DLPack and NumPy make such storages; they count by themselves, so a write to one is none
        to the other.
        """
        tensors = [tensor for _, tensor in _targets(kind, args, kwargs)]
        tensors += [args[number] for number in kind.writes_in_secret(args)]
        found: set[int] = set()
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not is_ordinary(tensor):
                continue
            storage = tensor.untyped_storage()
            if self._shared or not storage.resizable():
                self._encode([*args, *kwargs.values()])  # so that all is known
                found |= self._twins(storage)
        for key in found:
            state = self._states[key]
            for region in self.opened:
                if region.room is not None:
                    region.before_write(state)
            for sibling in state.family():
                self._let_go_of_memory(sibling, tensors)
        return found

    def _twins(self, storage: Any) -> set[int]:
        """Return the keys of other storages over the same memory, and of those nobody can find."""
        own = _key_of(storage)
        keys = self._shared & self._states.keys() if storage.resizable() else self._states.keys()
        return {key for key in keys if key != own and _may_be_over(self._states[key], storage)}

    def _let_go_of_memory(self, state: State, written: list[Any]) -> None:
        held = state.held
        if held is None or not is_ordinary(held):
            return
        self._outside.pop(id(held), None)
        if any(overlap(held.untyped_storage(), t.untyped_storage()) for t in written):
            if state.op is not None:
                state.held = None
            else:
                state.hold_a_copy()

    def _before_write(self, kind: Kind, tensor: Tensor, *, alone: bool) -> State:
        """Save what is overwritten. If it is all that the op makes, the op is never run again."""
        state = self._known(tensor)
        if state is None:
            if not is_ordinary(tensor):
                self._before_write_to_parts(kind, tensor)
            met = self._meet(tensor)
            state = met if type(met) is State else met.state
        if state.blank:
            if kind.fills and _covers(tensor):
                state.blank = False  # from here on it can be computed
            else:
                self.piece(tensor)  # it is read, so it is held
        for region in self.opened:
            if region.room is not None:
                region.before_write(state)
        for sibling in state.family():
            if sibling.held is not None:
                self._outside.pop(id(sibling.held), None)
                if sibling.op is not None or (sibling.outside and not sibling.read and alone):
                    sibling.held = None
                elif not sibling.copied and version_of(sibling.held) == sibling.held_version:
                    sibling.hold_a_copy()  # or it is one already, or stale
                    self._dead += nbytes_of(sibling.held)
        piece = self.piece(tensor)
        state = piece if type(piece) is State else piece.state
        if kind.uncounted and state.held is not None:
            state.hold_a_copy()  # nobody will see that it was written to
        return state

    def _before_write_to_parts(self, kind: Kind, tensor: Tensor) -> None:
        """Save what a tensor consists of; whoever reads that again meets it anew."""
        for part in parts_of(tensor):
            self._before_write(kind, part, alone=False)
            if is_ordinary(part):
                self._forget(part.untyped_storage())

    def _after_write(self, op: Op, key: Any, tensor: Tensor, before: State, *, keep: bool) -> State:
        if op.kind.reseats and is_ordinary(tensor):
            known = self._states.get(_key_of(tensor.untyped_storage()))
            if known is not None:
                known.has_views()
                return known  # its bytes are as they were, and it counts their writes by itself
        # Autograd counts the write when we are done, but not that to what it has saved already.
        to_come = not (op.kind.counts or (op.kind.saved_early and key[0] == _NOISE))
        whole = _whole_of(tensor) if before.outside else tensor
        after = State(whole, version_of(tensor) + to_come)
        after.outside, after.leaf, after.shared = before.outside, before.leaf, before.shared
        if before.outside or keep:
            if is_ordinary(whole):
                after.has_views()
            after.hold(alias(whole))
            after.held_version = after.version
            after.fragile = before.leaf
        else:
            after.op = op
            after.argument = key
            after.tensor = before.tensor
            after.viewed = before.viewed
            if after.viewed:
                after.copy_geometry(before)
        if is_ordinary(tensor):
            if op.kind.uncounted:
                self._forget(tensor.untyped_storage())
            else:
                self._note(tensor.untyped_storage(), after)
        return after

    def _without_hidden(self, kind: Kind, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments without those that are written to in secret and not read.

        What was read from them before is copied; whoever reads them again meets them anew.
        """
        numbers = kind.writes_in_secret(args)
        for number in numbers:
            if isinstance(args[number], Tensor) and self._known(args[number]) is not None:
                self._before_write(kind, args[number], alone=False)
                self._forget(args[number].untyped_storage())
        return tuple(
            _instead(arg, args[0]) if number in numbers else arg for number, arg in enumerate(args)
        )

    def _keep_what_was_drawn(
        self, generator_state: Tensor, made: list[tuple[State, Tensor]]
    ) -> None:
        """Hold what an op drew, if that is smaller than the state of its generator or wanted."""
        drawn = sum(tensor.untyped_storage().nbytes() for _, tensor in made)
        if self.region.preserve_rng_state and drawn > generator_state.nbytes:
            return
        for state, tensor in made:
            if not state.outside:
                self._keep(state, tensor)
                state.held_version = state.version


@contextmanager
def without_recorder() -> Iterator[None]:
    """Run code that the regions of this thread do not see; regions inside are regions of their own.

    A loop keeps its own books: to a region around it, what it makes comes from outside.
    """
    outer = recorder_of_this_thread()
    if not outer.opened and not outer.idle:
        yield
        return
    _threads.recorder = Recorder()
    covered = outer._hooks_are_covered() if outer.opened else True
    if not covered:
        _pop_hooks()
    try:
        with _off(outer) if outer.opened else nullcontext():
            yield
    finally:
        if not covered:
            _push_hooks(outer._hook, unpack)
        _threads.recorder = outer


@contextmanager
def _off(recorder: Recorder) -> Iterator[None]:
    """Take a recorder off the stack of modes; those that the program has entered since stay on."""
    above = []
    while (mode := _pop_mode(None)) is not recorder:
        above.append(mode)
    for mode in reversed(above):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode(None)
        _push_mode(recorder)
        for mode in reversed(above):
            _push_mode(mode)


def recorder_of_this_thread() -> Recorder:
    """Return the recorder of this thread; it is on if a region is open in it."""
    try:
        recorder: Recorder = _threads.recorder
    except AttributeError:
        recorder = _threads.recorder = Recorder()
    return recorder


def _not_to_be_compiled(function: Any) -> None:
    """Keep a compiler out of a function and what it calls, without a wrapper that takes time."""
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def _references() -> int:
    """Return what getrefcount says of a thing that is in one table and has one name."""
    table = {0: object()}
    thing = table[0]
    return sys.getrefcount(thing)


_ONLY_HERE = _references()
# The compiler looks at functions that are called from code which it could not compile.
_not_to_be_compiled(Recorder.open)
_not_to_be_compiled(Recorder.close)
# What torch.autograd.graph.saved_tensors_hooks does.
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_mode = torch._C._push_on_torch_dispatch_stack
_pop_mode = torch._C._pop_torch_dispatch_stack
_getframe = sys._getframe
_function_modes = torch._C._len_torch_function_stack
_threads = threading.local()
_NO_SUBCLASSES = {Tensor, torch.nn.Parameter}
_LISTS = (list, tuple)
_MANY = 2000  # states, before it is worth a look which of them are dead
_MUCH = 4 << 20  # bytes, likewise
_LITTLE = 1 << 12  # bytes that are not worth to be counted
_TIMES = 1000  # as large as its by-products is what an op is run for
_NOISE = 1  # the argument of rrelu_with_noise
_notes = itertools.count(-1, -1)  # numbers that no two recordings share, and no addresses or zero
_new_op = tuple.__new__  # quicker than Op(), which parses its arguments


def _targets(
    kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[Any, int], Tensor]]:
    """Return the tensors that an op writes to, with the arguments that they are."""
    named = [(k, kwargs.get(k) if isinstance(k, str) else args[k : k + 1]) for k in kind.writes]
    return [
        ((key, number), tensor)
        for key, target in named
        for number, tensor in enumerate(flat(target))
        if isinstance(tensor, Tensor)
    ]


def _may_be_over(state: State, storage: Any) -> bool:
    """Return whether a state is one of the same memory, or of memory that is not known."""
    made: Any = state.tensor()
    if not isinstance(made, Tensor):
        made = state.held
    if made is None or state.copied:
        return True
    return not is_ordinary(made) or overlap(made.untyped_storage(), storage)


def _is_stale(state: State, tensor: Tensor) -> bool:
    """Return whether a tensor is no longer what the copy says that is held of it."""
    return state.held is not None and not same_bytes(tensor, state.held)


def _sum_up(state: State, tensor: Tensor) -> None:
    """Note what a tensor is now, whose memory others may write to unseen."""
    geometry = View(state, tensor).geometry
    assert state.sums is not None
    if geometry not in state.sums:
        state.sums[geometry] = checksum(tensor.untyped_storage(), geometry)


def _call(kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kind.counts:
        with counting_writes():
            return kind.call(*args, **kwargs)
    if kind.conjugates:
        with minding_conjugates():
            return kind.call(*args, **kwargs)
    return kind.call(*args, **kwargs)


def _instead(statistics: Any, values: Tensor) -> State | None:
    """Return what a replay gives in place of statistics: nothing, or a copy if types are mixed."""
    if not isinstance(statistics, Tensor) or statistics.dtype is values.dtype:
        return None
    state = State(statistics, 0)
    state.outside = state.leaf = True
    state.hold(fresh_copy(statistics))
    return state


def _whole_of(tensor: Tensor) -> Tensor:
    """Return what a tensor is a view of, which counts writes for all its views, or itself."""
    base = tensor._base
    return tensor if base is None or not is_ordinary(base) else base


def _key_of(storage: Any) -> int:
    """Return the note on a storage, or else where it is: that serves for one that is held."""
    key: int = getattr(storage, "_remat", None) or storage._cdata
    return key


def _is_over(state: State, key: int) -> bool:
    """Return whether nobody will come across a state again by its key."""
    made: Any = state.tensor()
    if made is None:
        return True
    return made is not _somebody and _key_of(made.untyped_storage()) != key


def _somebody() -> Any:
    """Stand for a tensor that is no one's."""
    return _somebody


def _nothing() -> None:
    return None


def _covers(tensor: Tensor) -> bool:
    """Return whether a tensor lies over all bytes of its storage."""
    if tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    distance = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != distance:
            return False  # some elements lie upon one another
        distance *= size
    return True
