"""What a watched region tells: what it did, what it holds, and what a plain pass would hold.

Memory is told per storage, under a number that the storage carries. Leaves are left out: parameters
and inputs are there with and without checkpointing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...plans import trace
from ...watching import Watcher
from .kinds import is_ordinary
from .places import describe
from .records import Op, Piece, State
from .regions import Handle, Region
from .replay import Needed, needs

__all__ = ["Watch", "WatchedHandle", "name_of", "nbytes_of"]

_numbers = itertools.count()


class WatchedHandle(Handle):
    """A handle that tells when it is released, and when its tensor is there."""

    __slots__ = ("held_key", "plain_key", "value")

    def __init__(self, piece: Piece, region: Region) -> None:
        super().__init__(piece, region)
        self.value = -1  # its number in the trace
        self.plain_key: int | None = None  # the memory that a plain pass holds for it, if any
        self.held_key: int | None = None  # the memory that is held for it now, if any

    def __del__(self) -> None:
        self.region.watch.released(self)


class Watch:
    """Tells watchers of one region."""

    def __init__(self, what: Any, watchers: tuple[Watcher, ...]) -> None:
        self._watchers = [(watcher, watcher.region_ran(name_of(what))) for watcher in watchers]
        self._ops: list[trace.Op] = []
        self._values: list[trace.Value] = []
        self._numbers: dict[State, int] = {}  # of the values, as long as the region is open
        self._saved: list[int] = []
        self._used: list[int] = []
        self._inputs: list[int] = []
        self._live: dict[State, int] = {}  # what a replay holds at this time

    def __del__(self) -> None:
        for key in self._inputs:
            self._frees(key)

    # In the forward pass.

    def ran(self, op: Op, made: list[tuple[State, Tensor]], seconds: float) -> None:
        reads = tuple(dict.fromkeys(self._number(state) for state in op.reads))
        for state, tensor in made:
            before = None if state.argument is None else op.overwritten(state.argument)
            value = trace.Value(
                nbytes=nbytes_of(tensor),
                made_by=len(self._ops),
                overwrites=None if before is None else self._number(before),
                fixed=state.held is not None,
            )
            self._numbers[state] = len(self._values)
            self._values.append(value)
        makes = tuple(self._numbers[state] for state, _ in made)
        place = describe(op.place, with_module=False)
        self._ops.append(trace.Op(str(op.kind.func), reads, makes, seconds, place))

    def _number(self, state: State) -> int:
        number = self._numbers.get(state)
        if number is None:  # it was there before the region
            number = self._numbers[state] = len(self._values)
            nbytes = 0 if state.held is None else nbytes_of(state.held)
            self._values.append(trace.Value(nbytes, fixed=state.outside))
        return number

    def saved(self, handle: WatchedHandle, tensor: Tensor) -> None:
        """Autograd has got a handle for a tensor."""
        handle.value = self._number(handle.state)
        self._saved.append(handle.value)
        if handle.state.leaf:
            return
        handle.plain_key = _key(tensor)
        for watcher, _ in self._watchers:
            watcher.would_hold(handle.plain_key, nbytes_of(tensor))
        if handle.tensor is not None or handle.state.held is not None:
            self.got(handle, tensor)

    def closed(self, region: Region) -> None:
        """The region is at its end: tell what it did, and what it holds to start from."""
        self._tell_trace()
        self._numbers.clear()
        for state in needs([handle.piece for handle in region.handles()], 0, {}).uses:
            if state.held is not None and not state.leaf:
                key = _key(state.held)
                self._inputs.append(key)
                self._holds(key, nbytes_of(state.held))

    # In the backward pass.

    def got(self, handle: WatchedHandle, tensor: Tensor) -> None:
        """A handle has its tensor."""
        self.lost(handle)
        handle.held_key = _key(tensor)
        self._holds(handle.held_key, nbytes_of(tensor))

    def lost(self, handle: WatchedHandle) -> None:
        """A handle has its tensor no longer."""
        if handle.held_key is not None:
            self._frees(handle.held_key)
            handle.held_key = None

    def used(self, handle: WatchedHandle) -> None:
        """Autograd has asked for a tensor."""
        self._used.append(handle.value)

    def released(self, handle: WatchedHandle) -> None:
        """Autograd has released a handle."""
        self.lost(handle)
        if handle.plain_key is not None:
            for watcher, _ in self._watchers:
                watcher.would_free(handle.plain_key)

    def replaying(self, values: Mapping[State, Tensor]) -> None:
        """Tell what a replay holds now."""
        for state in self._live.keys() - values.keys():
            self._frees(self._live.pop(state))
        for state in values.keys() - self._live.keys():
            key = self._live[state] = _key(values[state])
            self._holds(key, nbytes_of(values[state]))

    def replayed(self, ops: list[Needed], seconds: float) -> None:
        """A replay is done; what is left of it belongs to handles now."""
        for watcher, number in self._watchers:
            watcher.recomputed(number, len(ops), seconds)

    def handed_over(self) -> None:
        self.replaying({})

    def end_of_pass(self) -> None:
        self._tell_trace()

    def _tell_trace(self) -> None:
        told = trace.Trace(
            tuple(self._ops), tuple(self._values), tuple(self._saved), tuple(self._used)
        )
        for watcher, number in self._watchers:
            watcher.traced(number, told)

    def _holds(self, key: int, nbytes: int) -> None:
        for watcher, _ in self._watchers:
            watcher.holds(key, nbytes)

    def _frees(self, key: int) -> None:
        for watcher, _ in self._watchers:
            watcher.frees(key)


def name_of(what: Any) -> str:
    """Return the name of a region: text, or that of the function that it is of."""
    return what if isinstance(what, str) else getattr(what, "__qualname__", type(what).__name__)


def _key(tensor: Tensor) -> int:
    """Return the number of a tensor's storage, under which its memory is told."""
    if not is_ordinary(tensor):
        return -id(tensor)
    storage = tensor.untyped_storage()
    number: int | None = getattr(storage, "_remat_number", None)
    if number is None:
        number = storage._remat_number = next(_numbers)  # type: ignore[attr-defined]
    return number


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of the memory that a tensor keeps alive."""
    if is_ordinary(tensor):
        return tensor.untyped_storage().nbytes()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return 0 if tensor.layout is not torch.strided else tensor.nbytes
