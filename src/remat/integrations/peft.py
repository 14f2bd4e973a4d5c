"""Hugging Face PEFT: adapters on a frozen base, with remat's checkpointing."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from . import require, transformers
from .transformers import disable, enable

require("peft", "0.10")
from peft import prepare_model_for_kbit_training as _prepare  # noqa: E402

__all__ = ["disable", "enable", "prepare_model_for_kbit_training"]

M = TypeVar("M", bound=nn.Module)


def prepare_model_for_kbit_training(model: M, *, policy: Any = None, every: int = 1) -> M:
    """Do as PEFT's function of this name does, with remat's checkpointing. Return the model.

    The base is frozen and its other parameters are cast to float32. Inputs need not require grad:
    remat finds adapters inside of the layers.
    """
    transformers.pretrained_model_in(model)
    prepared: M = _prepare(model, use_gradient_checkpointing=False)
    return enable(prepared, policy=policy, every=every)
