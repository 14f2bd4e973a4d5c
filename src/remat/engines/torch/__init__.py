"""The PyTorch engine: record ops, forget what they made, and replay them on the way back."""

from .segment import run_segment

__all__ = ["run_segment"]
