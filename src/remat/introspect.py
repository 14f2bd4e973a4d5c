"""What a function refers to: closures, defaults, globals, attributes of objects, partials, methods.

`references` returns what a value refers to directly, each with its `Place`: there it can be read
again, exchanged, and named. `Walk` follows references from functions to everything that they reach.
Nothing of any framework is imported here.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import functools
import gc
import os
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "GONE",
    "NOWHERE",
    "Attribute",
    "FixedPart",
    "Item",
    "Place",
    "Walk",
    "find_within",
    "is_lazy",
    "is_library",
    "is_library_object",
    "name_of",
    "names_in",
    "references",
]

GONE = object()  # what a place holds that does not exist (any more)

_SCALARS = (bool, int, float, complex, str, bytes, type(None))  # refer to nothing
_LISTS = (list, collections.deque)
_EMPTY: dict[Any, Any] = {}
_VIEWS_OF_DICTS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_MANY = 1000  # entries of a container
_WALKED_STANDARD_TYPES = (types.SimpleNamespace, collections.UserDict, collections.UserList)
# By name: importing them for this would be a waste.
_WALKED_NAMES = {"argparse.Namespace", "optparse.Values", "_thread._local"}
_STANDARD_LIBRARY = Path(os.__file__).parent
# Their objects refer to half the world, and to nothing that a program has put there.
_FRAMEWORKS = {
    *("numpy", "autograd", "scipy", "pandas", "matplotlib", "torch", "jax", "jaxlib", "rich"),
    *("optree", "pytest", "_pytest", "hypothesis", "remat"),
}


# -- places ----------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a value is referred to; of this class itself if it cannot be exchanged there."""

    owner: Any = None
    key: Any = None
    name: str = ""  # of a variable; other places are named after their owner

    def get(self) -> Any:
        """Return what is there now, or `GONE`."""
        return GONE

    def put(self, value: Any) -> None:
        """Exchange what is there."""

    @property
    def suffix(self) -> str:
        """What the place adds to the name of its owner."""
        return ""


class Item(Place):
    """An entry of a list or of a dict."""

    __slots__ = ()

    def get(self) -> Any:
        try:
            return self.owner[self.key]
        except (LookupError, TypeError):
            return GONE

    def put(self, value: Any) -> None:
        self.owner[self.key] = value

    @property
    def suffix(self) -> str:
        return f"[{self.key!r}]"


class Attribute(Place):
    """An attribute of an object, or the contents of a closure cell."""

    __slots__ = ()

    def get(self) -> Any:
        try:
            return getattr(self.owner, self.key)
        except (AttributeError, ValueError):
            return GONE

    def put(self, value: Any) -> None:
        # Not setattr for plain objects: frozen dataclasses refuse it, and properties would run.
        special = types.CellType | types.FunctionType | types.ModuleType | type
        write = setattr if isinstance(self.owner, special) else object.__setattr__
        write(self.owner, self.key, value)

    @property
    def suffix(self) -> str:
        return f".{self.key}"


class FixedPart(Place):
    """A part of what cannot be changed: of a tuple, a partial, a method. `key` is its suffix."""

    __slots__ = ()

    @property
    def suffix(self) -> str:
        return str(self.key)


NOWHERE = Place()
Reference = tuple[Any, Place]


# -- one value -------------------------------------------------------------------------------------


def is_library_object(value: Any) -> bool:
    """Say whether a function, a class or an object belongs to a library and not to the program."""
    thing = value if isinstance(value, type | types.FunctionType) else type(value)
    module = getattr(thing, "__module__", None) or ""
    if isinstance(thing, type) and (
        dataclasses.is_dataclass(thing)
        or issubclass(thing, _WALKED_STANDARD_TYPES)
        or f"{module}.{thing.__name__}" in _WALKED_NAMES
    ):
        return False
    return is_library(module.partition(".")[0])


@functools.cache
def is_library(name: str) -> bool:
    """Return whether a module belongs to a framework or the standard library, not to a program."""
    if name in _FRAMEWORKS:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in sys.stdlib_module_names and (
        file is None or _STANDARD_LIBRARY in Path(file).parents
    )


def references(
    value: Any, is_opaque: Callable[[Any], bool] = is_library_object, *, hidden: bool = False
) -> list[Reference]:
    """Return what a value refers to directly, each with its place.

    Functions, classes and objects that are opaque refer to nothing but the function of the program
    that they wrap; containers, methods, partials, exceptions and wrappers (`staticmethod`,
    `property`) are never opaque. With `hidden`, what only the garbage collector knows of (sets,
    generators, extension types) is followed, too; it has no place.

    >>> weight = [1.0, 2.0]
    >>> def step(x, scale=3.0):
    ...     return x * weight[0] * scale
    >>> [(value, place.name) for value, place in references(step, lambda value: False)]
    [((3.0,), ''), ([1.0, 2.0], 'weight')]
    """
    for kinds, of_kind in _CONTAINERS:
        if isinstance(value, kinds):
            is_subclass = isinstance(value, list | dict) and hasattr(value, "__dict__")
            return of_kind(value) + (_of_attributes(value) if is_subclass else [])
    if isinstance(value, types.ModuleType):
        return []
    if is_opaque(value):
        return _of_wrapper(value, is_opaque)
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, type):
        inside = [(part, Attribute(value, name)) for name, part in vars(value).items()]
        return [*inside, *_nowhere(value.__bases__)]
    found = [*_of_attributes(value), (type(value), NOWHERE)]
    return found + _nowhere(gc.get_referents(value)) if hidden else found


