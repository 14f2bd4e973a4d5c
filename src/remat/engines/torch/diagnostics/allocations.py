"""Reports all tensors that the program allocates, inside and outside of regions.

Checkpointing changes what is held between forward and backward, but the peak also depends on other
allocations: gradients of parameters, which are allocated while activations are freed, gradients of
activations, activations outside of regions. They exist with and without checkpointing.

A dispatch mode sees the outputs of ops. A storage that is none of the op's inputs is new, and a
weak reference reports when it is freed. Temporary memory of a kernel is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ....loops.accounts import is_inside_a_region
from ....observers import Observer
from ..backend import is_functorch_tensor, push_dispatch_mode
from ..memory.tensors import is_plain, storage_number
from ..modes import ObservingMode
from ..recording.stacks import is_mode_on, remove_mode
from ..schema import SchemaTraits

__all__ = ["AllocationMode"]


class AllocationMode(ObservingMode):
    """Notifies an observer of what a thread allocates, from `start` to `stop`."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer
        self._living: dict[int, Any] = {}  # weak references to storages

    def ran(
        self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if not is_inside_a_region():  # loops report their own memory
            made = [tensor for tensor in _tensors(out) if _has_memory(tensor)]
            if made:
                self._note_new(made, (args, list(kwargs.values())))

    def _note_new(self, made: list[Tensor], inputs: Any) -> None:
        given = {t.untyped_storage()._cdata for t in _tensors(inputs) if _has_memory(t)}
        for tensor in made:
            storage = tensor.untyped_storage()
            number, nbytes = storage_number(storage), storage.nbytes()
            if not nbytes or number in self._living or storage._cdata in given:
                continue
            self._living[number] = ref(storage, _OnFree(self._living, number, self._observer))
            self._observer.allocated(number, nbytes)

    def start(self) -> None:
        push_dispatch_mode(self)

    def stop(self) -> None:
        """Leave this mode, wherever it is on the stack; without effect if it is not there."""
        if is_mode_on(self):
            remove_mode(self)
        self._living.clear()


class _OnFree:
    """The callback for a freed storage."""

    def __init__(self, living: dict[int, Any], number: int, observer: Observer) -> None:
        self._living, self._number, self._observer = living, number, observer

    def __call__(self, _: Any) -> None:
        self._living.pop(self._number, None)
        self._observer.freed(self._number)


def _has_memory(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.device.type != "meta" and not is_functorch_tensor(tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or the outputs of an op."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
