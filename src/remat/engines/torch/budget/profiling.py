"""What profilers are told of a pass under a budget: what it holds, and what it recomputes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor

from ....observers import Observer
from ..diagnostics.accounting import Accounting, ObservedTensor, storage_number
from ..memory.records import Operand
from ..memory.tensors import is_plain
from ..region import Region
from ..replay import values_used

__all__ = ["ObservedNodeTensor", "PassAccounting"]


class ObservedNodeTensor(ObservedTensor):
    """A saved tensor that is observed, and knows the op for whose backward it is saved."""

    __slots__ = ("node",)

    def __init__(self, operand: Operand, region: Region, accounting: Accounting, node: int) -> None:
        super().__init__(operand, region, accounting)
        self.node = node


class PassAccounting(Accounting):
    """Observes all stages of a pass as one region."""

    def __init__(self, what: Any, observers: tuple[Observer, ...]) -> None:
        super().__init__(what, observers)
        self._watched: dict[int, ref[Any]] = {}  # storages that are kept, by number

    def make_saved_for(self, operand: Operand, region: Region, node: int) -> ObservedNodeTensor:
        self._alive += 1
        return ObservedNodeTensor(operand, region, self, node)

    def ended_forward(self, stages: Iterable[Region]) -> None:
        """Tell what is kept from forward to backward, until its memory is freed."""
        self._send_trace()
        self._traced.clear()
        wanted = [saved.operand for stage in stages for saved in stage.living()]
        for value in values_used(wanted):
            if value.held is not None and not value.is_leaf and is_plain(value.held.tensor):
                self._keep(value.held.tensor)
        for observer, number in self._observers:
            observer.kept(number, held=sum(self._kept.values()))

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_number(storage)
        if key not in self._watched:
            self._kept[key] = storage.nbytes()
            self._inputs.append(key)
            self._watched[key] = ref(storage, partial(_freed, ref(self), key))
            self._holds(key, storage.nbytes())

    def freed(self, key: int) -> None:
        """What was kept has been freed."""
        if key in self._inputs:  # or all saved tensors are gone, and nothing counts any more
            self._inputs.remove(key)
            self._frees(key)


def _freed(accounting: ref[PassAccounting], key: int, _: Any) -> None:
    if (counting := accounting()) is not None:
        counting.freed(key)
