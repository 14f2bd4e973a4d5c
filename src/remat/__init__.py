"""remat: exact gradients inside a memory budget."""

from .errors import (
    BudgetTooSmallError,
    LoopTransformError,
    RecomputeMismatchError,
    RematError,
    RematWarning,
    StoreError,
    UnsupportedError,
)
from .faces.chains import ActivationCheckpointer, CheckpointConfig
from .faces.gradients import grad, value_and_grad
from .faces.groups import CheckpointGroup
from .faces.loops import checkpointed_loop, checkpointed_scan, checkpointed_while
from .faces.scopes import CheckpointNode, CheckpointScope, is_checkpoint, mark_checkpoint
from .faces.segments import adaptive_checkpoint, checkpoint, checkpoint_segment
from .faces.sequential import checkpoint_sequential
from .faces.verifying import verify
from .reports.profiler import CheckpointProfiler
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
    "CheckpointNode",
    "CheckpointProfiler",
    "CheckpointScope",
    "DiskStore",
    "LoopTransformError",
    "MemoryStore",
    "RecomputeMismatchError",
    "ReducedPrecisionStore",
    "RematError",
    "RematWarning",
    "StoreError",
    "UnsupportedError",
    "Verification",
    "__version__",
    "adaptive_checkpoint",
    "checkpoint",
    "checkpoint_segment",
    "checkpoint_sequential",
    "checkpointed_loop",
    "checkpointed_scan",
    "checkpointed_while",
    "compute_checkpoint_positions",
    "estimate_checkpoint_savings",
    "get_memory_savings",
    "grad",
    "is_checkpoint",
    "mark_checkpoint",
    "plan_loop",
    "should_checkpoint",
    "value_and_grad",
    "verify",
]
