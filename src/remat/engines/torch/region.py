"""Regions: parts of a program whose activations are dropped and recomputed together.

Autograd gets a `SavedTensor` for every tensor that it saves inside a region. The first one that is
unpacked in a backward pass makes the region recompute the tensors of all its saved tensors that are
alive, each op once. A saved tensor hands its tensor over when it is unpacked, so that autograd
frees it as soon as it is done. What was not unpacked is dropped at the end of the pass.

Nested regions follow one rule: the inputs of an inner region are tensors saved by its parent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .backend import (
    count_function_modes,
    current_graph_task,
    is_custom_function_in_backward,
    queue_callback,
    replaying,
    without_function_modes,
)
from .memory.records import Op, Operand, Value, View
from .memory.tensors import alias
from .replay import ReplayObserver, decode_for_autograd, find_needs, outer_values, replay
from .retention import Retention, drop, fetch, is_available
from .schema import OpTraits
from .streams import Ready, Streams

__all__ = [
    "BETWEEN",
    "ExpectedOp",
    "KnownValues",
    "Region",
    "RegionObserver",
    "SavedTensor",
    "replace_saves",
    "unpack",
]


class KnownValues(Protocol):
    """What is known of tensors: `recording.storages.StorageTable`."""

    def known(self, tensor: Tensor) -> Value | None: ...


class ExpectedOp(Protocol):
    """What to do about an op: `budget.settled.Step`."""

    @property
    def is_recorded(self) -> bool: ...

    @property
    def is_held(self) -> bool:
        """Whether its output is held, if it is not recorded."""

    @property
    def is_attended(self) -> bool:
        """Whether the region has to see its outputs, if it is recorded."""

    @property
    def nbytes(self) -> int:
        """The bytes of its one output; -1 if they are not to be compared."""


class _Between:
    """An op between two passes."""

    is_recorded = is_held = is_attended = False
    nbytes = -1


BETWEEN = _Between()


class ExpectedOps(Protocol):
    """The ops that are expected to run: `budget.settled.SettledPass`."""

    op_number: int  # of the last one, if it was recorded
    held: Value | None  # that the last one has made, if it was not recorded

    @property
    def is_complete(self) -> bool: ...

    def next(self, func: Any, args: tuple[Any, ...]) -> ExpectedOp | None: ...


class RegionObserver(ReplayObserver, Protocol):
    """Is notified of what a region does. `diagnostics.accounting` implements it.

    `saved` is what its own `make_saved` has returned, hence `Any`.
    """

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
    """The placeholder that autograd holds instead of a tensor."""

    __slots__ = (
        "__weakref__", "is_kept", "is_leaf", "lost", "operand", "region", "stride", "tensor",
        "version",
    )  # fmt: skip

    def __init__(self, operand: Operand, region: Region) -> None:
        self.operand = operand
        self.region = region
        self.tensor: Tensor | None = None
        self.version = 0  # of the tensor, when it was received
        self.is_kept = False  # it keeps its tensor when it is unpacked
        self.is_leaf = False  # its tensor is the very leaf, for a custom Function
        self.lost = ""  # what a custom Function would miss of the tensor
        self.stride: tuple[int, ...] | None = None  # of the saved tensor; None if contiguous

    @property
    def value(self) -> Value:
        operand = self.operand
        return operand if type(operand) is Value else operand.value

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor, because a policy says so."""
        self.receive(alias(tensor), is_kept=True)

    def keep_leaf(self, tensor: Tensor) -> None:
        """Keep a leaf as autograd would: the same object, with its class and attributes.

        A custom Function that has saved it gets it: its backward may write to it.
        """
        if not tensor.is_inference():
            self.receive(tensor, is_kept=True)
            self.is_leaf = True

    def receive(self, tensor: Tensor, *, is_kept: bool = False) -> None:
        self.tensor, self.version, self.is_kept = tensor, tensor._version, is_kept

    def drop(self) -> None:
        self.tensor, self.is_kept = None, False
        if self.region.observer is not None:
            self.region.observer.lost(self)

    def unchanged_tensor(self) -> Tensor | None:
        """Return the tensor, if it is held and no backward has written to it."""
        tensor = self.tensor
        if tensor is None or tensor._version != self.version:
            return None
        if self.region.ready is not None:
            self.region.ready.wait(tensor)
        return tensor

    def borrow(self, tensor: Tensor) -> None:
        """Keep, for the rest of this pass, the input of a later region, which is about to free it.

        It is the same tensor, and this region will need it next.
        """
        task = current_graph_task()
        if task == -1:
            return
        self.region.await_end(task)  # also drops what a failed pass has left
        if self.tensor is None:
            self.receive(tensor, is_kept=True)
            self.region.borrowed(self)

    def take(self) -> Tensor:
        """Return the tensor, recomputed if necessary. Release it, unless it is to be kept."""
        region, operand = self.region, self.operand
        if self.lost and is_custom_function_in_backward():
            raise _loses(self.lost)
        if region.observer is not None:
            region.observer.used(self)
        value = operand if type(operand) is Value else operand.value
        if self.tensor is not None:
            tensor = self.unchanged_tensor()
            if tensor is None:  # it was modified: recompute it
                drop(value)
                self.tensor, self.is_kept = None, False
            elif not self._is_to_be_checked():
                if not self.is_kept:
                    self.tensor = None
                return tensor
        if not is_available(value):
            return region.compute(self)
        guard = replaying.take()
        try:
            with guard:
                return fetch(value) if operand is value else decode_for_autograd(operand, {})
        finally:
            replaying.give(guard)

    def _is_to_be_checked(self) -> bool:
        """Return whether its tensor is a leaf from outside, and an op of PyTorch asks for it.

        It then gets what is held of the leaf, which may be a copy, and is checked for writes.
        """
        external = self.is_leaf and self.value.origin.is_external
        return external and not is_custom_function_in_backward()


