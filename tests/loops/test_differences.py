"""How a state that was computed again differs from the first one."""

from __future__ import annotations

import pytest

from remat import trees
from remat.loops.differences import state_difference


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
