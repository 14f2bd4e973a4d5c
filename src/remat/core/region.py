"""Regions: parts of a program whose activations are dropped and recomputed together.

What a derivative saves inside a region is replaced by a `SavedTensor`. The first one that is taken
in a backward pass makes the region recompute the tensors of all its saved tensors that are alive,
each op once. A saved tensor hands its tensor over when it is taken, so that it is freed as soon as
the derivative is done with it. What was not taken is dropped at the end of the pass.

Nested regions follow one rule: the inputs of an inner region are tensors saved by its parent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol
from weakref import ref

from .engine import Engine
from .records import Made, Op, Operand, OpTraits, Value, View
from .replay import ReplayObserver, find_needs, outer_values, replay
from .retention import Retention, drop, is_available

__all__ = [
    "BETWEEN",
    "ExpectedOp",
    "KnownValues",
    "Region",
    "RegionObserver",
    "SavedTensor",
    "replace_saves",
]

Tensor = Any  # an array of the engine


class KnownValues(Protocol):
    """What is known of tensors: the engine's table of values."""

    def known(self, tensor: Tensor) -> Value | None: ...


class ExpectedOp(Protocol):
    """What to do about an op: `settled.Step`."""

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
    """The ops that are expected to run: `settled.SettledPass`."""

    op_number: int  # of the last one, if it was recorded
    held: Value | None  # that the last one has made, if it was not recorded

    @property
    def is_complete(self) -> bool: ...

    def next(self, func: Any, args: tuple[Any, ...]) -> ExpectedOp | None: ...


class RegionObserver(ReplayObserver, Protocol):
    """Is notified of what a region does: for profilers, and to keep to a budget."""

    def ran(self, op: Op, made: Made, seconds: float, *, has_grad: bool) -> None: ...

    def ran_in_backward(self, out: Iterable[Tensor]) -> None: ...

    def saves(self, saved: SavedTensor) -> None:
        """A saved tensor was made; it may be given a `node` or a `watch`."""

    def saved(self, saved: SavedTensor, tensor: Tensor) -> None:
        """A derivative has saved a tensor."""

    def closed(self, region: Region) -> None: ...

    def used(self, saved: SavedTensor) -> None:
        """A derivative asks for a saved tensor."""

    def filled(self, saved: SavedTensor, tensor: Tensor) -> None:
        """A saved tensor holds its tensor."""

    def emptied(self, saved: SavedTensor) -> None:
        """A saved tensor no longer holds its tensor."""

    def handed_over(self) -> None: ...

    def end_of_pass(self) -> None: ...


class Ready(Protocol):
    """When what was computed on the queues of a device is there."""

    def wait(self, tensor: Tensor | None = None) -> None: ...


