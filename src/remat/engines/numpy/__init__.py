"""The embedded default: NumPy arrays on the derivative rules of HIPS autograd."""

from . import rules  # noqa: F401  (importing it is what registers them)
from .arrays import NumpyArrays
from .budget import NumpyBudget as Budget
from .budget import enter_budget, record_trace, run_within, set_budget
from .gradient import value_and_grad
from .loop import run_loop, run_while
from .scope import checkpoint_tensor, close_scope, is_marked, mark, name_tensor, open_scope
from .segment import run_segment
from .tape import is_tracing
from .verify import verify

__all__ = [
    "ARRAYS",
    "Budget",
    "checkpoint_tensor",
    "close_scope",
    "enter_budget",
    "is_marked",
    "is_tracing",
    "mark",
    "name_tensor",
    "open_scope",
    "record_trace",
    "run_loop",
    "run_segment",
    "run_while",
    "run_within",
    "set_budget",
    "value_and_grad",
    "verify",
]

ARRAYS = NumpyArrays()
