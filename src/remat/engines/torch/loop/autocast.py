"""Autocast as it was when a loop began."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

__all__ = ["AutocastState"]


class AutocastState:
    """Autocast around a loop: steps that are run again need the same.

    The cache of weights that were cast is switched off: a cast made in one step would be part of
    the graphs of all others.
    """

    def __init__(self) -> None:
        self._casts = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _devices()
        ]
        self._stack = ExitStack()

    def __enter__(self) -> None:
        stack = ExitStack()
        for device, is_enabled, dtype in self._casts:
            if is_enabled or torch.is_autocast_enabled(device):
                cast = torch.autocast(device, dtype, is_enabled, cache_enabled=False)
                stack.enter_context(cast)
        self._stack = stack

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
