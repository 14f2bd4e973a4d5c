"""Hugging Face Accelerate: models are checkpointed before they are prepared."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

import remat

from ..errors import RematWarning
from . import require

require("accelerate", "1.0")
from accelerate import Accelerator  # noqa: E402

__all__ = ["prepare"]


def prepare(accelerator: Accelerator, *objects: Any, **options: Any) -> Any:
    """Checkpoint the models among some objects, and return what `accelerator.prepare` does.

    Before and not after: what Accelerate puts around a model (mixed precision, DDP, FSDP) is to see
    layers that are checkpointed already.

    Args:
        accelerator: An `Accelerator`.
        objects: What `accelerator.prepare` takes: models, optimizers, data loaders, schedulers.
        options: Of `remat.apply`: `layers`, `policy`, `every`, `memory_budget`.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an Accelerator, got {type(accelerator).__name__}")
    models = [model for model in objects if isinstance(model, nn.Module)]
    if not models:
        raise ValueError("objects has no torch.nn.Module to be checkpointed")
    _warn_of_torch_checkpointing(accelerator)
    changed: list[nn.Module] = []
    try:
        for model in models:
            remat.apply(model, **options)
            changed.append(model)
        return accelerator.prepare(*objects)
    except BaseException:
        for model in changed:
            remat.remove(model)
        raise


def _warn_of_torch_checkpointing(accelerator: Any) -> None:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        warnings.warn(
            "the FSDP plugin of this Accelerator has activation_checkpointing=True, which puts "
            "torch's checkpoint around remat's: layers would be recomputed twice. Set it to False",
            RematWarning,
            stacklevel=3,
        )
