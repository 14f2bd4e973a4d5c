"""Tells profilers what a region does, what it holds, and what a plain pass would hold.

Memory is counted per storage, under a number that the storage carries. Leaves are left out:
parameters and inputs are there with and without checkpointing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

from torch import Tensor

from ....plans import trace
from ....watching import Watcher
from ..memory.records import Op, Operand, Origin, Value
from ..memory.tensors import is_plain, nbytes_of
from ..region import Region, SavedTensor
from ..replay import NeededOp, find_needs
from ..source_location import describe

__all__ = ["Accounting", "ObservedTensor", "name_of"]

_numbers = itertools.count()


class ObservedTensor(SavedTensor):
    """A saved tensor that tells when it is released, and when its tensor is there."""

    __slots__ = ("held_key", "observer", "plain_key", "traced_op")

    def __init__(self, operand: Operand, region: Region, observer: Accounting) -> None:
        super().__init__(operand, region)
        self.observer = observer
        self.traced_op = -1  # the number of the op that it was saved for
        self.plain_key: int | None = None  # the memory that a plain pass holds for it, if any
        self.held_key: int | None = None  # the memory that is held for it now, if any

    def __del__(self) -> None:
        self.observer.released(self)


class Accounting:
    """Observes one region for profilers."""

    def __init__(self, what: Any, watchers: tuple[Watcher, ...]) -> None:
        self._watchers = [(watcher, watcher.region_ran(name_of(what))) for watcher in watchers]
        self._ops: list[trace.Op] = []
        self._values: list[trace.Value] = []
        self._traced: dict[Value, int] = {}  # numbers of values, as long as the region is open
        self._saves: dict[int, dict[int, None]] = {}  # by op
        self._used: list[int] = []
        self._inputs: list[int] = []  # what the region starts from
        self._alive = 0  # saved tensors
        self._live: dict[Value, int] = {}  # what a replay holds at this time
        self._gradients: dict[int, Any] = {}  # hooks of parameters without a gradient yet

    def __del__(self) -> None:
        self._free_inputs()
        for hook in self._gradients.values():
            hook.remove()

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
        place = describe(op.place, with_module=False)
        self._ops.append(trace.Op(str(op.traits.func), reads, makes, seconds, place))

    def _number(self, value: Value) -> int:
        number = self._traced.get(value)
        if number is None:  # it was there before the region
            number = self._traced[value] = len(self._values)
            held = value.held
            nbytes = 0 if held is None else nbytes_of(held.tensor)
            is_parameter = value.origin is Origin.PARAMETER
            kind = trace.Kind.PARAMETER if is_parameter else trace.Kind.INPUT
            self._values.append(trace.Value(nbytes, kind=kind))
            if is_parameter and held is not None:
                self._expect_gradient(held.tensor)
        return number

    def _expect_gradient(self, parameter: Tensor) -> None:
        """Count the gradient of a parameter from when it is allocated: with and without us."""
        if parameter.grad is None and id(parameter) not in self._gradients:
            hook = _OnGradient(ref(self), id(parameter))
            register = parameter.register_post_accumulate_grad_hook
            self._gradients[id(parameter)] = register(hook)

    def gradient_came(self, parameter: Tensor, key: int) -> None:
        hook = self._gradients.pop(key, None)
        if hook is not None and parameter.grad is not None:
            hook.remove()
            for watcher, _ in self._watchers:
                watcher.would_hold(("gradient", key), nbytes_of(parameter.grad))
                watcher.holds(("gradient", key), nbytes_of(parameter.grad))

    def ran_in_backward(self, out: Any) -> None:
        """What a backward pass makes is there with and without checkpointing."""

    def saved(self, saved: ObservedTensor, tensor: Tensor) -> None:
        """Autograd has got a saved tensor."""
        saved.traced_op = self._note_saved(self._number(saved.value))
        if saved.value.is_leaf:
            return
        saved.plain_key = _key(tensor)
        for watcher, _ in self._watchers:
            watcher.would_hold(saved.plain_key, nbytes_of(tensor))
        if saved.tensor is not None or saved.value.held is not None:
            self.got(saved, tensor)

    def _note_saved(self, value: int) -> int:
        """Return the op that a value is saved for: the last, if it made it; else the next.

        Autograd saves inputs before an op runs and results after it. What the last op has made and
        autograd saves once counts as its result.
        """
        last = len(self._ops) - 1
        is_result = self._values[value].made_by == last
        op = last if is_result and value not in self._saves.get(last, {}) else last + 1
        self._saves.setdefault(op, {})[value] = None
        return op

    def closed(self, region: Region) -> None:
        """The region is at its end: tell what it did, and what it holds to start from."""
        self._tell_trace()
        self._traced.clear()
        wanted = [saved.operand for saved in region.living()]
        for value in find_needs(wanted, {}).uses:
            if value.held is not None and not value.is_leaf:
                key = _key(value.held.tensor)
                self._inputs.append(key)
                self._holds(key, nbytes_of(value.held.tensor))

    # -- backward ----------------------------------------------------------------------------------

    def got(self, saved: ObservedTensor, tensor: Tensor) -> None:
        """A saved tensor has its tensor."""
        self.lost(saved)
        saved.held_key = _key(tensor)
        self._holds(saved.held_key, nbytes_of(tensor))

    def lost(self, saved: ObservedTensor) -> None:
        """A saved tensor has its tensor no longer."""
        if saved.held_key is not None:
            self._frees(saved.held_key)
            saved.held_key = None

    def used(self, saved: ObservedTensor) -> None:
        """Autograd has asked for a tensor."""
        self._used.append(saved.traced_op)

    def released(self, saved: ObservedTensor) -> None:
        """Autograd has released a saved tensor."""
        self.lost(saved)
        if saved.plain_key is not None:
            for watcher, _ in self._watchers:
                watcher.would_free(saved.plain_key)
        self._alive -= 1
        if not self._alive:  # nobody needs the inputs any more
            self._free_inputs()

    def _free_inputs(self) -> None:
        inputs, self._inputs = self._inputs, []
        for key in inputs:
            self._frees(key)

    def replaying(self, values: Mapping[Value, Tensor]) -> None:
        """Tell what a replay holds now."""
        for value in self._live.keys() - values.keys():
            self._frees(self._live.pop(value))
        for value in values.keys() - self._live.keys():
            key = self._live[value] = _key(values[value])
            self._holds(key, nbytes_of(values[value]))

    def replayed(self, ops: list[NeededOp], seconds: float) -> None:
        """A replay is done; what is left of it belongs to saved tensors now."""
        for watcher, number in self._watchers:
            watcher.recomputed(number, len(ops), seconds)

    def handed_over(self) -> None:
        self.replaying({})

    def end_of_pass(self) -> None:
        self._tell_trace()

    def _tell_trace(self) -> None:
        ops = [
            replace(op, saves=tuple(self._saves.get(number, ())))
            for number, op in enumerate(self._ops)
        ]
        told = trace.Trace(tuple(ops), tuple(self._values), tuple(self._used))
        for watcher, number in self._watchers:
            watcher.traced(number, told)

    def _holds(self, key: int, nbytes: int) -> None:
        for watcher, _ in self._watchers:
            watcher.holds(key, nbytes)

    def _frees(self, key: int) -> None:
        for watcher, _ in self._watchers:
            watcher.frees(key)


class _OnGradient:
    """A hook of a parameter that does not keep the accounting alive."""

    def __init__(self, accounting: ref[Accounting], key: int) -> None:
        self._accounting = accounting
        self._key = key

    def __call__(self, parameter: Tensor) -> None:
        accounting = self._accounting()
        if accounting is not None:
            accounting.gradient_came(parameter, self._key)


def name_of(what: Any) -> str:
    """Return the name of a region: text, or that of the function that it is of."""
    return what if isinstance(what, str) else getattr(what, "__qualname__", type(what).__name__)


def _key(tensor: Tensor) -> int:
    """Return the number of a tensor's storage, under which its memory is counted."""
    if not is_plain(tensor):
        return -id(tensor)
    storage = tensor.untyped_storage()
    number: int | None = getattr(storage, "_remat_number", None)
    if number is None:
        number = storage._remat_number = next(_numbers)  # type: ignore[attr-defined]
    return number
