"""Writes that do not increase version counters, and how they are detected.

- Fused optimizers write to parameters. A hook after each step counts these writes. (It also marks
  the end of a training iteration.)
- `Tensor.apply_`, `map_` and `map2_` write without the dispatcher, and memory that was exported
  through DLPack can be written to by other libraries. Wrappers around these methods note it.

Writes through a raw pointer (`data_ptr()`, storages) cannot be detected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .tensors import is_plain

__all__ = [
    "install_hooks",
    "is_exposed",
    "on_direct_write",
    "on_optimizer_step",
    "optimizer_steps_of",
]

on_direct_write: list[Callable[[Tensor], None]] = []  # called before such a write
on_optimizer_step: list[Callable[[], None]] = []  # called after the step of any optimizer
_has_stepped: list[bool] = []  # a fused optimizer


def optimizer_steps_of(parameter: Tensor) -> int:
    """Return how many steps of fused optimizers have written to a parameter.

    Its storage carries the number. A weak reference to the parameter would be in the way of
    `torch.utils.swap_tensors`.
    """
    if not _has_stepped or not is_plain(parameter):
        return 0
    return getattr(parameter.untyped_storage(), "_remat_steps", 0)


def is_exposed(storage: Any) -> bool:
    """Return whether a storage was exported through DLPack."""
    return getattr(storage, "_remat_exposed", False)


@functools.cache
def install_hooks() -> None:
    """Install the hooks and wrappers, once per process."""
    register_optimizer_step_post_hook(_after_step)
    for name in ("apply_", "map_", "map2_"):
        _wrap(name, _before_direct_write)
    _wrap("__dlpack__", _before_export)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for notify in on_optimizer_step:
        notify()
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                if parameter.grad is not None and is_plain(parameter):
                    steps = optimizer_steps_of(parameter)
                    parameter.untyped_storage()._remat_steps = steps + 1
                    _has_stepped[:] = [True]


def _wrap(name: str, before: Callable[[Tensor], None]) -> None:
    method = getattr(Tensor, name)

    @functools.wraps(method)
    def noted(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        before(self)
        return method(self, *args, **kwargs)

    setattr(Tensor, name, noted)


def _before_direct_write(tensor: Tensor) -> None:
    for notify in on_direct_write:
        notify(tensor)


def _before_export(tensor: Tensor) -> None:
    if tensor.layout is torch.strided:
        tensor.untyped_storage()._remat_exposed = True  # type: ignore[attr-defined]
    _before_direct_write(tensor)
