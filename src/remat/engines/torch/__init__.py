"""The PyTorch engine: record ops, forget what they made, and replay them on the way back."""

from .arrays import TorchArrays
from .gradient import value_and_grad
from .loop import run_loop, run_while
from .scope import close_scope, open_scope
from .segment import checkpoint_tensor, is_marked, mark, run_segment
from .verify import verify

__all__ = [
    "ARRAYS",
    "checkpoint_tensor",
    "close_scope",
    "is_marked",
    "mark",
    "open_scope",
    "run_loop",
    "run_segment",
    "run_while",
    "value_and_grad",
    "verify",
]

ARRAYS = TorchArrays()
