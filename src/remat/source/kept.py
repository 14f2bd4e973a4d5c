"""What the steps of a loop read and do not bind: it must be the same when they are run again."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Container, Iterable
from typing import Any

from .. import trees
from .protocols import Values

__all__ = ["Kept", "aliased"]


class Kept:
    """What steps read, as it is now: lists and dicts may change after the loop.

    So may arrays that the function writes into elsewhere, which are `volatile`.
    """

    def __init__(
        self, named: Iterable[tuple[str, Any]], volatile: Container[str], api: Values
    ) -> None:
        self._trees: list[tuple[str, Any, list[Any], trees.Structure]] = []
        self.copies = [self._copy(name, value, name in volatile, api) for name, value in named]

    def _copy(self, name: str, value: Any, is_volatile: bool, api: Values) -> Any:
        if type(value) in (list, dict):
            leaves, structure = trees.flatten(value)
            tree = trees.unflatten(structure, leaves)
            self._trees.append((name, tree, leaves, structure))
            return tree
        if type(value) in (set, bytearray, deque):
            return copy.copy(value)
        return api.copied(value) if is_volatile and api.is_array_type(type(value)) else value

    def changed(self) -> str | None:
        """Name a list or dict that a function has changed which the loop calls."""
        for name, tree, leaves, structure in self._trees:
            now, new = trees.flatten(tree)
            if new != structure or not all(map(_is, now, leaves)):
                return name
        return None


def aliased(value: Any, api: Values) -> Any:
    """Return a value from outside as part of the graph of the step that runs.

    A loop inside of the step refers to it, and its gradients have to end in the step.
    """
    if type(value) in (list, tuple, dict):
        leaves, structure = trees.flatten(value)
        aliases = [api.aliased(leaf) for leaf in leaves]
        if all(map(_is, aliases, leaves)):
            return value
        return trees.unflatten(structure, aliases)
    return api.aliased(value)


def _is(one: Any, other: Any) -> bool:
    return one is other
