"""The embedded default: NumPy arrays on the derivative rules of HIPS autograd."""

from . import rules  # noqa: F401  (importing it is what registers them)
from .arrays import NumpyArrays
from .gradient import value_and_grad
from .loop import run_loop, run_while
from .segment import checkpoint_tensor, run_segment
from .verifying import verify

__all__ = [
    "ARRAYS",
    "checkpoint_tensor",
    "run_loop",
    "run_segment",
    "run_while",
    "value_and_grad",
    "verify",
]

ARRAYS = NumpyArrays()
