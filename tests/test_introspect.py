"""What a function refers to; what is expected is written down by hand."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import types
from types import SimpleNamespace
from typing import Any

import autograd
import numpy as np
import pytest

import remat
from remat import introspect
from remat.introspect import (
    GONE,
    NOWHERE,
    Attribute,
    FixedPart,
    Item,
    Walk,
    find_within,
    is_lazy,
    name_of,
    references,
)

TARGET = ["the target"]
UNUSED = ["unused"]
module = types.ModuleType("a_module_of_the_program")
module.inside, module.unused = TARGET, UNUSED


def closure():
    target = TARGET
    return lambda: target


def default(x, target=TARGET):
    return target


def keyword_default(x, *, target=TARGET):
    return target


def names_a_global():
    return TARGET


def names_a_global_inside():
    def inner():
        return [TARGET for _ in range(2)]

    return inner


def attribute_of_a_module():
    return module.inside


def with_an_attribute():
    pass


with_an_attribute.target = TARGET


class Holder:
    def __init__(self) -> None:
        self.target = TARGET

    def method(self):
        return self.target


class Slotted:
    __slots__ = ("__private", "empty", "target")

    def __init__(self) -> None:
        self.target = None
        self.__private = TARGET


class ByClass:
    target = TARGET


class Inherits(ByClass):
    pass


class InMethods:
    def method(self):
        return TARGET

    @staticmethod
    def static():
        return None

    @classmethod
    def by_class(cls):
        return None

    @property
    def asked_for(self):
        return None

    @functools.cached_property
    def cached(self):
        return None


class ListWithAttribute(list):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    target: list


def list_with_attribute():
    made = ListWithAttribute()
    made.target = TARGET
    return made


Named = collections.namedtuple("Named", "target")

REACHES = [
    (closure(), "target"),
    (default, "default.__defaults__[0]"),
    (keyword_default, "keyword_default.target"),
    (names_a_global, "TARGET"),
    (names_a_global_inside, "TARGET"),
    (attribute_of_a_module, "module.inside"),
    (with_an_attribute, "with_an_attribute.target"),
    (Holder().method, "Holder.target"),
    (Holder(), "Holder.target"),
    (Slotted(), "Slotted._Slotted__private"),
    (Frozen(TARGET), "Frozen.target"),
    (ByClass(), None),
    (Inherits(), None),
    (InMethods(), "TARGET"),
    (functools.partial(print, TARGET), "partial.args[0]"),
    (functools.partial(print, end=TARGET), "partial.end"),
    (functools.partial(closure()), "target"),
    ([1, [TARGET]], "list[1][0]"),
    ({"a": {"b": TARGET}}, "dict['a']['b']"),
    ((1, Named(TARGET)), "tuple[1][0]"),
    (collections.deque([TARGET]), "deque[0]"),
    (types.SimpleNamespace(target=TARGET), "SimpleNamespace.target"),
    (list_with_attribute(), "ListWithAttribute.target"),
    (TARGET.append, None),
]


@pytest.mark.parametrize(("root", "name"), REACHES)
def test_what_is_reached_and_how_it_is_named(root, name) -> None:
    walk = Walk([root])
    places = [place for value, place in walk if value is TARGET]
    assert len(places) == 1  # every object once
    assert name is None or walk.name(places[0]) == name
    assert not any(value is UNUSED for value, _ in Walk([root]))


@pytest.mark.parametrize(
    "root", [sys, len, dataclasses.field, collections.OrderedDict, "text", 3.0]
)
def test_libraries_are_not_followed(root) -> None:
    assert len(list(Walk([root]))) <= 2


def test_a_cell_without_a_value() -> None:
    def inner():
        return later

    assert references(inner) == []
    later = 1


def test_what_only_the_garbage_collector_knows() -> None:
    hidden = iter([TARGET])
    assert not any(value is TARGET for value, _ in Walk([hidden], lambda value: False))

    def opaque(value):
        return isinstance(value, type)

    assert any(value is TARGET for value, _ in Walk([hidden], opaque, hidden=True))


def test_a_walk_that_has_a_limit() -> None:
    walk = Walk([[[], [], []]], limit=3)
    assert len(list(walk)) == 3
    assert not walk.is_complete
    walk = Walk([[[], [], []]], limit=100)
    assert sum(isinstance(value, list) for value, _ in walk) == 4
    assert walk.is_complete


def test_a_cycle_is_walked_once() -> None:
    cycle = []
    cycle.append(cycle)
    assert sum(value is cycle for value, _ in Walk([cycle])) == 1


def test_numbers_are_visited_at_each_of_their_places() -> None:
    numbers = {"a": 1, "b": [1, 1]}
    walk = Walk([numbers])
    names = [walk.name(place) for value, place in walk if value == 1]
    assert names == ["dict['a']", "dict['b'][0]", "dict['b'][1]"]


def test_scalars_of_long_containers_are_data() -> None:
    data = [1.0] * 2000
    data[1500] = TARGET
    assert [value for value, _ in references(data)] == [TARGET]
    assert [place.key for _, place in references(dict(enumerate(data)))] == [1500]


# -- places ----------------------------------------------------------------------------------------


def test_entries_can_be_exchanged() -> None:
    entries = [1]
    place = Item(entries, 0)
    place.put(2)
    assert place.get() == entries[0] == 2
    entries.clear()
    assert place.get() is GONE


def test_attributes_can_be_exchanged() -> None:
    frozen = Frozen([])
    place = Attribute(frozen, "target")
    place.put(TARGET)
    assert frozen.target is place.get() is TARGET
    assert Attribute(frozen, "nowhere").get() is GONE


def test_cells_can_be_exchanged() -> None:
    number = 1

    def inner():
        return number

    ((value, place),) = references(inner)
    assert value == 1
    place.put(5)
    assert inner() == 5


@pytest.mark.parametrize("place", [NOWHERE, FixedPart((1,), "[0]")])
def test_places_that_cannot_be_exchanged(place) -> None:
    place.put(3)
    assert place.get() is GONE
    assert place.suffix in ("", "[0]")


def test_a_place_of_something_unknown() -> None:
    assert name_of(NOWHERE, {}) == "something"


def test_a_module_of_the_program_may_have_the_name_of_a_library(monkeypatch, tmp_path) -> None:
    own = types.ModuleType("statistics")
    own.__file__ = str(tmp_path / "statistics.py")
    monkeypatch.setitem(sys.modules, "statistics", own)
    introspect.is_library.cache_clear()
    try:
        assert not introspect.is_library("statistics")
        assert introspect.is_library("json")
        assert introspect.is_library("numpy")
    finally:
        introspect.is_library.cache_clear()


WEIGHT = [1.0]


class Owner:
    def method(self, x: float) -> float:
        return x * WEIGHT[0]


def times(x: float) -> float:
    return x * WEIGHT[0]


@pytest.mark.parametrize(
    "wrapper",
    [
        remat.checkpoint(times),
        np.vectorize(times),
        np.vectorize(functools.partial(times)),
        np.vectorize(Owner().method),
        autograd.grad(times),
        {times},
    ],
)
def test_a_wrapper_of_a_library_does_not_hide_the_function_of_the_program(wrapper: Any) -> None:
    assert any(value is WEIGHT for value, _ in Walk([wrapper]))


def test_what_an_object_holds_is_found_but_for_classes_and_globals() -> None:
    inside: list[Any] = [0.5]
    inside.append(inside)
    found = [
        find_within(value, lambda part: isinstance(part, float))
        for value in (
            SimpleNamespace(a=inside),
            np.array([None, inside], dtype=object),
            lambda: inside,
            np.vectorize(times, otypes=[float]),
            times,
            Owner,
        )
    ]
    assert found == [(0.5,), (0.5,), (0.5,), None, None, None]
    assert find_within(inside, lambda part: isinstance(part, float), {id(inside)}) is None


@pytest.mark.parametrize("value", [iter([]), map(abs, []), (x for x in ())])
def test_what_computes_later_is_lazy(value: Any) -> None:
    assert is_lazy(value)
    assert not is_lazy([value])
