"""A checkpointed call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...segments import SegmentOptions
from .recorder import recorder_of_this_thread
from .regions import Region

__all__ = ["run_segment"]


def run_segment(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SegmentOptions,
) -> Any:
    """Call `function`, keep its inputs and forget what lies between."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    region = Region(
        options.name,
        preserve_rng_state=options.preserve_rng_state,
        room=options.threshold,
    )
    recorder = recorder_of_this_thread()
    recorder.open(region)
    try:
        return function(*args, **kwargs)
    finally:
        recorder.close(region)
