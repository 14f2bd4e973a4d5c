"""Regions: what is dropped together and recomputed together, and what autograd gets instead.

Autograd gets a `SavedTensor` for every tensor that it saves inside of a region. The first one of a
region that is asked for its tensor in a backward pass makes the region recompute those of all its
living saved tensors, each op once. A saved tensor gives its tensor away when it is asked for it, so
the tensor lives as long as autograd needs it and no longer; what nobody asked for is dropped at the
end of the pass.

Regions nest by one rule: what an inner region starts from is a tensor saved by its parent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from .backend import (
    count_function_modes,
    current_graph_task,
    queue_callback,
    replaying,
    without_function_modes,
)
from .memory.records import Op, Operand, Value
from .memory.tensors import alias
from .replay import ReplayObserver, decode_for_autograd, find_needs, outer_values, replay
from .retention import Retention, drop, fetch, is_available

__all__ = ["Region", "RegionObserver", "SavedTensor", "unpack"]


class RegionObserver(ReplayObserver, Protocol):
    """Who is told what a region does; `diagnostics.accounting` is one."""

    def make_saved(self, operand: Operand, region: Region) -> SavedTensor: ...

    def ran(self, op: Op, made: list[tuple[Value, Tensor]], seconds: float) -> None: ...

    def ran_in_backward(self, out: Any) -> None: ...

    def saved(self, saved: Any, tensor: Tensor) -> None: ...

    def closed(self, region: Region) -> None: ...

    def used(self, saved: Any) -> None: ...

    def got(self, saved: Any, tensor: Tensor) -> None: ...

    def lost(self, saved: Any) -> None: ...

    def handed_over(self) -> None: ...

    def end_of_pass(self) -> None: ...


class SavedTensor:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "operand", "region", "stays", "stride", "tensor", "version")

    def __init__(self, operand: Operand, region: Region) -> None:
        self.operand = operand
        self.region = region
        self.tensor: Tensor | None = None
        self.version = 0  # of the tensor, when it came here
        self.stays = False  # after it was asked for
        self.stride: tuple[int, ...] | None = None  # of what was saved, unless that is contiguous

    @property
    def value(self) -> Value:
        operand = self.operand
        return operand if type(operand) is Value else operand.value

    def keep(self, tensor: Tensor) -> None:
        """Keep what is saved, as a policy says."""
        self.receive(alias(tensor), stays=True)

    def keep_leaf(self, tensor: Tensor) -> None:
        """Keep a leaf as autograd would: the very tensor, with its class and its attributes."""
        if not tensor.is_inference():
            self.receive(tensor, stays=True)

    def receive(self, tensor: Tensor, *, stays: bool = False) -> None:
        self.tensor, self.version, self.stays = tensor, tensor._version, stays

    def drop(self) -> None:
        self.tensor, self.stays = None, False
        if self.region.observer is not None:
            self.region.observer.lost(self)

    def unchanged_tensor(self) -> Tensor | None:
        """Return the tensor, if it is here and no backward has written to it."""
        tensor = self.tensor
        return tensor if tensor is not None and tensor._version == self.version else None

    def borrow(self, tensor: Tensor) -> None:
        """Keep, for the rest of this pass, what a later region holds as its input.

        That one is about to let it go, and here it will be asked for next.
        """
        task = current_graph_task()
        if task == -1:
            return
        self.region.await_end(task)  # also for what a pass that failed has left here
        if self.tensor is None:
            self.receive(tensor, stays=True)
            self.region.borrowed(self)

    def take(self) -> Tensor:
        """Return the tensor, computed if need be; unless it stays, give it away."""
        region = self.region
        if region.observer is not None:
            region.observer.used(self)
        tensor = self.unchanged_tensor()
        if tensor is not None:
            if not self.stays:
                self.tensor = None
            return tensor
        if self.tensor is not None:  # it was written to: whoever has it computes it again
            drop(self.value)
            self.tensor, self.stays = None, False
        if not is_available(self.value):
            return region.compute(self)
        guard = replaying.take()
        try:
            with guard:
                return decode_for_autograd(self.operand, {})
        finally:
            replaying.give(guard)


def unpack(packed: SavedTensor | Value) -> Tensor:
    """Return the tensor that autograd saved."""
    return fetch(packed) if type(packed) is Value else packed.take()


class Region:
    """A part of a program that is dropped and recomputed as a whole."""

    parent: Region | None = None
    start = 0  # the number of its first op
    observer: RegionObserver | None = None
    has_own_hooks = False  # because others were set inside of its parent
    marks: tuple[ref[Value], ...] = ()  # kept by name or by mark
    inputs: Mapping[Value, SavedTensor] = MappingProxyType({})  # which its parent saved
    has_children = False
    is_attended = False  # an observer or a policy wants to see every op
    backward_began: Callable[[], None] | None = None  # told when a pass begins to recompute
    hold_on: Sequence[ref[Value]] = ()  # values that stay held once they are recomputed here
    _pass = -1  # the backward pass that it was computed in
    _borrowed: tuple[ref[SavedTensor], ...] = ()  # that have a tensor until the end of a pass
    _ends_with = -1  # the pass whose end it waits for

    def __init__(
        self,
        name: str = "",
        *,
        preserve_rng_state: bool = True,
        retention: Retention | None = None,
    ) -> None:
        self.name = name
        self.preserve_rng_state = preserve_rng_state
        self.retention = retention
        self.is_attended = retention is not None and retention.asks_about_made
        self.saved: list[ref[SavedTensor]] = []
        self._lock = threading.Lock()
        self._dtype = torch.get_default_dtype()

    # -- forward -----------------------------------------------------------------------------------

    def attend(self, observer: RegionObserver) -> None:
        """Tell an observer what the region does."""
        self.observer, self.is_attended = observer, True

    def save(self, operand: Operand, tensor: Tensor | None, *, by_region: bool = False) -> Any:
        """Return what stands for a computed tensor that autograd, or an inner region, saves."""
        observer = self.observer
        saved = (
            SavedTensor(operand, self) if observer is None else observer.make_saved(operand, self)
        )
        value = operand if type(operand) is Value else operand.value
        reference = ref(saved)
        self.saved.append(reference)
        value.holders = (*value.holders, reference)
        if tensor is not None:
            if not tensor.is_contiguous():
                saved.stride = tensor.stride()
            if self.retention is not None and value.held is None:
                self.retention.saved(saved, value, tensor)
            if observer is not None and not by_region:
                observer.saved(saved, tensor)
        return saved

    def close(self) -> None:
        """End the forward pass of a region: let its parent save what it starts from."""
        if self.parent is not None:
            wanted = [saved.operand for saved in self.living() if saved.tensor is None]
            outer = outer_values(wanted, self.start)
            save = partial(self.parent.save, by_region=True)
            self.inputs = {value: save(value, value.current_tensor()) for value in outer}
            self.parent.closed_inside(self)
        if self.observer is not None:
            self.observer.closed(self)

    def closed_inside(self, child: Region) -> None:
        """Note that a region inside of this one is at its end."""

    def replace(self, before: Value, after: Value) -> None:
        """Let saved tensors of a value be of another one that has taken its place."""
        for saved in before.living_holders():
            if saved.operand is before:
                saved.operand = after
                saved.drop()
        after.holders, before.holders = (*after.holders, *before.holders), ()

    def kept_nothing_back(self) -> bool:
        """Return whether all was kept although no policy asked for it."""
        if self.has_children or self.retention is not None:
            return False
        alive = list(self.living())
        if self.saved and not alive:
            return False  # a backward pass has been through it already
        return all(saved.value.held is not None for saved in alive)

    def living(self) -> Iterator[SavedTensor]:
        """Yield the saved tensors that autograd still holds."""
        for reference in self.saved:
            saved = reference()
            if saved is not None:
                yield saved

    def forget_released(self) -> None:
        """Forget saved tensors that autograd has released, but not that there were any."""
        alive = [reference for reference in self.saved if reference() is not None]
        self.saved = alive or self.saved[:1]

    # -- backward ----------------------------------------------------------------------------------

    def compute(self, asked: SavedTensor) -> Tensor:
        """Return the tensor of a saved tensor, and compute all others if it is time."""
        with self._lock:
            if self.backward_began is not None and not torch.is_grad_enabled():
                self.backward_began()
            task = current_graph_task()
            if len(self.saved) == 1 or task in (-1, self._pass):
                (tensor,) = self._compute([asked.operand])  # all there is, or once more
            else:
                tensor = self._compute_all(task, asked)
            if self.observer is not None:
                self.observer.handed_over()
            return tensor

    def _compute_all(self, task: int, asked: SavedTensor) -> Tensor:
        """Compute what all saved tensors will ask for; return the tensor of the one that asked."""
        waiting = [
            saved for saved in self.living() if saved.tensor is None and saved.value.held is None
        ]
        tensors = self._compute([saved.operand for saved in waiting])
        self._pass = task
        if waiting == [asked] and self.observer is None:
            return tensors[0]  # the one who asks takes all there is
        self.await_end(task)
        result = None
        for saved, tensor in zip(waiting, tensors, strict=True):
            if saved is asked:
                result = tensor
            else:
                saved.receive(tensor)
            if self.observer is not None:
                self.observer.got(saved, tensor)
        if result is None:  # another thread has had it computed meanwhile
            (result,) = self._compute([asked.operand])
        return result

    def _compute(self, wanted: list[Operand]) -> list[Tensor]:
        if torch.get_default_dtype() is self._dtype and not count_function_modes():
            return self._replay(wanted)
        # Some ops ask for the default, and modes of the program have seen ours when they first ran.
        with _default_dtype(self._dtype), without_function_modes():
            return self._replay(wanted)

    def _replay(self, wanted: list[Operand]) -> list[Tensor]:
        guard = replaying.take()
        try:
            with guard:
                needed = find_needs(wanted, self.inputs)
                given = needed.lent
                for value in needed.inputs:
                    given[value] = self.inputs[value].take()
                holds = self._values_to_hold() if self.hold_on else ()
                return replay(wanted, needed, given, self.observer, holds)
        finally:
            replaying.give(guard)

    def _values_to_hold(self) -> set[Value]:
        return {value for reference in self.hold_on if (value := reference()) is not None}

    def borrowed(self, saved: SavedTensor) -> None:
        """Note a saved tensor that got its tensor from a later region."""
        self._borrowed = (*self._borrowed, ref(saved))
        if self.observer is not None and saved.tensor is not None:
            self.observer.got(saved, saved.tensor)

    def await_end(self, task: int) -> None:
        if self._ends_with != task:
            self._ends_with = task
            queue_callback(self._end_of_pass)

    def _end_of_pass(self) -> None:
        """Drop what was computed and not asked for."""
        borrowed, self._borrowed = self._borrowed, ()
        for reference in borrowed:
            if (saved := reference()) is not None:
                saved.drop()
        for saved in self.living():
            if not saved.stays:
                saved.drop()
        if self.observer is not None:
            self.observer.end_of_pass()

    # -- what can be seen from outside -------------------------------------------------------------

    def held(self) -> list[Tensor]:
        """Return what is held of what was made in here, each value once."""
        found: dict[Value, Tensor] = {}
        for reference in self.marks:
            if (value := reference()) is not None and value.held is not None:
                found[value] = value.held.tensor
        for saved in self.living():
            held = saved.value.held
            tensor = saved.tensor if held is None else held.tensor
            if tensor is not None:
                found.setdefault(saved.value, tensor)
        return list(found.values())

    def recompute(self) -> list[Tensor]:
        """Return what was dropped and is still to be asked for, computed now, each value once."""
        with self._lock:
            missing = {
                saved.value: saved.operand
                for saved in self.living()
                if saved.tensor is None and saved.value.held is None
            }
            return self._compute(list(missing.values()))

    def drop_all(self) -> None:
        """Hold nothing of what can be computed again."""
        for saved in self.living():
            drop(saved.value)
        for reference in self.marks:
            if (value := reference()) is not None:
                drop(value)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
