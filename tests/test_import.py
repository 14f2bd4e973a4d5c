"""What `import remat` gives, and what it does not load."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import remat

NAMES = [
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
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(remat, name))]


def test_the_exact_names() -> None:
    assert sorted(remat.__all__) == sorted(NAMES)


def test_every_name_is_there() -> None:
    for name in remat.__all__:
        assert getattr(remat, name) is not None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_shows_an_example(name: str) -> None:
    assert ">>>" in (getattr(remat, name).__doc__ or "")


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isclass(getattr(remat, name))])
def test_every_error_says_what_it_means(name: str) -> None:
    assert getattr(remat, name).__doc__


@pytest.mark.parametrize("package", ["torch", "jax", "matplotlib", "autograd"])
def test_import_loads_no_framework(package: str) -> None:
    check = f"import sys, remat; sys.exit({package!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_a_loop_on_arrays_does_not_load_torch() -> None:
    check = (
        "import sys, numpy as np, remat\n"
        "remat.grad(lambda x: np.sum(remat.checkpointed_loop(np.sin, x, 9)[0]))(np.ones(2))\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'jax', 'matplotlib', 'rich')))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
