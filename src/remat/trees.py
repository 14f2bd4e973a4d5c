"""Pytrees: tuples, lists, dicts, named tuples and dataclasses of arrays, in any nesting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import optree

__all__ = ["Leaves", "Structure", "describe", "flatten", "map_leaves", "paths", "unflatten"]

_NAMESPACE = "remat"

_LEAF = optree.treespec_leaf()
_SIMPLE = (np.ndarray, np.float64, float)  # the usual state, found at once
_LEAF_TYPES: set[type] = {*_SIMPLE, int}  # known to be no trees

Leaves = list[Any]
Structure = optree.PyTreeSpec


def flatten(tree: Any) -> tuple[Leaves, Structure]:
    """Take a tree apart; `unflatten` puts it together again.

    >>> leaves, structure = flatten({"a": 1.0, "b": (2.0, None)})
    >>> leaves
    [1.0, 2.0]
    >>> unflatten(structure, leaves)
    {'a': 1.0, 'b': (2.0, None)}
    """
    if type(tree) in _SIMPLE:
        return [tree], _LEAF
    while True:
        leaves, structure = optree.tree_flatten(tree, namespace=_NAMESPACE)
        unknown = set(map(type, leaves)) - _LEAF_TYPES
        if not unknown:
            return leaves, structure
        for cls in unknown:
            if dataclasses.is_dataclass(cls):
                _register(cls)
            else:
                _LEAF_TYPES.add(cls)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Put leaves together as `structure` says."""
    return optree.tree_unflatten(structure, leaves)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with `function` applied to every leaf."""
    leaves, structure = flatten(tree)
    return unflatten(structure, map(function, leaves))


def paths(tree: Any) -> list[str]:
    """Name every leaf by the way to it, such as "['h'][0]"; a tree that is a leaf has the way "".

    >>> paths({"h": (1.0, 2.0)})
    ["['h'][0]", "['h'][1]"]
    """
    flatten(tree)
    names, _, _ = optree.tree_flatten_with_accessor(tree, namespace=_NAMESPACE)
    return [accessor.codify("") for accessor in names]


def describe(structure: Structure) -> str:
    """Say what a structure looks like.

    >>> describe(flatten((1.0, 2.0))[1])
    '(array, array)'
    """
    if structure.is_leaf():
        return "an array"
    try:
        text = repr(unflatten(structure, [_ARRAY] * structure.num_leaves))
    except Exception:  # a class of the user that takes no such values
        text = str(structure).removeprefix("PyTreeSpec")
    return (
        text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({structure.num_leaves} arrays)"
    )


_LONGEST = 200  # of a description, in characters


class _Array:
    def __repr__(self) -> str:
        return "array"


_ARRAY = _Array()


def _register(cls: type) -> None:
    """Let dataclasses be trees: their fields are the children, whatever `__init__` does."""
    names = tuple(field.name for field in dataclasses.fields(cls))

    def take_apart(value: Any) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
        return tuple(getattr(value, name) for name in names), None, names

    def put_together(_: object, children: Iterable[Any]) -> Any:
        value: Any = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(value, name, child)
        return value

    optree.register_pytree_node(
        cls,
        take_apart,
        put_together,
        path_entry_type=optree.GetAttrEntry,
        namespace=_NAMESPACE,
    )
