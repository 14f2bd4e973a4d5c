"""Loops on PyTorch: steps, captures, side effects, gradient accumulation, scans."""

from .run import run_loop, run_while

__all__ = ["run_loop", "run_while"]