def _of_wrapper(value: Any, is_opaque: Callable[[Any], bool]) -> list[Reference]:
    """Return the functions of the program that a function or an object of a library calls.

    `remat.checkpoint(fn)` has it as `__wrapped__`, `np.vectorize(fn)` as another attribute,
    `autograd.grad(fn)` in its closure.
    """
    table = getattr(value, "__dict__", None)
    if isinstance(value, type) or not isinstance(table, dict):
        return []
    inside = [(part, Attribute(value, name)) for name, part in list(table.items())]
    for cell in getattr(value, "__closure__", None) or ():
        inside += _content_of(cell)
    return [
        (part, place)
        for part, place in inside
        if place.key == "__wrapped__" or _is_of_program(part, is_opaque)
    ]


def _is_of_program(value: Any, is_opaque: Callable[[Any], bool]) -> bool:
    if isinstance(value, functools.partial):
        return _is_of_program(value.func, is_opaque)
    if isinstance(value, types.MethodType):
        return _is_of_program(value.__func__, is_opaque)
    return isinstance(value, types.FunctionType) and not is_opaque(value)


def _content_of(cell: types.CellType, name: str = "") -> list[tuple[Any, Attribute]]:
    try:
        return [(cell.cell_contents, Attribute(cell, "cell_contents", name))]
    except ValueError:  # a name that has no value yet
        return []


def _nowhere(values: Iterable[Any]) -> list[Reference]:
    return [(value, NOWHERE) for value in values]


def _of_tuple(value: Any) -> list[Reference]:
    parts = [(part, FixedPart(value, f"[{i}]")) for i, part in enumerate(value)]
    return [*parts, (type(value), NOWHERE)]


def _of_partial(value: functools.partial[Any]) -> list[Reference]:
    args = [(arg, FixedPart(value, f".args[{i}]")) for i, arg in enumerate(value.args)]
    keywords = [(arg, FixedPart(value, f".{name}")) for name, arg in value.keywords.items()]
    return [(value.func, FixedPart(value, "")), *args, *keywords]


def _of_method(value: types.MethodType) -> list[Reference]:
    return [
        (value.__self__, FixedPart(value, "", type(value.__self__).__name__)),
        (value.__func__, FixedPart(value, "")),
    ]


def _of_list(value: Any) -> list[Reference]:
    return [(part, Item(value, i)) for i, part in _entries(enumerate(value), len(value))]


def _of_dict(value: dict[Any, Any]) -> list[Reference]:
    items = list(value.items())
    return [(part, Item(value, key)) for key, part in _entries(items, len(items))]


def _entries(pairs: Iterable[tuple[Any, Any]], count: int) -> Iterable[tuple[Any, Any]]:
    """Leave out the scalars of a long container: they are data."""
    if count <= _MANY:
        return pairs
    return ((key, value) for key, value in pairs if not isinstance(value, _SCALARS))


def _of_attributes(value: Any) -> list[Reference]:
    return [(part, Attribute(value, name)) for name, part in _attributes(value)]


_CONTAINERS: list[tuple[Any, Callable[[Any], list[Reference]]]] = [
    (_SCALARS, lambda value: []),
    (tuple, _of_tuple),
    (functools.partial, _of_partial),
    (types.MethodType, _of_method),
    (types.BuiltinMethodType, lambda value: _nowhere((value.__self__,))),
    (staticmethod | classmethod, lambda value: _nowhere((value.__func__,))),
    (property, lambda value: _nowhere((value.fget,))),
    (functools.cached_property, lambda value: _nowhere((value.func,))),
    (_LISTS, _of_list),
    (dict, _of_dict),
    (set | frozenset, _nowhere),
    (slice, lambda value: _nowhere((value.start, value.stop, value.step))),
    (BaseException, lambda value: [*_nowhere(value.args), *_of_attributes(value)]),
    (types.MappingProxyType, lambda value: _nowhere(value.values())),
    (_VIEWS_OF_DICTS, _nowhere),
    (types.CellType, lambda value: list(_content_of(value))),
]


