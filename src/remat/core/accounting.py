"""Notifies observers of what a region does, what it holds, and what a plain pass would hold.

Memory is counted by the engine's key for it. Leaves are not counted: parameters and inputs exist
with and without checkpointing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Any
from weakref import ref

from ..observers import Observer
from .engine import Engine, Memory, NeededOp
from .records import Made, Op, Value
from .region import Region, SavedTensor
from .replay import values_used
from .tracing import OpFacts, Tracer, key_of

__all__ = ["Accounting", "PassAccounting", "name_of"]

Tensor = Any  # an array of the engine


class Watch:
    """Belongs to a saved tensor that is observed: notifies when that is released."""

    __slots__ = ("accounting", "held", "plain")

    def __init__(self, accounting: Accounting) -> None:
        self.accounting = accounting
        self.plain: Hashable = None  # the memory that a plain pass holds for it
        self.held: Hashable = None  # the memory that is held for it now

    def __del__(self) -> None:
        self.accounting.released(self)


class Accounting:
    """Observes one region for profilers."""

    def __init__(
        self, what: Any, observers: tuple[Observer, ...], engine: Engine, facts: OpFacts
    ) -> None:
        self._engine = engine
        self._observers = [(observer, observer.region_ran(name_of(what))) for observer in observers]
        self._tracer = Tracer(engine, facts)
        self._inputs: list[Hashable] = []  # memory that recomputation starts from
        self._plain: set[Hashable] = set()  # what a plain pass keeps for the region
        self._kept: dict[Hashable, int] = {}  # what is kept instead, and its bytes
        self._watched: dict[Hashable, ref[Any]] = {}  # memory that is kept
        self._alive = 0  # saved tensors
        self._live: dict[Value, Hashable] = {}  # what the current replay holds

    def __del__(self) -> None:
        self._free_inputs()

    # -- forward -----------------------------------------------------------------------------------

    def ran(self, op: Op, made: Made, seconds: float, *, has_grad: bool) -> None:
        key = key_of(op, made, self._engine)
        self._tracer.ran(op, made, seconds, key, has_grad=has_grad)

    def ran_in_backward(self, out: Iterable[Tensor]) -> None:
        """Not counted here: it exists with and without checkpointing."""

    def saves(self, saved: SavedTensor) -> None:
        self.watch(saved)
        saved.node = self._tracer.saved_for(saved.value)

    def watch(self, saved: SavedTensor) -> None:
        self._alive += 1
        saved.watch = Watch(self)

    def saved(self, saved: SavedTensor, tensor: Tensor) -> None:
        self._tracer.saved(saved.value, max(saved.node, 0), saved)
        self.counts(saved, tensor)

    def counts(self, saved: SavedTensor, tensor: Tensor) -> None:
        """Count what a plain pass would hold for a saved tensor, and what is held."""
        value, watch = saved.value, saved.watch
        if value.is_leaf or not isinstance(watch, Watch):
            return
        key, nbytes = self._memory(tensor)
        watch.plain = key
        is_new = key not in self._plain
        self._plain.add(key)
        for observer, number in self._observers:
            observer.would_hold(key, nbytes)
            if is_new:
                observer.kept(number, plain=nbytes)
        if saved.tensor is not None or value.held is not None:
            self.filled(saved, tensor)
            self._kept[key] = nbytes

    def _memory(self, tensor: Tensor) -> tuple[Hashable, int]:
        """Return the memory of a tensor, by a key, and its bytes."""
        memory = self._engine.memory(tensor)
        if memory is None:
            return -id(tensor), self._engine.nbytes(tensor)
        return memory.key, memory.nbytes

    def closed(self, region: Region) -> None:
        """The region was closed: send its trace and what its recomputation starts from."""
        self._tracer.end_forward()
        self._send_trace()
        self._keep_inputs(region.living())

    def _keep_inputs(self, saved: Iterable[SavedTensor]) -> None:
        """Count what is held from forward to backward, until its memory is freed."""
        for value in values_used([each.operand for each in saved], self._engine):
            if value.held is not None and not value.is_leaf:
                memory = self._engine.memory(value.held.tensor)
                if memory is not None and memory.key not in self._watched:
                    self._keep(memory)
        self._report_kept()

    def _keep(self, memory: Memory) -> None:
        key, owner, nbytes = memory
        self._kept[key] = nbytes
        self._inputs.append(key)
        self._watched[key] = ref(owner, partial(_freed, ref(self), key))
        self._holds(key, nbytes)

    def freed(self, key: Hashable) -> None:
        """What was kept has been freed."""
        if key in self._inputs:  # or all saved tensors are gone, and nothing counts any more
            self._inputs.remove(key)
            self._frees(key)

    def _report_kept(self) -> None:
        for observer, number in self._observers:
            observer.kept(number, held=sum(self._kept.values()))

    # -- backward ----------------------------------------------------------------------------------

    def filled(self, saved: SavedTensor, tensor: Tensor) -> None:
        watch = saved.watch
        if isinstance(watch, Watch):
            self._lost(watch)
            watch.held, nbytes = self._memory(tensor)
            self._holds(watch.held, nbytes)

    def emptied(self, saved: SavedTensor) -> None:
        if isinstance(saved.watch, Watch):
            self._lost(saved.watch)

    def _lost(self, watch: Watch) -> None:
        if watch.held is not None:
            self._frees(watch.held)
            watch.held = None

    def used(self, saved: SavedTensor) -> None:
        self._tracer.used(saved.node)

    def released(self, watch: Watch) -> None:
        """A saved tensor was released."""
        self._lost(watch)
        if watch.plain is not None:
            for observer, _ in self._observers:
                observer.would_free(watch.plain)
        self._alive -= 1
        if not self._alive:  # the inputs are no longer needed
            self._free_inputs()

    def _free_inputs(self) -> None:
        inputs, self._inputs = self._inputs, []
        for key in inputs:
            self._frees(key)

    def replaying(self, values: Mapping[Value, Tensor]) -> None:
        """Notify of what a replay holds now."""
        for value in self._live.keys() - values.keys():
            self._frees(self._live.pop(value))
        for value in values.keys() - self._live.keys():
            key, nbytes = self._memory(values[value])
            self._live[value] = key
            self._holds(key, nbytes)

    def replayed(self, ops: list[NeededOp], seconds: float) -> None:
        """A replay has ended; what is left of it belongs to saved tensors."""
        for observer, number in self._observers:
            observer.recomputed(number, len(ops), seconds)

    def handed_over(self) -> None:
        self.replaying({})

    def end_of_pass(self) -> None:
        self._send_trace()

    def _send_trace(self) -> None:
        if self._observers:
            sent = self._tracer.trace()
            for observer, number in self._observers:
                observer.traced(number, sent)

    def _holds(self, key: Hashable, nbytes: int) -> None:
        for observer, _ in self._observers:
            observer.holds(key, nbytes)

    def _frees(self, key: Hashable) -> None:
        for observer, _ in self._observers:
            observer.frees(key)


class PassAccounting(Accounting):
    """Observes all stages of a pass under a budget as one region, with the tracer of the pass."""

    def __init__(
        self,
        what: Any,
        observers: tuple[Observer, ...],
        engine: Engine,
        facts: OpFacts,
        tracer: Tracer,
    ) -> None:
        super().__init__(what, observers, engine, facts)
        self._tracer = tracer

    def ended_forward(self, stages: Iterable[Region]) -> None:
        """The forward part of the pass is over."""
        self._send_trace()
        self._keep_inputs(saved for stage in stages for saved in stage.living())


def _freed(accounting: ref[Accounting], key: Hashable, _: Any) -> None:
    if (counting := accounting()) is not None:
        counting.freed(key)


def name_of(what: Any) -> str:
    """Return the name of a region: text, or the name of its function."""
    return what if isinstance(what, str) else getattr(what, "__qualname__", type(what).__name__)
