"""remat: exact gradients inside a memory budget."""

from . import policies
from .api.apply import applied, apply, remove
from .api.budgets import CheckpointManager, auto_checkpoint
from .api.chains import ActivationCheckpointer, CheckpointConfig
from .api.frontiers import frontier, memory_report
from .api.gradients import grad, value_and_grad
from .api.groups import CheckpointGroup
from .api.loops import checkpointed_loop, checkpointed_scan, checkpointed_while
from .api.profiling import CheckpointProfiler
from .api.scopes import CheckpointNode, CheckpointScope, is_checkpoint, mark_checkpoint, name
from .api.segments import adaptive_checkpoint, checkpoint, checkpoint_segment
from .api.sequential import checkpoint_sequential
from .api.source import checkpoint_loops, grad_with_checkpointing, steps
from .api.verify import verify
from .errors import (
    BudgetTooSmallError,
    LoopTransformError,
    ModifiedInputError,
    RecomputeMismatchError,
    RematError,
    RematWarning,
    StoreError,
    UnsupportedError,
)
from .schedules import (
    compute_checkpoint_positions,
    estimate_checkpoint_savings,
    get_memory_savings,
    plan_loop,
    should_checkpoint,
)
from .stores import DiskStore, MemoryStore, ReducedPrecisionStore
from .verification import Verification

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointer",
    "BudgetTooSmallError",
    "CheckpointConfig",
    "CheckpointGroup",
    "CheckpointManager",
    "CheckpointNode",
    "CheckpointProfiler",
    "CheckpointScope",
    "DiskStore",
    "LoopTransformError",
    "MemoryStore",
    "ModifiedInputError",
    "RecomputeMismatchError",
    "ReducedPrecisionStore",
    "RematError",
    "RematWarning",
    "StoreError",
    "UnsupportedError",
    "Verification",
    "__version__",
    "adaptive_checkpoint",
    "applied",
    "apply",
    "auto_checkpoint",
    "checkpoint",
    "checkpoint_loops",
    "checkpoint_segment",
    "checkpoint_sequential",
    "checkpointed_loop",
    "checkpointed_scan",
    "checkpointed_while",
    "compute_checkpoint_positions",
    "estimate_checkpoint_savings",
    "frontier",
    "get_memory_savings",
    "grad",
    "grad_with_checkpointing",
    "is_checkpoint",
    "mark_checkpoint",
    "memory_report",
    "name",
    "plan_loop",
    "policies",
    "remove",
    "should_checkpoint",
    "steps",
    "value_and_grad",
    "verify",
]
