"""How a state that was computed again differs from the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import trees

__all__ = ["state_difference"]


def state_difference(
    structure: trees.Structure,
    leaves: Sequence[Any],
    expected: Sequence[Any],
    difference_of: Callable[[Any, Any], str | None],
) -> str | None:
    """Name the first leaf that differs, and say how; None if there is none.

    `difference_of` compares two arrays of an engine.

    >>> structure = trees.flatten({"x": 1, "y": 2})[1]
    >>> state_difference(structure, [1, 3], [1, 2], lambda a, b: None if a == b else f"is {a}")
    "state['y'] is 3"
    """
    for number, (leaf, other) in enumerate(zip(leaves, expected, strict=True)):
        words = difference_of(leaf, other)
        if words:
            name = trees.paths(trees.unflatten(structure, list(expected)))[number]
            return f"state{name} {words}"
    return None
