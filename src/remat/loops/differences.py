"""How a state that was computed again differs from the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import trees

__all__ = ["same_object", "state_difference"]


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


def same_object(
    one: Any, other: Any, same_array: Callable[[Any, Any], bool | None] = lambda a, b: None
) -> bool:
    """Say whether two leaves of a state that are no arrays of the engine are equal, part by part.

    `same_array` compares arrays of the engine inside of them; None if it gets something else.

    >>> same_object({"a": np.zeros(2)}, {"a": np.zeros(2)})
    True
    """
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, np.ndarray) and not one.dtype.hasobject:
        same_kind: bool = one.shape == other.shape and one.dtype == other.dtype
        return same_kind and one.tobytes() == other.tobytes()
    same = same_array(one, other)
    if same is not None:
        return same
    try:
        if one == other or str(one) == str(other) == "nan":
            return True
    except (ValueError, RuntimeError):  # there are arrays inside
        pass
    parts, others = _parts(one), _parts(other)
    return (
        parts is not None
        and others is not None
        and parts.keys() == others.keys()
        and all(same_object(part, others[key], same_array) for key, part in parts.items())
    )


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return None if callable(value) else getattr(value, "__dict__", None)
