"""Notifies observers of what a region does, what it holds, and what a plain pass would hold.

Memory is counted per storage, by a number that the storage carries. Leaves are not counted:
parameters and inputs exist with and without checkpointing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, UntypedStorage

from ....observers import Observer
from ....plans import trace
from ..memory.records import Op, Operand, Origin, Value
from ..memory.tensors import is_plain, nbytes_of
from ..region import Region, SavedTensor
from ..replay import NeededOp, values_used
from ..schema import saves_its_output
from ..source_location import line_text, module_path

__all__ = ["Accounting", "ObservedTensor", "name_of", "storage_number"]

_numbers = itertools.count()


class ObservedTensor(SavedTensor):
    """A saved tensor that notifies when it is released and when it holds its tensor."""

    __slots__ = ("held_key", "observer", "plain_key", "traced_op")

    def __init__(self, operand: Operand, region: Region, observer: Accounting) -> None:
        super().__init__(operand, region)
        self.observer = observer
        self.traced_op = -1  # the number of the op that it was saved for
        self.plain_key: int | None = None  # the storage that a plain pass holds for it
        self.held_key: int | None = None  # the storage that is held for it now

    def __del__(self) -> None:
        self.observer.released(self)


class Accounting:
    """Observes one region for profilers."""

    def __init__(self, what: Any, observers: tuple[Observer, ...]) -> None:
        self._observers = [(observer, observer.region_ran(name_of(what))) for observer in observers]
        self._ops: list[trace.Op] = []
        self._paths: dict[int, str] = {}  # of modules, by id
        self._values: list[trace.Value] = []
        self._traced: dict[Value, int] = {}  # numbers of values, while the region is open
        self._saves: dict[int, dict[int, None]] = {}  # by op
        self._used: list[int] = []
        self._inputs: list[int] = []  # storages that recomputation starts from
        self._plain: set[int] = set()  # what a plain pass keeps for the region
        self._kept: dict[int, int] = {}  # what is kept instead, and its bytes
        self._alive = 0  # saved tensors
        self._live: dict[Value, int] = {}  # what the current replay holds

    def __del__(self) -> None:
        self._free_inputs()

    # -- forward -----------------------------------------------------------------------------------

    def make_saved(self, operand: Operand, region: Region) -> ObservedTensor:
        self._alive += 1
        return ObservedTensor(operand, region, self)

    def ran(self, op: Op, made: list[tuple[Value, Tensor]], seconds: float) -> None:
        reads = tuple(dict.fromkeys(self._number(value) for value in op.reads))
        for value, tensor in made:
            before = None if value.argument is None else op.overwritten(value.argument)
            self._traced[value] = len(self._values)
            self._values.append(
                trace.Value(
                    nbytes=nbytes_of(tensor),
                    made_by=len(self._ops),
                    overwrites=None if before is None else self._number(before),
                    kind=trace.Kind.COMPUTED if value.held is None else trace.Kind.FIXED,
                )
            )
        makes = tuple(self._traced[value] for value, _ in made)
        place, module = line_text(op.location), module_path(op, self._paths)
        self._ops.append(trace.Op(str(op.traits.func), reads, makes, seconds, place, module))

    def _number(self, value: Value) -> int:
        number = self._traced.get(value)
        if number is None:  # it was computed before the region
            number = self._traced[value] = len(self._values)
            held = value.held
            nbytes = 0 if held is None else nbytes_of(held.tensor)
            is_parameter = value.origin is Origin.PARAMETER
            kind = trace.Kind.PARAMETER if is_parameter else trace.Kind.INPUT
            self._values.append(trace.Value(nbytes, kind=kind))
        return number

    def ran_in_backward(self, out: Any) -> None:
        """Not counted here: it exists with and without checkpointing."""

    def saved(self, saved: ObservedTensor, tensor: Tensor) -> None:
        """Autograd has saved a tensor."""
        saved.traced_op = self._note_saved(self._number(saved.value))
        if saved.value.is_leaf:
            return
        saved.plain_key = _key(tensor)
        nbytes = nbytes_of(tensor)
        is_new = saved.plain_key not in self._plain
        self._plain.add(saved.plain_key)
        for observer, number in self._observers:
            observer.would_hold(saved.plain_key, nbytes)
            if is_new:
                observer.kept(number, plain=nbytes)
        if saved.tensor is not None or saved.value.held is not None:
            self.got(saved, tensor)
            self._kept[saved.plain_key] = nbytes

    def _note_saved(self, value: int) -> int:
        """Return the op that a value is saved for: the next op, or the last one for its own result.

        Autograd saves inputs before an op runs and outputs after it, each once for an op.
        """
        op = len(self._ops)
        if (
            op
            and self._values[value].made_by == op - 1
            and value not in self._saves.get(op - 1, {})
        ):
            last = self._ops[-1]
            if value != last.makes[0] or saves_its_output(last.name):
                op -= 1
        self._saves.setdefault(op, {})[value] = None
        return op

    def closed(self, region: Region) -> None:
        """The region was closed: send its trace and what its recomputation starts from."""
        self._send_trace()
        self._traced.clear()
        wanted = [saved.operand for saved in region.living()]
        for value in values_used(wanted):
            if value.held is not None and not value.is_leaf:
                key, nbytes = _key(value.held.tensor), nbytes_of(value.held.tensor)
                self._inputs.append(key)
                self._kept[key] = nbytes
                self._holds(key, nbytes)
        for observer, number in self._observers:
            observer.kept(number, held=sum(self._kept.values()))

    # -- backward ----------------------------------------------------------------------------------

    def got(self, saved: ObservedTensor, tensor: Tensor) -> None:
        """A saved tensor holds its tensor."""
        self.lost(saved)
        saved.held_key = _key(tensor)
        self._holds(saved.held_key, nbytes_of(tensor))

    def lost(self, saved: ObservedTensor) -> None:
        """A saved tensor no longer holds its tensor."""
        if saved.held_key is not None:
            self._frees(saved.held_key)
            saved.held_key = None

    def used(self, saved: ObservedTensor) -> None:
        """Autograd has unpacked a saved tensor."""
        self._used.append(saved.traced_op)

    def released(self, saved: ObservedTensor) -> None:
        """Autograd has released a saved tensor."""
        self.lost(saved)
        if saved.plain_key is not None:
            for observer, _ in self._observers:
                observer.would_free(saved.plain_key)
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
            key = self._live[value] = _key(values[value])
            self._holds(key, nbytes_of(values[value]))

    def replayed(self, ops: list[NeededOp], seconds: float) -> None:
        """A replay has ended; what is left of it belongs to saved tensors."""
        for observer, number in self._observers:
            observer.recomputed(number, len(ops), seconds)

    def handed_over(self) -> None:
        self.replaying({})

    def end_of_pass(self) -> None:
        self._send_trace()

    def _send_trace(self) -> None:
        for value in self._saves.pop(len(self._ops), {}):  # for an op that never came
            made_by = self._values[value].made_by
            if made_by is not None:
                self._saves.setdefault(made_by, {})[value] = None
        ops = [
            replace(op, saves=tuple(self._saves.get(number, ())))
            for number, op in enumerate(self._ops)
        ]
        sent = trace.Trace(tuple(ops), tuple(self._values), tuple(self._used))
        for observer, number in self._observers:
            observer.traced(number, sent)

    def _holds(self, key: int, nbytes: int) -> None:
        for observer, _ in self._observers:
            observer.holds(key, nbytes)

    def _frees(self, key: int) -> None:
        for observer, _ in self._observers:
            observer.frees(key)


def name_of(what: Any) -> str:
    """Return the name of a region: text, or the name of its function."""
    return what if isinstance(what, str) else getattr(what, "__qualname__", type(what).__name__)


def _key(tensor: Tensor) -> int:
    """Return the number of a tensor's storage, by which memory is counted."""
    if not is_plain(tensor):
        return -id(tensor)
    return storage_number(tensor.untyped_storage())


def storage_number(storage: UntypedStorage) -> int:
    """Return the unique number of a storage."""
    number: int | None = getattr(storage, "_remat_number", None)
    if number is None:
        number = storage._remat_number = next(_numbers)  # type: ignore[attr-defined]
    return number
