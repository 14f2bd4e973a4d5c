"""timm: `enable(model)`.

timm needs torchvision to be imported, which the tests do not install: they use a stand-in. timm
1.0.31 was run by hand (ViT, ResNet, Swin, ConvNeXt, EfficientNet, Mixer, BEiT).
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

import remat

from ..errors import UnsupportedError
from . import require

require("timm", "0.9")

__all__ = ["disable", "enable"]

M = TypeVar("M", bound=nn.Module)


def enable(model: M, **options: Any) -> M:
    """Checkpoint the blocks of a model with remat. Return the model.

    timm's own checkpointing takes no function, so it is switched off
    (`set_grad_checkpointing(False)`), and `remat.apply` finds the blocks. `disable(model)` undoes
    it.

    Args:
        model: A model of timm.
        options: Of `remat.apply`: `layers`, `policy`, `every`, `memory_budget`.
    """
    switch = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        raise UnsupportedError(
            f"{type(model).__name__} is no model of timm: it has no set_grad_checkpointing; use "
            "remat.apply(model)"
        )
    remat.apply(model, **options)
    switch(False)
    return model


def disable(model: M) -> M:
    """Undo `enable`. Return the model."""
    return remat.remove(model)