def _loses(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"a custom autograd.Function saves a non-leaf tensor inside of a checkpointed region; "
        f"PyTorch's saved-tensor hooks lose {what}. Save a plain tensor "
        "(tensor.as_subclass(torch.Tensor)) and keep the rest on ctx, or call the function "
        "outside of the region"
    )


def unpack(packed: SavedTensor | Value) -> Tensor:
    """Return the tensor of a saved tensor: the unpack hook."""
    return fetch(packed) if type(packed) is Value else packed.take()


def replace_saves(before: Value, after: Value) -> None:
    """Make what was saved of a value refer to what its memory holds since: no version tells."""
    kept = []
    for reference in before.holders:
        saved = reference()
        if saved is None:
            continue
        geometry = saved.operand.geometry
        if geometry is None:
            kept.append(reference)
        else:
            saved.operand = View(after, geometry)
            after.holders = (*after.holders, reference)
    before.holders = tuple(kept)


class Region:
    """A part of a program whose activations are recomputed together."""

    parent: Region | None = None
    start = 0  # the number of its first op
    observer: RegionObserver | None = None
    has_own_hooks = False  # because the program has set hooks inside its parent
    marks: tuple[ref[Value], ...] = ()  # kept because of a name or a mark
    inputs: Mapping[Value, SavedTensor] = MappingProxyType({})  # saved by its parent
    has_children = False
    is_attended = False  # an observer or a policy has to see every op
    backward_began: Callable[[], None] | None = None  # called before a recomputation
    streams: Streams | None = None  # that its ops ran on
    ready: Ready | None = None  # when its last replay is over, if there are several streams
    hold_on: Sequence[ref[Value]] = ()  # values to hold once they are recomputed
    # Tells whether an op belongs to the region; None if all do that run inside of it.
    admits: Callable[[KnownValues, Any, tuple[Any, ...], Mapping[str, Any]], bool] | None = None
    settled: ExpectedOps | None = None  # if it follows the plan of a settled pass
    outside: Region | None = None  # for what was there before it, if not this one
    _pass = -1  # the last backward pass that recomputed it
    _borrowed: tuple[ref[SavedTensor], ...] = ()  # hold a tensor until the pass ends
    _ends_with = -1  # the pass whose end it has a callback for

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
        """Notify an observer of what the region does."""
        self.observer, self.is_attended = observer, True

    def save(self, operand: Operand, tensor: Tensor | None, *, by_region: bool = False) -> Any:
        """Return the placeholder for a computed tensor that autograd or an inner region saves."""
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
        """End the forward pass of a region: its parent saves its inputs."""
        if self.parent is not None:
            wanted = [saved.operand for saved in self.living() if saved.tensor is None]
            outer = outer_values(wanted, self.start)
            save = partial(self.parent.save, by_region=True)
            self.inputs = {
                value: save(value, value.current_tensor()) for value in outer if value.held is None
            }
            self.parent.closed_inside(self, [value for value in outer if value.held is not None])
        if self.observer is not None:
            self.observer.closed(self)

    def ran_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called on the outermost region, if it is attended, before its observer sees an op."""

    def ran_expected(self, made: list[tuple[Value, Tensor]]) -> None:
        """Called after an op that was expected and recorded."""

    def ran_unexpected(
        self, traits: OpTraits, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ExpectedOp | None:
        """Called before an op that is not the next one of a settled pass, or may begin another."""

    def backward_runs(self) -> None:
        """Called by the first op of a backward pass after a settled forward pass."""

    def leave_plan(self) -> None:
        """Record from now on: the pass is no longer the one that was planned."""

    def opened_inside(self, child: Region) -> None:
        """Called when an inner region is opened."""
        self.has_children = True
        child.is_attended |= self.is_attended

    def closed_inside(self, child: Region, reads: Iterable[Value]) -> None:
        """Called when an inner region was closed; `reads` are held already, from before it."""

    def replace(self, before: Value, after: Value) -> None:
        """Make the saved tensors of a value refer to the value that has replaced it."""
        for saved in before.living_holders():
            if saved.operand is before:
                saved.operand = after
                saved.drop()
        after.holders, before.holders = (*after.holders, *before.holders), ()

    def marked(self, value: Value) -> None:
        """Note a value that is kept because of a mark, or of its name."""
        self.marks = (*self.marks, ref(value))

    def has_kept_everything(self) -> bool:
        """Return whether everything was kept although no policy asked for it."""
        if self.has_children or self.retention is not None:
            return False
        alive = list(self.living())
        if self.saved and not alive:
            return False  # its backward pass has run already
        return all(saved.value.held is not None for saved in alive)

    def living(self) -> Iterator[SavedTensor]:
        """Yield the saved tensors that autograd has not released."""
        for reference in self.saved:
            saved = reference()
            if saved is not None:
                yield saved

    def forget_released(self) -> None:
        """Remove released saved tensors from the list, but remember that there were some."""
        alive = [reference for reference in self.saved if reference() is not None]
        self.saved = alive or self.saved[:1]

    # -- backward ----------------------------------------------------------------------------------

    def compute(self, asked: SavedTensor) -> Tensor:
        """Return the tensor of a saved tensor; the first one in a pass recomputes all others."""
        with self._lock:
            if self.backward_began is not None and not torch.is_grad_enabled():
                self.backward_began()
            task = current_graph_task()
            if len(self.saved) == 1 or task in (-1, self._pass):
                (tensor,) = self._compute([asked.operand])  # the only one, or a second time
            else:
                tensor = self._compute_all(task, asked)
            if self.observer is not None:
                self.observer.handed_over()
            return tensor

    def _compute_all(self, task: int, asked: SavedTensor) -> Tensor:
        """Recompute the tensors of all saved tensors; return that of `asked`."""
        waiting = [
            saved for saved in self.living() if saved.tensor is None and saved.value.held is None
        ]
        tensors = self._compute([saved.operand for saved in waiting])
        self._pass = task
        if waiting == [asked] and self.observer is None:
            return tensors[0]
        self.await_end(task)
        result = None
        for saved, tensor in zip(waiting, tensors, strict=True):
            if saved is asked:
                result = tensor
            else:
                saved.receive(tensor)
            if self.observer is not None:
                self.observer.got(saved, tensor)
        if result is None:  # another thread has recomputed it in the meantime
            (result,) = self._compute([asked.operand])
        return result

    def _compute(self, wanted: list[Operand]) -> list[Tensor]:
        if torch.get_default_dtype() is self._dtype and not count_function_modes():
            return self._replay(wanted)
        # Some ops depend on the default dtype. Function modes have seen these ops in forward.
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
                if self.streams is None or not self.streams.are_several:
                    return replay(wanted, needed, given, self.observer, holds)
                self.streams.wait()
                if self.ready is not None:
                    self.ready.wait()
                tensors = replay(wanted, needed, given, self.observer, holds)
                self.ready = self.streams.ready()
                return tensors
        finally:
            replaying.give(guard)

    def _values_to_hold(self) -> set[Value]:
        return {value for reference in self.hold_on if (value := reference()) is not None}

    def borrowed(self, saved: SavedTensor) -> None:
        """Note a saved tensor that holds a tensor lent by a later region."""
        self._borrowed = (*self._borrowed, ref(saved))
        if self.observer is not None and saved.tensor is not None:
            self.observer.got(saved, saved.tensor)

    def await_end(self, task: int) -> None:
        if self._ends_with != task:
            self._ends_with = task
            queue_callback(self._end_of_pass)

    def _end_of_pass(self) -> None:
        """Drop what was recomputed and not unpacked."""
        borrowed, self._borrowed = self._borrowed, ()
        for reference in borrowed:
            if (saved := reference()) is not None:
                saved.drop()
        for saved in self.living():
            if not saved.is_kept:
                saved.drop()
        if self.observer is not None:
            self.observer.end_of_pass()

    # -- inspection --------------------------------------------------------------------------------

    def held(self) -> list[Tensor]:
        """Return the tensors that are held of what was computed in this region, each value once."""
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
        """Recompute and return what was dropped and is still needed, each value once."""
        with self._lock:
            missing = {
                saved.value: saved.operand
                for saved in self.living()
                if saved.tensor is None and saved.value.held is None
            }
            return self._compute(list(missing.values()))

    def drop_all(self) -> None:
        """Drop everything that can be recomputed."""
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
