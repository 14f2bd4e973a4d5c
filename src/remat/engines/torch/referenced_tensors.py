"""The tensors that a function refers to: parameters and buffers of modules, and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...introspect import NOWHERE, Walk, is_library_object

__all__ = ["ReferencedTensors", "referenced_tensors"]

_LIMIT = 20_000  # objects


class ReferencedTensors(NamedTuple):
    """Tensors by name: those that gradients flow to, and those that a call may change."""

    sources: dict[str, Tensor]
    buffers: dict[str, Tensor]


def referenced_tensors(function: Callable[..., Any]) -> ReferencedTensors:
    """Find parameters, buffers and other tensors that a function refers to, each once, by name."""
    sources: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[int] = set()
    walk = Walk([function], _is_opaque, limit=_LIMIT)
    for value, place in walk:
        for path, tensor in _tensors_of(value, walk.name(place) if place is not NOWHERE else ""):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                group = sources if tensor.requires_grad else buffers
                group[path if path not in group else f"{path} ({len(seen)})"] = tensor
    return ReferencedTensors(sources, buffers)


def _is_opaque(value: Any) -> bool:
    return not isinstance(value, torch.nn.Module) and is_library_object(value)


def _tensors_of(value: Any, name: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, torch.nn.Module):
        return [*value.named_parameters(name), *value.named_buffers(name)]
    return [(name, value)] if isinstance(value, Tensor) else []
