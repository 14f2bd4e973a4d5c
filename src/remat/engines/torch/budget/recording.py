"""The trace of one pass of a function, for frontiers and memory reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .... import trees
from ....core.budget import PLENTY, KeepAll, with_backward
from ....errors import UnsupportedError
from ....plans import Trace
from ..diagnostics.verify import left_as_found
from ..referenced_tensors import referenced_tensors
from .manager import TorchBudget

__all__ = ["record_trace"]

_NO_GRADIENT = (
    "the function has no gradient: none of its results is computed by ops on tensors from a "
    "parameter or input that requires grad"
)


def record_trace(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Trace:
    """Run a function forward and backward, and return what it did.

    It runs twice: the first pass is cold. Buffers, gradients and random state are left as they
    were found.
    """
    owned = referenced_tensors(function)
    with torch.enable_grad():
        for _ in range(2):
            with left_as_found(owned.buffers):
                trace, seconds = _record(function, args, kwargs, list(owned.sources.values()))
    return with_backward(trace, seconds)


def _record(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sources: list[Any]
) -> tuple[Trace, float]:
    budget = TorchBudget(PLENTY, KeepAll)
    if not budget.can_begin():
        raise UnsupportedError(
            "a pass is recorded on its own: call this outside of checkpointed regions, scopes, "
            "managers and dispatch modes"
        )
    try:
        budget.begin()
        result = function(*args, **kwargs)
        budget.end()
    except BaseException:
        budget.end(failed=True)
        raise
    if not budget.planned:
        raise UnsupportedError(_NO_GRADIENT)
    return budget.planned[0].trace, _backward(result, [*sources, *trees.flatten((args, kwargs))[0]])


def _backward(result: Any, sources: list[Any]) -> float:
    """Go back through a result without accumulating gradients; return the seconds."""
    ends = [r for r in trees.flatten(result)[0] if isinstance(r, Tensor) and r.requires_grad]
    starts = [s for s in sources if isinstance(s, Tensor) and s.requires_grad]
    if not ends or not starts:
        raise UnsupportedError(_NO_GRADIENT)
    began = time.perf_counter()
    torch.autograd.grad(ends, starts, [torch.ones_like(end) for end in ends], allow_unused=True)
    return time.perf_counter() - began