class SavedTensor:
    """The placeholder that a derivative holds instead of a tensor."""

    __slots__ = (
        "__weakref__",
        "is_kept",
        "node",
        "operand",
        "region",
        "remark",
        "stride",
        "tensor",
        "value",
        "version",
        "watch",
    )

    def __init__(self, operand: Operand, region: Region) -> None:
        self.operand = operand
        self.value: Value = operand if type(operand) is Value else operand.value
        self.region = region
        self.remark: Any = None  # of the engine: see `take_otherwise`
        self.tensor: Tensor | None = None
        self.version = 0  # of the tensor, when it was received
        self.is_kept = False  # it keeps its tensor when it is taken
        self.stride: tuple[int, ...] | None = None  # of the tensor; None if it is contiguous
        self.node = -1  # the op for whose backward it is saved, if a pass is traced
        self.watch: Any = None  # of an observer: lives as long as this

    def refer_to(self, operand: Operand) -> None:
        """Refer to another value: the one that its memory holds since."""
        self.operand = operand
        self.value = operand if type(operand) is Value else operand.value

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor, because a policy says so."""
        self.receive(self.region.engine.alias(tensor), is_kept=True)

    def receive(self, tensor: Tensor, *, is_kept: bool = False) -> None:
        self.tensor, self.is_kept = tensor, is_kept
        self.version = self.region.engine.version(tensor)

    def drop(self) -> None:
        self.tensor, self.is_kept = None, False
        if self.region.observer is not None:
            self.region.observer.emptied(self)

    def unchanged_tensor(self) -> Tensor | None:
        """Return the tensor, if it is held and no derivative has written to it."""
        tensor = self.tensor
        if tensor is None or self.region.engine.version(tensor) != self.version:
            return None
        if self.region.ready is not None:
            self.region.ready.wait(tensor)
        return tensor

    def borrow(self, tensor: Tensor) -> None:
        """Keep, for the rest of this pass, the input of a later region, which is about to free it.

        It is the same tensor, and this region will need it next.
        """
        region = self.region
        task = region.engine.current_pass()
        if task == -1:
            return
        region.await_end(task)  # also drops what a failed pass has left
        if self.tensor is None:
            self.receive(tensor, is_kept=True)
            region.borrowed(self)

    def take(self) -> Tensor:
        """Return the tensor, recomputed if necessary. Release it, unless it is to be kept."""
        region = self.region
        if self.remark is not None and (tensor := self.take_otherwise()) is not None:
            return tensor
        if region.observer is not None:
            region.observer.used(self)
        if self.tensor is not None:
            tensor = self.unchanged_tensor()
            if tensor is not None:
                if not self.is_kept:
                    self.tensor = None
                return tensor
            drop(self.value)  # it was modified: recompute it
            self.tensor, self.is_kept = None, False
        return self._take_from_value()

    def take_otherwise(self) -> Tensor | None:
        """Return what is to be taken because of the remark; None if it makes no difference."""
        return None

    def _take_from_value(self) -> Tensor:
        """Return what is held of the value, or let the region recompute it."""
        region, operand = self.region, self.operand
        value, engine = self.value, region.engine
        if not is_available(value, engine):
            return region.compute(self)
        guard = engine.replaying.take()
        try:
            with guard:
                return engine.fetch(value) if operand is value else engine.decode(operand, {})
        finally:
            engine.replaying.give(guard)


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
            saved.refer_to(View(after, geometry))
            after.holders = (*after.holders, reference)
    before.holders = tuple(kept)


class Region:
    """A part of a program whose activations are recomputed together.

    An engine has a subclass of its own, with its adapter and its kind of saved tensors.
    """

    engine: ClassVar[Engine]
    saved_tensor: ClassVar[type[SavedTensor]] = SavedTensor

    parent: Region | None = None
    start = 0  # the number of its first op
    observer: RegionObserver | None = None
    marks: tuple[ref[Value], ...] = ()  # kept because of a name or a mark
    inputs: Mapping[Value, SavedTensor] = MappingProxyType({})  # saved by its parent
    has_children = False
    is_attended = False  # an observer or a policy has to see every op
    backward_began: Callable[[], None] | None = None  # called before a recomputation
    hold_on: Sequence[ref[Value]] = ()  # values to hold once they are recomputed
    # Tells whether an op belongs to the region; None if all do that run inside of it.
    admits: Callable[[KnownValues, Any, tuple[Any, ...], Mapping[str, Any]], bool] | None = None
    settled: ExpectedOps | None = None  # if it follows the plan of a settled pass
    outside: Region | None = None  # for what was there before it, if not this one
    ready: Ready | None = None  # when its last replay is over, if it ran on several queues
    _pass = -1  # the last backward pass that recomputed it
    _borrowed: tuple[ref[SavedTensor], ...] = ()  # hold a tensor until the pass ends
    _ends_with = -1  # the pass whose end it has a callback for

    def __init__(self, name: str = "", *, retention: Retention | None = None) -> None:
        self.name = name
        self.retention = retention
        self.is_attended = retention is not None and retention.asks_about_made
        self.saved: list[ref[SavedTensor]] = []
        self._lock = threading.Lock()

    # -- forward -----------------------------------------------------------------------------------

    def attend(self, observer: RegionObserver) -> None:
        """Notify an observer of what the region does."""
        self.observer, self.is_attended = observer, True

    def make_saved(self, operand: Operand) -> Any:
        """Return a placeholder for a tensor that is not among those that the region recomputes."""
        saved = self.saved_tensor(operand, self)
        if self.observer is not None:
            self.observer.saves(saved)
        return saved

    def save(self, operand: Operand, tensor: Tensor | None, *, by_region: bool = False) -> Any:
        """Return the placeholder for a computed tensor that is saved or read by an inner region."""
        observer = self.observer
        saved = self.saved_tensor(operand, self)
        if observer is not None:
            observer.saves(saved)
        value = operand if type(operand) is Value else operand.value
        reference = ref(saved)
        self.saved.append(reference)
        value.holders = (*value.holders, reference)
        if tensor is not None:
            if self.retention is not None and value.held is None:
                self.retention.saved(saved, value, tensor)
            if by_region:
                saved.stride = self.engine.stride(tensor)
            elif observer is not None:
                observer.saved(saved, tensor)
        return saved

    def close(self) -> None:
        """End the forward pass of a region: its parent saves its inputs."""
        if self.parent is not None:
            wanted = [saved.operand for saved in self.living() if saved.tensor is None]
            outer = outer_values(wanted, self.start)
            save = partial(self.parent.save, by_region=True)
            current = self.engine.current_tensor
            self.inputs = {
                value: save(value, current(value)) for value in outer if value.held is None
            }
            self.parent.closed_inside(self, [value for value in outer if value.held is not None])
        if self.observer is not None:
            self.observer.closed(self)

    def ran_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called on the outermost region, if it is attended, before its observer sees an op."""

    def ran_expected(self, made: Made) -> None:
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
                saved.refer_to(after)
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
        """Yield the saved tensors that were not released."""
        for reference in self.saved:
            saved = reference()
            if saved is not None:
                yield saved

    # -- backward ----------------------------------------------------------------------------------

    def compute(self, asked: SavedTensor) -> Tensor:
        """Return the tensor of a saved tensor; the first one in a pass recomputes all others."""
        with self._lock:
            if self.backward_began is not None and not self.engine.is_differentiating():
                self.backward_began()
            task = self.engine.current_pass()
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
                self.observer.filled(saved, tensor)
        if result is None:  # another thread has recomputed it in the meantime
            (result,) = self._compute([asked.operand])
        return result

    def _compute(self, wanted: list[Operand]) -> list[Tensor]:
        engine = self.engine
        guard = engine.replaying.take()
        try:
            with guard:
                needed = find_needs(wanted, self.inputs, engine)
                given = needed.lent
                for value in needed.inputs:
                    given[value] = self.inputs[value].take()
                holds = self._values_to_hold() if self.hold_on else ()
                return replay(wanted, needed, given, self.observer, holds, engine)
        finally:
            engine.replaying.give(guard)

    def _values_to_hold(self) -> set[Value]:
        return {value for reference in self.hold_on if (value := reference()) is not None}

    def borrowed(self, saved: SavedTensor) -> None:
        """Note a saved tensor that holds a tensor lent by a later region."""
        self._borrowed = (*self._borrowed, ref(saved))
        if self.observer is not None and saved.tensor is not None:
            self.observer.filled(saved, saved.tensor)

    def await_end(self, task: int) -> None:
        if self._ends_with != task:
            self._ends_with = task
            self.engine.at_end_of_pass(self._end_of_pass)

    def _end_of_pass(self) -> None:
        """Drop what was recomputed and not taken."""
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
