"""What the functions of a loop reach: closures, globals, what lies in objects.

It is a guess at what they use, good enough to know what to look out for.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .backend import without_function_modes
from .numbers import Numbers

__all__ = ["Reach"]

_FAR = 20_000  # objects; who reaches more may reach anything


class Reach:
    """Tensors in reach that require no grad, and whether there is more to look out for."""

    def __init__(self, functions: Sequence[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.graphs: list[Tensor] = []  # that are parts of graphs
        self.has_graphs = False  # or there may be some
        self.modules: list[torch.nn.Module] = []  # that have buffers
        self.has_buffers = False  # or there may be some
        self.numbers = Numbers()
        with without_function_modes():  # of a loop around this one: it would show leaves instead
            self._search(functions)

    def _search(self, functions: Sequence[Any]) -> None:
        seen: set[int] = set()
        stack = list(functions)
        while stack:
            value = stack.pop()
            if id(value) in seen or isinstance(value, _NOTHING_INSIDE):
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                self._meet(value)
            elif len(seen) > _FAR:
                self.has_graphs = self.has_buffers = True
                return
            else:
                if isinstance(value, torch.nn.Module) and value._buffers:
                    self.has_buffers = True
                    self.modules.append(value)
                code = getattr(value, "__code__", None)
                self.numbers.look_into(value, _names(code) if code else ())
                stack += _referents(value)

    def _meet(self, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            self.has_graphs = True
            self.graphs.append(tensor)
        elif not (tensor.requires_grad or tensor.is_inference()):
            self.tensors.append(tensor)


_NOTHING_INSIDE = (type, str, bytes, int, float, complex, ModuleType, CodeType, torch.dtype)


def _referents(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        names = list(_names(value.__code__))
        found = [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
        for name in names:
            named = value.__globals__.get(name)
            if isinstance(named, ModuleType):  # of what a module holds, what the code may ask for
                found += [vars(named)[n] for n in names if n in vars(named)]
            else:
                found.append(named)
        return found
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return gc.get_referents(value)


def _names(code: CodeType) -> Iterator[str]:
    """Generate the names of globals and attributes in a function, and in those inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
