"""Random numbers: which generator an op draws from, and how to draw the same again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["generator_of"]


def generator_of(args: Iterable[Any], kwargs: dict[str, Any]) -> torch.Generator:
    """Return the generator of a call: the one that it was given, or its device's own."""
    values = [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, torch.Generator):
            return value
    for value in values:
        if isinstance(value, Tensor):
            return _of_device(value.device)
    return _of_device(torch.device(kwargs.get("device") or "cpu"))


def _of_device(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
