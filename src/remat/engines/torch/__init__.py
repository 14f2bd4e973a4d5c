"""The PyTorch engine: records ops, drops what they computed, and replays them in backward."""

from .arrays import TorchArrays
from .budget.forward import set_budget
from .budget.manager import TorchBudget as Budget
from .budget.recording import record_trace
from .diagnostics.allocations import AllocationMode
from .diagnostics.verify import verify
from .gradient import value_and_grad
from .layers import choose_layers, describe_layers
from .loop import run_loop, run_while
from .modules import applied_to, apply_to, checkpointed_module, remove_from
from .scope import open_scope
from .segment import checkpoint_tensor, is_marked, mark, name_tensor, run_segment

__all__ = [
    "ARRAYS",
    "AllocationMode",
    "Budget",
    "applied_to",
    "apply_to",
    "checkpoint_tensor",
    "checkpointed_module",
    "choose_layers",
    "describe_layers",
    "is_marked",
    "mark",
    "name_tensor",
    "open_scope",
    "record_trace",
    "remove_from",
    "run_loop",
    "run_segment",
    "run_while",
    "set_budget",
    "value_and_grad",
    "verify",
]

ARRAYS = TorchArrays()
