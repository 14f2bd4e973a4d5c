"""What `make test` runs of large matrices: always the same, and every value of every argument."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from .conftest import MATRIX, SHARE, _sample


def matrix(**arguments):
    """Return the tests of all combinations."""
    sets = [{}]
    for name, values in arguments.items():
        sets = [{**one, name: value} for one in sets for value in values]
    return [
        _Item(f"test.py::test[{'-'.join(map(str, one.values()))}]", SimpleNamespace(params=one))
        for one in sets
    ]


class _Item(SimpleNamespace):
    def __init__(self, nodeid, callspec) -> None:
        super().__init__(nodeid=nodeid, callspec=callspec)

    __hash__ = object.__hash__


def names(items) -> set[str]:
    return {item.nodeid for item in items}


def test_a_small_one_is_run_in_full() -> None:
    items = matrix(seed=range(MATRIX))
    assert _sample(items) == items


@pytest.mark.parametrize("count", [MATRIX + 1, 400])
def test_a_share_of_a_large_one_is_run(count) -> None:
    assert 4 <= len(_sample(matrix(seed=range(count)))) <= 2 * count / SHARE + 4


def test_every_value_occurs() -> None:
    programs, ways = [object() for _ in range(40)], ["a", "b", "c", "d", None, 0, 1.5]
    chosen = [item.callspec.params for item in _sample(matrix(program=programs, way=ways))]
    assert {one["way"] for one in chosen} == set(ways)
    assert [one for one in programs if one not in [item["program"] for item in chosen]] == []
    assert len(chosen) < 0.4 * len(programs) * len(ways)


def test_the_choice_depends_on_names_alone() -> None:
    items = matrix(seed=range(200), way=["a", "b"])
    assert names(_sample(items)) == names(_sample(items[::-1]))
    more = matrix(seed=range(210), way=["a", "b"])
    of_both = {name for name in names(_sample(more)) if name in names(items)}
    assert len(of_both ^ names(_sample(items))) <= 20  # most tests that are run stay
