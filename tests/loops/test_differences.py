"""How a state that was computed again differs from the first one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remat import trees
from remat.loops.differences import same_object, state_difference


def unequal(a: int, b: int) -> str | None:
    return None if a == b else f"is {a} instead of {b}"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((1, [2, 3]), None),
        ((0, [2, 3]), "state[0] is 0 instead of 1"),
        ((1, [2, 4]), "state[1][1] is 4 instead of 3"),
        ((1, [0, 4]), "state[1][0] is 0 instead of 2"),  # the first one
    ],
)
def test_the_first_leaf_that_differs_is_named(found: object, message: str | None) -> None:
    expected, structure = trees.flatten((1, [2, 3]))
    leaves, _ = trees.flatten(found)
    assert state_difference(structure, leaves, expected, unequal) == message


class Settings:
    def __init__(self, weights: object) -> None:
        self.weights = weights


class Array:
    """An array of an engine."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


def same_array(one: object, other: object) -> bool | None:
    are_arrays = isinstance(one, Array) and isinstance(other, Array)
    return one.number == other.number if are_arrays else None


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: np.arange(2), np.arange(2.0)),
        (lambda: np.arange(2), np.arange(3)),
        (lambda: np.array([0.0, np.nan]), np.array([-0.0, np.nan])),
        (lambda: np.float32("nan"), np.float32(1)),
        (lambda: float("nan"), 1.0),
        (lambda: Settings(np.arange(2)), Settings(np.arange(1, 3))),
        (lambda: SimpleNamespace(a=[np.arange(2)]), SimpleNamespace(a=[np.arange(3)])),
        (lambda: SimpleNamespace(a=(Array(1),)), SimpleNamespace(a=(Array(2),))),
        (lambda: {"a": np.arange(2)}, {"b": np.arange(2)}),
        (lambda: [np.arange(2)], [np.arange(2), 1]),
        (lambda: "text", "another"),
    ],
)
def test_leaves_that_are_no_arrays_are_compared_part_by_part(make: Any, other: object) -> None:
    assert same_object(make(), make(), same_array)
    assert not same_object(make(), other, same_array)


def test_functions_are_compared_as_a_whole() -> None:
    one, other = (lambda: 1), (lambda: 1)
    assert same_object(one, one)
    assert not same_object(one, other)
