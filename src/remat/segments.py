"""Options of a checkpointed call, as engines get them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ContextPolicy", "SegmentOptions"]


@dataclass(frozen=True, slots=True)
class SegmentOptions:
    """How a call is to be checkpointed."""

    preserve_rng_state: bool = True
    threshold: int | None = None  # keep everything if that takes no more bytes than this
    name: str = ""
    policy: Any = None  # what is kept inside: one of remat.policies, or what the engine accepts


@dataclass(frozen=True, slots=True)
class ContextPolicy:
    """A policy that is inside of what torch's `checkpoint` takes as `context_fn`."""

    context_fn: Callable[[], Any]
