"""What the functions of a loop reach, as far as it can be found: tensors, modules, numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ....introspect import Walk
from ....loops import ClosedOverNumbers
from ..backend import without_function_modes

__all__ = ["Reach"]

_LIMIT = 20_000  # objects; what reaches more may reach anything
_NUMBERS = (int, float, complex)
_OPAQUE = (type, CodeType, Tensor, torch.dtype)


class Reach:
    """Tensors in reach that require no grad, and whether there may be more to monitor."""

    def __init__(self, functions: Sequence[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.graphs: list[Tensor] = []  # tensors with a grad_fn
        self.has_graphs = False  # or there may be some
        self.modules: list[torch.nn.Module] = []  # with buffers
        self.has_buffers = False  # or there may be some
        self.numbers = ClosedOverNumbers()
        with without_function_modes():  # an outer loop's mode would show its proxies instead
            self._search(functions)

    def _search(self, functions: Sequence[Any]) -> None:
        walk = Walk(functions, lambda value: isinstance(value, _OPAQUE), hidden=True, limit=_LIMIT)
        for value, place in walk:
            if isinstance(value, Tensor):
                self._add_tensor(value)
            elif isinstance(value, torch.nn.Module) and value._buffers:
                self.has_buffers = True
                self.modules.append(value)
            elif isinstance(value, _NUMBERS):
                # (Named now: the walk would keep alive what the program drops.)
                self.numbers.add(place, value, partial(str, walk.name(place)))
        if not walk.is_complete:
            self.has_graphs = self.has_buffers = True

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            self.has_graphs = True
            self.graphs.append(tensor)
        elif not (tensor.requires_grad or tensor.is_inference()):
            self.tensors.append(tensor)
