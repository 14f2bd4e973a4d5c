"""Tells an observer of all tensors that the program allocates, in regions and outside of them.

Checkpointing changes what is held between forward and backward, but where the peak lies depends on
everything else that comes and goes in the meantime: gradients of parameters that are allocated
while activations are freed, gradients of activations, activations outside of regions. They are
there with and without checkpointing.

A dispatch mode sees what ops return; a storage that is none of the op's inputs is new, and a weak
reference tells when it is freed. What a kernel allocates for itself while it runs is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....loops.accounts import is_inside_a_region
from ....observers import Observer
from ..backend import (
    dispatch_mode_stack,
    is_functorch_tensor,
    pop_dispatch_mode,
    push_dispatch_mode,
)
from ..memory.tensors import is_plain
from .accounting import storage_number

__all__ = ["track_allocations"]


def track_allocations(observer: Observer) -> Callable[[], None]:
    """Tell an observer what this thread allocates from now on; return what ends that."""
    tracker = _AllocationTracker(observer)
    push_dispatch_mode(tracker)
    return tracker.stop


class _AllocationTracker(TorchDispatchMode):
    remat_looks_on = True

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer
        self._living: dict[int, Any] = {}  # weak references to storages

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each op would pass through a wrapper that switches the compiler off

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled; what it makes is not seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not is_inside_a_region():  # loops tell what they hold by themselves
            made = [tensor for tensor in _tensors(out) if _has_memory(tensor)]
            if made:
                self._note_new(made, (args, list((kwargs or {}).values())))
        return out

    def _note_new(self, made: list[Tensor], inputs: Any) -> None:
        given = {t.untyped_storage().data_ptr() for t in _tensors(inputs) if _has_memory(t)}
        for tensor in made:
            storage = tensor.untyped_storage()
            number, nbytes = storage_number(storage), storage.nbytes()
            if not nbytes or number in self._living or storage.data_ptr() in given:
                continue
            self._living[number] = ref(storage, _OnFree(self._living, number, self._observer))
            self._observer.allocated(number, nbytes)

    def stop(self) -> None:
        """Take this mode off the stack; those that the program has entered since stay on."""
        self._living.clear()
        if self not in dispatch_mode_stack():
            return
        above = []
        while (mode := pop_dispatch_mode(None)) is not self:
            above.append(mode)
        for mode in reversed(above):
            push_dispatch_mode(mode)


class _OnFree:
    """What is called when a storage is freed."""

    def __init__(self, living: dict[int, Any], number: int, observer: Observer) -> None:
        self._living, self._number, self._observer = living, number, observer

    def __call__(self, _: Any) -> None:
        self._living.pop(self._number, None)
        self._observer.freed(self._number)


def _has_memory(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.device.type != "meta" and not is_functorch_tensor(tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments, or the results, of an op."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
