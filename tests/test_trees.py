"""Pytrees: taken apart and put together again."""

from __future__ import annotations

import abc
import collections
import dataclasses
from typing import Any, NamedTuple

import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat import trees


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Data:
    a: Any
    b: Any = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    a: Any
    b: Any


@dataclasses.dataclass
class Derived:
    a: Any
    b: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.b = self.a * 10


TREES = {
    "leaf": (1.0, [1.0]),
    "tuple": ((1, 2), [1, 2]),
    "list": ([1, [2]], [1, 2]),
    "dict": ({"b": 1, "a": 2}, [2, 1]),
    "ordered": (collections.OrderedDict(b=1, a=2), [1, 2]),
    "default": (collections.defaultdict(list, b=1, a=2), [2, 1]),
    "deque": (collections.deque([1, 2]), [1, 2]),
    "named": (Pair(1, (2, 3)), [1, 2, 3]),
    "data": (Data(1, [2, 3]), [1, 2, 3]),
    "frozen": (Frozen(a=1, b=2), [1, 2]),
    "derived": (Derived(1), [1, 10]),
    "nested": ({"x": [Data(Pair(1, 2), Frozen(a=3, b=None))]}, [1, 2, 3]),
    "none": ((None, 1), [1]),
    "empty": ((), []),
}


@pytest.mark.parametrize(("tree", "leaves"), TREES.values(), ids=TREES)
def test_trees_come_apart_and_together(tree, leaves) -> None:
    found, structure = trees.flatten(tree)
    assert found == leaves
    again = trees.unflatten(structure, found)
    assert again == tree
    assert type(again) is type(tree)


@pytest.mark.parametrize(("tree", "leaves"), TREES.values(), ids=TREES)
def test_every_leaf_has_a_path_that_leads_to_it(tree, leaves) -> None:
    names = trees.paths(tree)
    assert [eval(f"tree{name}", {"tree": tree}) for name in names] == leaves


def test_a_dataclass_is_put_together_without_its_init() -> None:
    leaves, structure = trees.flatten(Derived(1))
    again = trees.unflatten(structure, [leaves[0], "kept"])
    assert (again.a, again.b) == (1, "kept")


def test_the_order_of_a_dict_is_kept() -> None:
    tree = {"b": 1, "a": 2}
    assert list(trees.map_leaves(lambda leaf: leaf * 2, tree)) == ["b", "a"]


@pytest.mark.parametrize("cls", [Data, Pair, int])
def test_a_class_is_a_leaf(cls) -> None:
    assert trees.flatten([cls, 1])[0] == [cls, 1]


class Base(abc.ABC):  # noqa: B024  (its metaclass is what counts)
    pass


@dataclasses.dataclass
class Abstract(Base):
    a: Any


def test_a_class_with_a_metaclass_is_a_leaf() -> None:
    assert trees.flatten([Abstract, 1])[0] == [Abstract, 1]


def test_structures_tell_trees_apart() -> None:
    structures = [trees.flatten(tree)[1] for tree, _ in TREES.values()]
    for i, one in enumerate(structures):
        for j, other in enumerate(structures):
            assert (one == other) == (i == j)


any_tree = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Data, inner, inner)
    ),
    max_leaves=8,
)


@given(any_tree)
def test_any_tree_comes_apart_and_together(tree) -> None:
    leaves, structure = trees.flatten(tree)
    assert trees.unflatten(structure, leaves) == tree
    assert len(trees.paths(tree)) == len(leaves)
    assert trees.map_leaves(lambda leaf: leaf, tree) == tree


def test_a_structure_is_described_with_what_is_in_it() -> None:
    def described(tree):
        return trees.describe(trees.flatten(tree)[1])

    assert described(1.0) == "an array"
    assert described({"h": 1.0, "c": [2.0, 3.0]}) == "{'h': array, 'c': [array, array]}"
    assert described([1.0] * 3) != described([1.0] * 4)
    assert described(None) == "None"
    long = described([1.0] * 500)
    assert long.endswith("... (500 arrays)")
    assert len(long) < 250


class Choosy:
    """A node of a tree that is made of numbers only."""

    def __init__(self, value):
        self.value = value + 0


def test_a_structure_that_takes_only_numbers_is_described_too() -> None:
    optree.register_pytree_node(
        Choosy, lambda c: ((c.value,), None), lambda _, c: Choosy(*c), namespace="remat"
    )
    assert "Choosy" in trees.describe(trees.flatten((Choosy(1.0), 2.0))[1])
