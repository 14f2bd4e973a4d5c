"""A checkpointed call: what it computes is recorded, dropped, and computed again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autograd.tracer import isbox, trace_stack

from ... import trees
from ...loops import is_inside_a_region
from ...observers import warn_once
from ...plans.policy import as_policy
from ...segments import SegmentOptions
from .recording.region import SMALL_OPS, close_region, open_region
from .tape import is_tracing

__all__ = ["name_of", "run_segment"]


def run_segment(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SegmentOptions,
) -> Any:
    """Call `function` without keeping its activations. Its code runs once.

    Without a policy, ops on a few numbers are not recorded: a record takes more memory than they.
    """
    if not is_tracing():
        if trace_stack.top >= 0 and _are_traced(args, kwargs):
            _warn_of_autograd(options.name or name_of(function))
        return function(*args, **kwargs)
    name = options.name or name_of(function)
    is_default = options.policy is None and options.threshold is None
    region = open_region(
        name,
        policy=None if options.policy is None else as_policy(options.policy),
        limit=options.threshold,
        skips_below=SMALL_OPS if is_default else 0,
    )
    try:
        result = function(*args, **kwargs)
    finally:
        close_region(region)
    if not (region.ops or is_inside_a_region() or _are_traced(args, kwargs, result)):
        _warn_of_no_effect(name)
    return result


def _are_traced(*values: Any) -> bool:
    return any(map(isbox, trees.flatten(values)[0]))


def _warn_of_no_effect(name: str) -> None:
    warn_once(
        ("numpy", "not traced", name),
        f"checkpointing {name} has no effect: nothing that goes in or that it closes over depends "
        "on what is differentiated, so nothing would be held; call it without checkpoint",
    )


def _warn_of_autograd(name: str) -> None:
    warn_once(
        ("numpy", "autograd", name),
        f"checkpointing {name} has no effect in autograd's own grad, whose ops remat does not "
        "record; use remat.grad or remat.value_and_grad",
    )


def name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
