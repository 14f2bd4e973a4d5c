"""The embedded default: NumPy arrays on the derivative rules of HIPS autograd."""

from . import rules  # noqa: F401  (importing it is what registers them)
from .arrays import NumpyArrays
from .budget import NumpyBudget as Budget
from .budget import record_trace
from .gradient import value_and_grad
from .loop import run_loop, run_while
from .scope import checkpoint_tensor, is_marked, mark, name_tensor, open_scope
from .segment import run_segment
from .tape import is_tracing
from .verify import verify

__all__ = [
    "ARRAYS",
    "Budget",
    "checkpoint_tensor",
    "is_marked",
    "is_tracing",
    "mark",
    "name_tensor",
    "open_scope",
    "record_trace",
    "run_loop",
    "run_segment",
    "run_while",
    "value_and_grad",
    "verify",
]

ARRAYS = NumpyArrays()
