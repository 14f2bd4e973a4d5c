"""Regions: what is forgotten together and computed again together, and handles for autograd.

Autograd gets a `Handle` for every tensor that it saves inside of a region. The first handle of a
region that is asked for its tensor in a backward pass makes the region compute those of all its
living handles, each op once. A handle gives its tensor away when it is asked for it, so the tensor
lives as long as autograd needs it and no longer; what nobody asked for is dropped at the end of
the pass.

Two kinds of tensors are not computed with the rest. At the peak of a pass, what a norm makes that
will be asked for late waits until then: its input is there anyway. And what a later region holds as
its input is borrowed from that one.

Regions nest. An inner region begins at values of the outer one: when the outer one is computed
again, it leaves for each inner one the values from which that will start when its turn comes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from .records import Piece, State, alias, over
from .replay import is_there, needs, replay, unseen, value_of
from .tide import Tide

__all__ = ["Handle", "Region", "unpack"]


class Later(NamedTuple):
    """What a light op makes a tensor from when it is asked for: tensors that are there anyway."""

    given: dict[State, tuple[Tensor, int]]  # with their versions: autograd has got them, too


class Handle:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "kept", "piece", "region", "stride", "tensor")

    def __init__(self, piece: Piece, region: Region) -> None:
        self.piece = piece
        self.region = region
        self.tensor: Tensor | Later | None = None
        self.kept = -1  # if the tensor is to stay after it was asked for: its version
        self.stride: tuple[int, ...] | None = None  # of what was saved, unless that is contiguous

    @property
    def state(self) -> State:
        return self.piece if type(self.piece) is State else self.piece.state


class Region:
    """A part of a program that is forgotten and computed again as a whole."""

    parent: Region | None = None
    children: tuple[ref[Region], ...] = ()
    start = 0  # the number of its first op
    watch: Any = None
    is_partly_light = False  # some of its ops are
    balance = 0  # bytes of gradients that come when we have gone back through it, less inputs
    has_hooks = False  # of its own, because others were set inside of its parent
    marks: tuple[State, ...] = ()  # held although they could be computed again
    _inputs: Mapping[State, Tensor] = MappingProxyType({})
    _pass = -1  # the backward pass that it was computed in
    _borrowed: tuple[ref[Handle], ...] = ()  # that have a tensor until the end of a pass
    _borrowed_in = -1  # that pass

    def __init__(
        self, name: str = "", preserve_rng_state: bool = True, room: float | None = None
    ) -> None:
        self.name = name
        self.preserve_rng_state = preserve_rng_state
        self.room = room  # bytes that may be held inside; if that is not enough, none are
        self.all_handles: list[ref[Handle]] = []
        self._lock = threading.Lock()
        self._dtype = _dtype_now()
        if room is not None:
            self._held = WeakKeyDictionary[State, list[ref[Handle]]]()
            self._dropped = WeakSet[State]()

    # In the forward pass.

    def hold_if_there_is_room(self, handle: Handle, tensor: Tensor) -> None:
        assert self.room is not None
        state = handle.state
        if state in self._dropped:
            return
        if state not in self._held:
            self._held[state] = []
            self.room -= tensor.untyped_storage().nbytes()
        if self.room >= 0:
            self._held[state].append(ref(handle))
            handle.tensor, handle.kept = alias(tensor), tensor._version
        else:
            self.room = None
            self._held.clear()
            for other in self.handles():
                self._drop(other)

    def drop(self, state: State) -> None:
        """Do not hold this state, now or later."""
        if self.room is not None:
            self._dropped.add(state)
        for handle in self.handles():
            if handle.state is state:
                self._drop(handle)

    def before_write(self, state: State) -> None:
        """Hold a state no longer that is about to be overwritten.

        Autograd would see by its version that a tensor was written to, but not for all: some are
        made over the memory of others and count by themselves.
        """
        for reference in self._held.pop(state, ()):
            if (handle := reference()) is not None:
                self._drop(handle)

    def drop_all(self) -> None:
        """Hold nothing of what can be computed again."""
        for handle in self.handles():
            self._drop(handle)
            if handle.state.op is not None:
                handle.state.held = None
        for state in self.marks:
            if state.op is not None:
                state.held = None

    def _drop(self, handle: Handle) -> None:
        handle.tensor, handle.kept = None, -1
        if self.watch is not None:
            self.watch.lost(handle)

    def hand_over(self, before: State, after: State) -> None:
        """Let handles of a state be of another one that has taken its place."""
        for handle in self.handles():
            if handle.piece is before:
                handle.piece = after
                self._drop(handle)

    def forgot_nothing(self) -> bool:
        """Return whether all was held although there was no room for it."""
        if self.children or self.room is not None:
            return False
        alive = list(self.handles())
        if self.all_handles and not alive:
            return False  # a backward pass has been through it already
        return all(handle.state.held is not None for handle in alive)

    def handles(self) -> Iterator[Handle]:
        """Yield the handles that autograd still holds."""
        for reference in self.all_handles:
            handle = reference()
            if handle is not None:
                yield handle

    def forget_the_dead(self) -> None:
        """Forget handles that autograd has let go, but not that there were any."""
        alive = [reference for reference in self.all_handles if reference() is not None]
        self.all_handles = alive or self.all_handles[:1]

    # In the backward pass.

    def compute(self, handle: Handle) -> Tensor:
        """Return the tensor of a handle, and compute those of the whole region if it is time."""
        with self._lock:
            if len(self.all_handles) == 1 and not self.children:
                tensor = self._compute([handle.piece])[0]  # all there is to compute
                self._inputs = Region._inputs
            elif (current := _current_pass()) in (-1, self._pass):
                tensor = self._compute([handle.piece])[0]  # once more, or outside of any pass
            else:
                tensor = self._compute_all(current, handle)
            if self.watch is not None:
                self.watch.handed_over()
            return tensor

    def _compute_all(self, current: int, asked: Handle | None = None) -> Any:
        """Compute what all handles will ask for; return the tensor of the one that asked."""
        handles = [
            handle
            for reference in self.all_handles
            if (handle := reference()) is not None
            and handle.tensor is None
            and handle.state.held is None
        ]
        later = self._may_come_later(handles, asked) if self.is_partly_light else {}
        wanted = [handle.piece for handle in handles]
        starts = [(r, r.starts()) for child in self.children if (r := child()) is not None]
        for _, states in starts:
            wanted += states
        tensors = self._compute(wanted)
        self._pass = current
        self._inputs = Region._inputs
        if len(tensors) == 1 and handles == [asked] and self.watch is None:
            return tensors[0]  # the one who asks takes all there is
        Variable._execution_engine.queue_callback(self._end_of_pass)
        there = dict(zip(wanted, tensors, strict=False)) if later else {}
        if later:
            if not self._should_spare(current, {h.state for h in later}, there):
                later = {}
            _tide.went_back(current, self.balance)
        result = None
        for handle, tensor in zip(handles, tensors, strict=False):
            if handle in later:
                self._leave(handle, later[handle], there)
                continue
            if handle is asked:
                result = tensor
            else:
                handle.tensor = tensor
            if self.watch is not None:
                self.watch.got(handle, tensor)
        rest = iter(tensors[len(handles) :])
        for region, states in starts:
            region._inputs = dict(zip(states, rest, strict=False))
        if result is None and asked is not None:  # another thread has had it computed meanwhile
            result = self._compute([asked.piece])[0]
        return result

    def _may_come_later(
        self, handles: list[Handle], asked: Handle | None
    ) -> dict[Handle, list[State]]:
        """Return handles that can wait, with what a light op will make their tensors from.

        It is held, or other handles have it until then: they were given to autograd before.
        Autograd asks for the last ones first. Those of the second half would not lie there for
        long: to run their ops once more takes as much time as for the others, and saves less.
        """
        half = len(handles) // 2
        soon = {handle.state for handle in handles[half:]}
        if asked is not None:
            soon.add(asked.state)
        there: set[Piece] = set()
        later: dict[Handle, list[State]] = {}
        for handle in handles[:half]:
            piece = handle.piece
            state = piece if type(piece) is State else piece.state
            op = state.op
            if op is not None and op.kind.light and state.output == 0:
                reads = op.reads
                if (
                    op.number >= self.start
                    and state not in soon
                    and all(read in there or is_there(read) for read in reads)
                ):
                    later[handle] = reads
                    continue
            there.add(piece)
        return later

    def _should_spare(self, current: int, some: set[State], there: dict[Piece, Tensor]) -> bool:
        """Return whether some of the states that are there should not lie around till later."""
        sizes = {
            piece if type(piece) is State else piece.state: tensor.untyped_storage().nbytes()
            for piece, tensor in there.items()
        }
        spare = sum(sizes[state] for state in some)
        for reference in self._borrowed:
            if (handle := reference()) is not None and isinstance(handle.tensor, Tensor):
                sizes[handle.state] = handle.tensor.untyped_storage().nbytes()
        return _tide.asks_to_spare(current, sum(sizes.values()), spare)

    def _leave(self, handle: Handle, reads: list[State], there: dict[Piece, Tensor]) -> None:
        """Leave a handle what its tensor will be made from when it is asked for it."""
        given = {s: (there[s], there[s]._version) for s in reads if not is_there(s)}
        handle.tensor = Later(given)
        if self.watch is not None:
            for tensor, _ in given.values():  # a norm reads one
                self.watch.got(handle, tensor)

    def finish(self, asked: Handle, later: Later) -> Tensor:
        """Return a tensor that was to come later, and leave it for others that wait for it."""
        given = {s: tensor for s, (tensor, v) in later.given.items() if tensor._version == v}
        with self._lock:
            waiting = [
                handle
                for handle in self.handles()
                if type(handle.tensor) is Later and handle.state is asked.state
            ]
            wanted = [asked.piece, *(handle.piece for handle in waiting)]
            tensor, *tensors = self._compute(wanted, given)
            for handle, other in zip(waiting, tensors, strict=True):
                handle.tensor = other
                if self.watch is not None:
                    self.watch.got(handle, other)
            if self.watch is not None:
                self.watch.got(asked, tensor)
                self.watch.handed_over()
            return tensor

    def _compute(
        self, wanted: list[Piece], more: Mapping[State, Tensor] | None = None
    ) -> list[Tensor]:
        given = self._inputs if more is None else {**self._inputs, **more}
        needed = needs(wanted, self.start, given)
        if needed.outer:
            assert self.parent is not None, "a state is neither held nor can it be computed"
            found = self.parent.provide(self, needed.outer)
            given = {**given, **dict(zip(needed.outer, found, strict=True))}
        if _dtype_now() is self._dtype and not _function_modes():
            return replay(wanted, needed, given, self.watch)
        # Some ops ask for the default, and modes of the program have seen ours when they first ran.
        with _default_dtype(self._dtype), torch._C.DisableTorchFunction():
            return replay(wanted, needed, given, self.watch)

    def provide(self, inner: Region, states: list[State]) -> list[Tensor]:
        """Return states that an inner region starts from."""
        with self._lock:
            current = _current_pass()
            if current not in (-1, self._pass):
                self._compute_all(current)
            found = dict(inner._inputs)
            missing = [state for state in states if state not in found]
            if missing:
                found.update(zip(missing, self._compute(list(missing)), strict=True))
            if self.watch is not None:
                self.watch.handed_over()
            return [found[state] for state in states]

    def starts(self) -> list[State]:
        """Return the states of outer regions that the living handles in here need."""
        wanted = [h.piece for h in self.handles() if h.tensor is None]
        for reference in self.children:
            region = reference()
            if region is not None:
                wanted += region.starts()
        return needs(wanted, self.start, {}).outer

    def held(self) -> list[Tensor]:
        """Return what is held of what was made in here, each once."""
        found = {state: state.held for state in self.marks if state.held is not None}
        for handle in self.handles():
            tensor = handle.tensor if isinstance(handle.tensor, Tensor) else handle.state.held
            if tensor is not None:
                found.setdefault(handle.state, tensor)
        return list(found.values())

    def recompute(self) -> list[Tensor]:
        """Return what was forgotten and is still to be asked for, computed now, each once."""
        with self._lock:
            forgotten = (h for h in self.handles() if h.tensor is None and h.state.held is None)
            return self._compute(
                list({handle.state: handle.piece for handle in forgotten}.values())
            )

    def borrow(self, handle: Handle, tensor: Tensor) -> None:
        """Hold, for the rest of this backward pass, what a later region still holds as its input.

        That one is about to let it go, and here it will be asked for next.
        """
        current = _current_pass()
        if current == -1:
            return
        if self._borrowed_in != current:
            self._borrowed_in = current
            Variable._execution_engine.queue_callback(self._end_of_pass)
        if handle.tensor is None:
            self._borrowed = (*self._borrowed, ref(handle))
            handle.kept = tensor._version
            handle.tensor = tensor
            if self.watch is not None:
                self.watch.got(handle, tensor)

    def _end_of_pass(self) -> None:
        borrowed, self._borrowed = self._borrowed, ()
        for reference in borrowed:
            if (handle := reference()) is not None:
                self._drop(handle)
        self._inputs = Region._inputs
        for handle in self.handles():
            if handle.kept < 0:
                self._drop(handle)
        if self.watch is not None:
            self.watch.end_of_pass()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = _dtype_now()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_tide = Tide()
_current_pass = torch._C._current_graph_task_id
_dtype_now = torch.get_default_dtype
_function_modes = torch._C._len_torch_function_stack


def unpack(packed: Handle | State) -> Tensor:
    """Return the tensor that autograd saved."""
    if type(packed) is State:
        return value_of(packed)
    region = packed.region
    if region.watch is not None:
        region.watch.used(packed)
    tensor = packed.tensor
    if tensor is not None:
        if isinstance(tensor, Later):
            packed.tensor = None
            return region.finish(packed, tensor)
        if packed.kept < 0:
            packed.tensor = None
            if not tensor._version:
                return tensor
        elif tensor._version == packed.kept:
            return tensor
        else:
            region.drop(packed.state)
        # It was written to, so it is computed again.
    piece = packed.piece
    state = piece if type(piece) is State else piece.state
    if state.held is None or (state.op is not None and not is_there(state)):
        return region.compute(packed)
    held = value_of(state)
    if piece is state:
        return held
    guard = unseen.take()
    try:
        with guard:
            return over(piece, held)
    finally:
        unseen.give(guard)
