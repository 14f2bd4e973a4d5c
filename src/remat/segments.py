"""What engines are told of a segment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SegmentOptions"]


@dataclass(frozen=True, slots=True)
class SegmentOptions:
    """How a call is to be checkpointed."""

    preserve_rng_state: bool = True
    threshold: int | None = None  # hold everything if that takes no more bytes than this
    name: str = ""
