"""What the steps of a loop read and do not bind: it must be the same when they are run again."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Container, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from .. import trees
from ..introspect import Walk, is_library_object
from .protocols import Values

__all__ = ["Kept", "aliased", "loses_gradients"]

_LIMIT = 20_000  # objects
_PLAIN = (bool, int, float, complex, str, bytes, range, type, FunctionType, ModuleType, type(None))


class Kept:
    """What steps read, as it is now: lists and dicts may change after the loop.

    So may arrays that the function writes into elsewhere, which are `volatile`.
    """

    def __init__(
        self, named: Iterable[tuple[str, Any]], volatile: Container[str], api: Values
    ) -> None:
        self._trees: list[tuple[str, Any, list[Any], trees.Structure]] = []
        self._api = api
        named = list(named)
        self._objects = [(n, v) for n, v in named if _is_object(v, api)]
        self._held = {id(array): array for _, v in self._objects for array in held_arrays(v, api)}
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
        """Name a list, dict or object that a function has changed which the loop calls."""
        for name, tree, leaves, structure in self._trees:
            now, new = trees.flatten(tree)
            if new != structure or not all(map(_is, now, leaves)):
                return name
        for name, value in self._objects:
            if any(id(array) not in self._held for array in held_arrays(value, self._api)):
                return name
        return None


def held_arrays(value: Any, api: Values) -> list[Any]:
    """Return the arrays in an object that gradients may flow through."""
    walk = Walk([value], _is_opaque, limit=_LIMIT)
    return [each for each, _ in walk if api.is_array_type(type(each)) and api.is_made(each)]


def loses_gradients(value: Any, api: Values) -> bool:
    """Say whether a value that is no tree holds arrays, or makes them later."""
    if not _is_object(value, api):
        return False
    return isinstance(value, Iterator) or bool(held_arrays(value, api))


def _is_object(value: Any, api: Values) -> bool:
    if isinstance(value, _PLAIN) or api.is_array_type(type(value)):
        return False
    is_tree = type(value) in (list, tuple, dict, set, frozenset)
    return not is_tree and not (is_library_object(value) and not isinstance(value, Iterator))


def _is_opaque(value: Any) -> bool:
    return isinstance(value, type | FunctionType) or is_library_object(value)


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
