"""What a function closes over: traced arrays whose gradient is wanted, and random generators.

A step is to run on raw arrays when nothing is recorded, and on boxes of its own trace when it is.
So the places that refer to a traced array (closure cells, defaults, list and dict entries,
attributes, globals that the code names) are found once, and their contents exchanged while the
step runs. The function itself, its identity and its side effects stay what they are.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from autograd.tracer import isbox

from .randomness import GENERATORS

__all__ = ["Captures", "capture"]

_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, np.generic)
_CONTAINERS = (dict, OrderedDict, defaultdict)
_WALKED_STANDARD_TYPES = (types.SimpleNamespace,)
# Nobody hides a traced array inside these, and their objects refer to half the world.
_FRAMEWORKS = {
    *("numpy", "autograd", "scipy", "pandas", "matplotlib", "torch", "jax", "jaxlib", "rich"),
    *("optree", "pytest", "_pytest", "hypothesis", "remat"),
}
_STANDARD_LIBRARY = Path(os.__file__).parent

Setter = Callable[[Any], None]


class Captures:
    """The traced arrays that functions close over, and the places that refer to them."""

    def __init__(self) -> None:
        self.boxes: list[Any] = []
        self.generators: list[Any] = []
        self._places: list[tuple[Setter, Any]] = []  # how to set it, what stands there
        self._numbers: dict[int, int] = {}

    @contextmanager
    def filled(
        self, values: Sequence[Any], afterwards: Sequence[Any] | None = None
    ) -> Iterator[None]:
        """Put `values` in the place of the boxes for a while, then the boxes or `afterwards`."""
        self.fill(values)
        try:
            yield
        finally:
            self.fill(self.boxes if afterwards is None else afterwards)

    def fill(self, values: Sequence[Any]) -> None:
        for put, original in self._places:
            put(self._substitute(original, values))

    def _substitute(self, original: Any, values: Sequence[Any]) -> Any:
        """Rebuild what stood in a place: a box, or a tuple or partial with boxes in it."""
        if isbox(original):
            return values[self._numbers[id(original)]]
        if isinstance(original, functools.partial):
            return functools.partial(
                self._substitute(original.func, values),
                *self._substitute(original.args, values),
                **{k: self._substitute(v, values) for k, v in original.keywords.items()},
            )
        if isinstance(original, tuple):
            parts = [self._substitute(part, values) for part in original]
            return type(original)(*parts) if hasattr(original, "_fields") else tuple(parts)
        return original

    def note(self, box: Any) -> None:
        if id(box) not in self._numbers:
            self._numbers[id(box)] = len(self.boxes)
            self.boxes.append(box)

    def place(self, put: Setter, original: Any) -> None:
        self._places.append((put, original))


def capture(holders: Sequence[list[Any]]) -> Captures:
    """Search what stands in `holders`, lists of one function each, for what it closes over."""
    found = Captures()
    seen: set[int] = set()
    work: list[tuple[Any, Setter]] = [(holder[0], _item_setter(holder, 0)) for holder in holders]
    while work:
        value, put = work.pop()
        if isinstance(value, _ATOMS):
            continue
        if isbox(value):
            found.note(value)
            found.place(put, value)
        elif isinstance(value, GENERATORS):
            if id(value) not in seen:
                seen.add(id(value))
                found.generators.append(value)
        elif isinstance(value, tuple | functools.partial):
            boxes = list(_boxes_inside(value))
            if boxes:
                for box in boxes:
                    found.note(box)
                found.place(put, value)
            work += _children(value)
        elif id(value) not in seen:
            seen.add(id(value))
            work += _children(value)
    return found


def _boxes_inside(value: Any) -> Iterator[Any]:
    if isbox(value):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _boxes_inside(part)
    elif isinstance(value, functools.partial):
        yield from _boxes_inside((value.func, *value.args, *value.keywords.values()))


def _children(value: Any) -> list[tuple[Any, Setter]]:
    """Return what `value` refers to, each with the way to exchange it."""
    if isinstance(value, tuple):
        # A box in here is exchanged together with the tuple; anything mutable by itself.
        return [(part, _no_place) for part in value if not isinstance(part, _ATOMS)]
    if isinstance(value, functools.partial):
        return _children((value.func, *value.args, *value.keywords.values()))
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, types.MethodType):
        return [(value.__self__, _no_place), (value.__func__, _no_place)]
    if isinstance(value, list | deque):
        return [
            (part, _item_setter(value, i))
            for i, part in enumerate(value)
            if not isinstance(part, _ATOMS)
        ]
    if isinstance(value, _CONTAINERS):
        return [
            (part, _item_setter(value, key))
            for key, part in value.items()
            if not isinstance(part, _ATOMS)
        ]
    if _is_opaque(type(value)):
        return []
    return [(part, _attribute_setter(value, name)) for name, part in _attributes(value)]


def _of_function(function: types.FunctionType) -> list[tuple[Any, Setter]]:
    if _is_opaque(function):
        return []
    children: list[tuple[Any, Setter]] = []
    for cell in function.__closure__ or ():
        try:
            children.append((cell.cell_contents, _attribute_setter(cell, "cell_contents")))
        except ValueError:  # a name that has no value yet
            continue
    if function.__defaults__:
        children.append((function.__defaults__, _attribute_setter(function, "__defaults__")))
    children += [
        (value, _item_setter(table, key))
        for table in (function.__kwdefaults__ or {}, function.__dict__)
        for key, value in table.items()
    ]
    names = function.__globals__
    children += [
        (names[name], _item_setter(names, name))
        for name in _names_in(function.__code__)
        if name in names
    ]
    return children


@functools.lru_cache(maxsize=256)
def _names_in(code: types.CodeType) -> frozenset[str]:
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _is_opaque(thing: Any) -> bool:
    if isinstance(thing, type) and (
        dataclasses.is_dataclass(thing) or issubclass(thing, _WALKED_STANDARD_TYPES)
    ):
        return False
    return _is_library((getattr(thing, "__module__", None) or "").partition(".")[0])


@functools.cache
def _is_library(name: str) -> bool:
    """Tell a framework or the standard library from a program's own module of the same name."""
    if name in _FRAMEWORKS:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in sys.stdlib_module_names and (
        file is None or _STANDARD_LIBRARY in Path(file).parents
    )


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _item_setter(container: Any, key: Any) -> Setter:
    return lambda value: container.__setitem__(key, value)


def _attribute_setter(owner: Any, name: str) -> Setter:
    # Not setattr: frozen dataclasses refuse it, and properties would run.
    if isinstance(owner, types.CellType | types.FunctionType):
        return lambda value: setattr(owner, name, value)
    return lambda value: object.__setattr__(owner, name, value)


def _no_place(value: Any) -> None:
    """For what cannot be exchanged by itself, or need not be."""