def _of_function(function: types.FunctionType) -> list[Reference]:
    found: list[Reference] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        found += _content_of(cell, name)
    if function.__defaults__:
        found.append((function.__defaults__, Attribute(function, "__defaults__")))
    found += [
        (value, Item(table, key, f"{function.__name__}.{key}"))
        for table in (function.__kwdefaults__ or {}, function.__dict__)
        for key, value in list(table.items())
    ]
    return found + _of_globals(function)


def _of_globals(function: types.FunctionType) -> list[Reference]:
    """Return the globals that the code names, and of modules of the program what it may ask for."""
    found: list[Reference] = []
    table, names = function.__globals__, names_in(function.__code__)
    for name in sorted(names & table.keys()):
        value = table[name]
        found.append((value, Item(table, name, name)))
        if isinstance(value, types.ModuleType) and not is_library(value.__name__.partition(".")[0]):
            parts = [inner for inner in names if hasattr(value, inner)]
            found += [(getattr(value, inner), Attribute(value, inner)) for inner in parts]
    return found


@functools.lru_cache(maxsize=256)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in some code, and in functions defined inside."""
    inner = (names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            is_private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{slot}" if is_private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def find_within(
    value: Any, is_wanted: Callable[[Any], bool], known: Container[int] = ()
) -> tuple[Any] | None:
    """Return the first of what an object holds that is wanted, if any.

    Searched are its attributes, whatever its class, and what those refer to; not classes, globals
    of functions, and objects that are `known`, by their ids.

    >>> import argparse
    >>> find_within(argparse.Namespace(h=[2.0]), lambda part: isinstance(part, float))
    (2.0,)
    """
    seen: dict[int, Any] = {}  # which keeps them alive: ids are unique only among what exists
    work = [value]
    if id(value) not in known and isinstance(getattr(value, "__dict__", None), dict):
        work.append(value.__dict__)
    while work:
        part = work.pop()
        if is_wanted(part):
            return (part,)
        if isinstance(part, (type, *_SCALARS)) or id(part) in seen or id(part) in known:
            continue
        seen[id(part)] = part
        if getattr(getattr(part, "dtype", None), "hasobject", False):  # an array of objects
            work += list(part.flat)
        work += [inner for inner, place in references(part) if not _is_global(place, part)]
    return None


def _is_global(place: Place, function: Any) -> bool:
    table = getattr(function, "__globals__", place)
    return place.owner is table or isinstance(place.owner, types.ModuleType)


def is_lazy(value: Any) -> bool:
    """Return whether something computes when it is asked: a generator, a `map`, a coroutine."""
    abc = collections.abc
    return isinstance(value, abc.Iterator | abc.AsyncIterator | abc.Coroutine)


# -- everything in reach ---------------------------------------------------------------------------


class Walk:
    """Goes through everything that some values reach, each object once, and knows its name.

    Scalars are visited at each of their places. `limit` objects are enough: `is_complete` says
    whether there were no more.

    >>> layers = [{"calls": 3}]
    >>> walk = Walk([lambda: layers], is_opaque=lambda value: isinstance(value, type))
    >>> [(value, walk.name(place)) for value, place in walk if value == 3]
    [(3, "layers[0]['calls']")]
    """

    def __init__(
        self,
        roots: Iterable[Any],
        is_opaque: Callable[[Any], bool] = is_library_object,
        *,
        hidden: bool = False,
        limit: int | None = None,
    ) -> None:
        self.is_complete = True
        self._roots = list(roots)
        self._is_opaque = is_opaque
        self._hidden = hidden
        self._limit = limit
        self._found_at: dict[int, Place] = {}  # where the walk came first upon an object
        self._alive: list[Any] = []  # ids are unique only among objects that exist

    def __iter__(self) -> Iterator[Reference]:
        """Generate values, each with a place; what is opaque is generated, but not followed."""
        work = _nowhere(reversed(self._roots))
        while work:
            value, place = work.pop()
            if isinstance(value, _SCALARS):
                yield value, place
                continue
            if id(value) in self._found_at:
                continue
            if self._limit is not None and len(self._found_at) >= self._limit:
                self.is_complete = False
                return
            self._found_at[id(value)] = place
            self._alive.append(value)
            yield value, place
            work += reversed(references(value, self._is_opaque, hidden=self._hidden))

    def name(self, place: Place) -> str:
        """Name a place by the way that the walk took to it: "model.layers[0].calls"."""
        return name_of(place, self._found_at)


def name_of(place: Place, found_at: dict[int, Place]) -> str:
    """Name a place; `found_at` says where its owner was found, and the owner of that."""
    name, path = place.name, ""
    while not name:
        if place is NOWHERE:
            return "something"
        owner, path = place.owner, place.suffix + path
        place = found_at.get(id(owner), NOWHERE)
        name = place.name
        if not name and id(place.owner) not in found_at:  # the function itself, `self`
            name = getattr(owner, "__name__", type(owner).__name__)
    return name + path
