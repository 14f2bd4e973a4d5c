"""What a function keeps: modules with parameters and buffers, and tensors that it closes over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import trees

__all__ = ["Belongings", "belongings_of"]


class Belongings(NamedTuple):
    """Tensors by name: those that gradients flow to, and those that a call may change."""

    sources: dict[str, Tensor]
    buffers: dict[str, Tensor]


def belongings_of(function: Callable[..., Any]) -> Belongings:
    """Find parameters, buffers and closed-over tensors of a function, each once."""
    sources: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in _reachable(function, "", set()):
        named = [(name, value)]
        if isinstance(value, torch.nn.Module):
            named = [*value.named_parameters(name), *value.named_buffers(name)]
        for path, tensor in named:
            if isinstance(tensor, Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                (sources if tensor.requires_grad else buffers)[path] = tensor
    return Belongings(sources, buffers)


def _reachable(function: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Generate what a function refers to, and functions that it refers to, by name."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, torch.nn.Module):
        yield name, function
    elif isinstance(function, functools.partial):
        yield from _values(("args", [*function.args, *function.keywords.values()]), seen)
        yield from _reachable(function.func, name, seen)
    elif hasattr(function, "__code__"):
        owner = getattr(function, "__self__", None)
        if owner is not None:
            yield from _values(("self", owner), seen)
        code = function.__code__
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            try:
                yield from _values((free, cell.cell_contents), seen)
            except ValueError:  # a name that has no value yet
                continue
        for word in code.co_names:
            if word in function.__globals__:
                yield from _values((word, function.__globals__[word]), seen)


def _values(named: tuple[str, Any], seen: set[int]) -> Iterator[tuple[str, Any]]:
    name, value = named
    if isinstance(value, Tensor):
        yield name, value
    elif callable(value) and not isinstance(value, type):
        yield from _reachable(value, name, seen)
    elif isinstance(value, list | tuple | dict):
        for number, leaf in enumerate(trees.flatten(value)[0]):
            yield from _values((f"{name}[{number}]", leaf), seen)
