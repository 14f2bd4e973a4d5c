"""Leaves of a state that look at the same memory.

A state at rest is a copy, leaf by leaf. What a step writes to one leaf would have to show in the
others that overlap with it, and would not. So such leaves are read-only copies: steps that only
read them are right, and those that write to them get an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.exceptions import TooHardError

from ... import trees
from ...errors import UnsupportedError
from .nodes import memory_of

__all__ = ["copy_of", "guarded", "refuse_write_to_overlap"]

_MAX_WORK = 10_000  # candidates, when it is asked whether two views have an entry in common


def guarded(leaves: list[Any], values: list[Any]) -> list[Any]:
    """Return `values`, and where `leaves` overlap, read-only copies of them."""
    overlapping = _overlapping(leaves) if len(leaves) > 1 else ()
    if not overlapping:
        return values
    return [
        _frozen(value) if id(leaf) in overlapping else value
        for leaf, value in zip(leaves, values, strict=True)
    ]


def copy_of(leaf: Any) -> Any:
    """Copy an array; what is read-only stays read-only, as it would in a plain loop."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    return leaf.copy(order="K") if leaf.flags.writeable else _frozen(leaf)


def refuse_write_to_overlap(error: Exception, state: Any, step: int) -> None:
    """Say why a leaf of the state is read-only, if that is what a step has come upon."""
    leaves, _ = trees.flatten(state)
    frozen = any(isinstance(leaf, np.ndarray) and not leaf.flags.writeable for leaf in leaves)
    if frozen and isinstance(error, ValueError) and "read-only" in str(error):
        raise UnsupportedError(
            f"step {step} writes to a read-only leaf of the state: it came in read-only, or shares "
            "memory with another leaf, and what is written to one would have to show in the other. "
            "Pass copies, and return new arrays"
        ) from error


def _overlapping(leaves: list[Any]) -> set[int]:
    """Return the ids of arrays that share a part of their memory with another one."""
    owners: dict[int, dict[int, Any]] = {}
    for leaf in leaves:
        if isinstance(leaf, np.ndarray):
            owners.setdefault(id(memory_of(leaf)), {})[id(leaf)] = leaf
    return {
        key
        for views in owners.values()
        for key, leaf in (views.items() if len(views) > 1 else ())
        if any(_overlap(leaf, other) for i, other in views.items() if i != key)
    }


def _overlap(one: Any, other: Any) -> bool:
    try:
        return bool(np.shares_memory(one, other, _MAX_WORK))  # type: ignore[arg-type]
    except TooHardError:
        return True


def _frozen(array: Any) -> Any:
    array = array.copy(order="K")
    array.flags.writeable = False
    return array
