"""Hugging Face Diffusers: `enable(model)` for a UNet, a transformer or an autoencoder."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from ..errors import UnsupportedError
from . import require
from .calling import CheckpointFunction

require("diffusers", "0.32")
from diffusers import ModelMixin  # noqa: E402

__all__ = ["disable", "enable"]

M = TypeVar("M")


def enable(model: M, *, policy: Any = None, preserve_rng_state: bool = True) -> M:
    """Checkpoint the blocks of a model with remat. Return the model.

    The same as `model.enable_gradient_checkpointing(gradient_checkpointing_func=...)`: Diffusers
    itself says which blocks. `disable(model)` undoes it.

    Args:
        model: A `diffusers.ModelMixin`: the part of a pipeline that is trained.
        policy: What is kept inside of a block, see `remat.policies`.
        preserve_rng_state: As for `remat.checkpoint`.
    """
    checked: Any = _checked(model)
    if not checked._supports_gradient_checkpointing:
        raise UnsupportedError(
            f"{type(model).__name__} has no checkpointed blocks of its own; use remat.apply(model)"
        )
    accepted = inspect.signature(checked.enable_gradient_checkpointing).parameters
    if "gradient_checkpointing_func" not in accepted:
        raise UnsupportedError(
            "this version of diffusers takes no gradient_checkpointing_func; use 0.32 or newer, "
            "or remat.apply(model)"
        )
    function = CheckpointFunction(policy, preserve_rng_state)
    checked.enable_gradient_checkpointing(gradient_checkpointing_func=function)
    return model


def disable(model: M) -> M:
    """Undo `enable`. Return the model."""
    _checked(model).disable_gradient_checkpointing()
    return model


def _checked(model: Any) -> Any:
    if not isinstance(model, ModelMixin):
        raise TypeError(
            f"model must be a diffusers.ModelMixin such as pipeline.unet, got "
            f"{type(model).__name__}"
        )
    return model
