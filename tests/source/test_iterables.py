"""What a loop iterates over: native at first, entry by entry later."""

from __future__ import annotations

import numpy as np
import pytest

from remat.engines.values import LoadedValues
from remat.source.iterables import Items, items_of, lazy

API = LoadedValues()
SEQUENCES = {
    "range": lambda: range(3, 20, 4),
    "list": lambda: [3, 1, 4, 1, 5],
    "tuple": lambda: (3, 1, 4),
    "text": lambda: "loop",
    "dict": lambda: {"a": 1, "b": 2},
    "items": lambda: dict(zip("ab", [1, 2], strict=True)).items(),
    "array": lambda: np.arange(6.0).reshape(3, 2),
    "zip": lambda: lazy(API, zip, range(5), [7, 8, 9]),
    "enumerate": lambda: lazy(API, enumerate, [7, 8, 9], 4),
    "enumerate of zip": lambda: lazy(API, enumerate, lazy(API, zip, "abc", range(3)), start=2),
    "reversed": lambda: lazy(API, reversed, [7, 8, 9]),
    "reversed array": lambda: lazy(API, reversed, np.arange(4)),
    "reversed range": lambda: lazy(API, reversed, range(7)),
    "strict zip": lambda: lazy(API, zip, range(2), "ab", strict=True),
}


@pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES.keys())
@pytest.mark.parametrize("first", [0, 1])
def test_entries_are_those_of_iteration(make, first: int) -> None:
    items, _ = items_of(make(), API)
    expected = list(items.native())
    assert items.length == len(expected)
    sources: list = []
    scanned: list = []
    items.prepare(first, sources, scanned, API)
    assert scanned == []
    for step in range(first, len(expected)):
        entry = items.get(step, tuple(sources), None)
        assert repr(entry) == repr(expected[step])


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2]),
        lambda: (k for k in range(3)),
        lambda: map(str, range(3)),
        lambda: lazy(API, zip, range(3), (k for k in range(3))),
        lambda: lazy(API, zip, range(3), range(4), strict=True),
        lambda: np.array(3.0),
        lambda: 3,
    ],
)
def test_these_have_no_entries(make) -> None:
    items, _ = items_of(make(), API)
    assert isinstance(items, Items)
    assert items.length is None


def test_a_list_that_is_changed_later_does_not_change_its_entries() -> None:
    given = [1, 2, 3]
    items, _ = items_of(given, API)
    sources: list = []
    items.prepare(0, sources, [], API)
    given.clear()
    assert [items.get(step, tuple(sources), None) for step in range(3)] == [1, 2, 3]
