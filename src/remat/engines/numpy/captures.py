"""What a function closes over: traced arrays whose gradient is wanted, random generators, numbers.

A step is to run on raw arrays when nothing is recorded, and on boxes of its own trace when it is.
So the places that refer to a traced array (closure cells, defaults, list and dict entries,
attributes, globals that the code names) are found once, and their contents exchanged while the
step runs. The function itself, its identity and its side effects stay what they are.

What a function leaves behind in such places is looked at, too. A memo that was filled while
nothing was recorded would be a constant later on, and a list of losses would hold plain numbers:
both would lose gradients in silence, so both are errors. A number that changes (a counter) is
only remembered: most do no harm, and are asked for where nothing else shows that they do none.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import isbox

from ...errors import RecomputeMismatchError, UnsupportedError
from .randomness import GENERATORS
from .slots import GONE, Slots, are, group

__all__ = ["Captures", "capture"]

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_NUMBERS = (bool, int, float, complex, np.generic)
_LISTS = (list, collections.deque)
_WALKED_STANDARD_TYPES = (types.SimpleNamespace, collections.UserDict, collections.UserList)
_CachedFunction = type(functools.lru_cache(lambda: None))
# Nobody hides a traced array inside these, and their objects refer to half the world.
_FRAMEWORKS = {
    *("numpy", "autograd", "scipy", "pandas", "matplotlib", "torch", "jax", "jaxlib", "rich"),
    *("optree", "pytest", "_pytest", "hypothesis", "remat"),
}
_STANDARD_LIBRARY = Path(os.__file__).parent


class _Place(NamedTuple):
    """Somewhere that a value is referred to; of this class if it cannot be exchanged there."""

    owner: Any = None
    key: Any = None
    name: str = ""  # of a variable; other places are named after their owner

    def get(self) -> Any:
        return GONE

    def put(self, value: Any) -> None:
        pass

    @property
    def suffix(self) -> str:
        return ""


class _Item(_Place):
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


class _Attribute(_Place):
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


_NOWHERE = _Place()


def _is_item(place: Any) -> bool:
    return isinstance(place, _Item)


class _Change(NamedTuple):
    """A number that is no longer what it was."""

    place: _Place
    before: Any
    after: Any


class Captures:
    """The traced arrays that functions close over, and the places that refer to them."""

    def __init__(self, holders: Sequence[list[Any]] = ()) -> None:
        self.boxes: list[Any] = []  # or arrays, if those were asked for
        self.buffers: list[Any] = []  # arrays of whole numbers and the like
        self.generators: list[Any] = []
        self.found_at: dict[int, _Place] = {}  # where the search came first upon an object
        self._holders = holders
        self._places: list[tuple[_Place, Any]] = []  # and what stands there
        self._slots: list[Slots] | None = None
        self._prepared: list[tuple[Sequence[Any], list[list[Any]]]] = []  # for the last `values`
        self._numbers: dict[int, int] = {}
        self._known: dict[Any, Any] = {}
        self._watched: dict[Any, tuple[_Place, Any]] = {}  # numbers, as they were when found
        self._change: _Change | None = None

    @contextmanager
    def filled(self, values: Sequence[Any]) -> Iterator[None]:
        """Put `values` in the place of the boxes for a while."""
        if self._slots is None:
            self._slots = group(self._places, _is_item)
        slots, contents = self._slots, self._contents(self._slots, values)
        before = [slot.get() for slot in slots]
        for slot, content, old in zip(slots, contents, before, strict=True):
            slot.put(content, old)
        inside = [slot.get() for slot in slots]
        changed = False
        try:
            yield
            changed = not all(are(slot.get(), old) for slot, old in zip(slots, inside, strict=True))
        finally:
            for slot, old in zip(slots, before, strict=True):
                slot.put(old, old)
        if changed:
            raise UnsupportedError(
                "the function replaces a traced value that it closes over; what changes from call "
                "to call belongs into the state (or the inputs and results) of the function"
            )

    def _contents(self, slots: list[Slots], values: Sequence[Any]) -> list[list[Any]]:
        """Return what to put into the slots; the same `values` come again with every step."""
        for known, contents in self._prepared:
            if known is values:
                return contents
        contents = [[self._substitute(o, values) for o in slot.originals] for slot in slots]
        self._prepared = [(values, contents), *self._prepared[:1]]  # boxes, and plain arrays
        return contents

    def accept_constants(self) -> None:
        """After a recorded run: what was left behind and is not traced is a constant."""
        for key, value in self._left_behind():
            if isbox(value) or isinstance(value, str):  # nobody sees what is in a functools cache
                raise _left(value)
            self._known[key] = value

    def refuse_leftovers(self) -> None:
        """Refuse numbers that the function has left behind in what it closes over."""
        for _, value in self._left_behind():
            raise _left(value)

    def refuse_changed_number(self, what: str, remedy: str) -> None:
        """Refuse a number that has changed, where results cannot show that it does no harm."""
        change = self._changed_number()
        if change is not None:
            after = "gone" if change.after is GONE else repr(change.after)
            raise RecomputeMismatchError(
                f"{what} was run again, and whether it did the same cannot be seen: zeros agree "
                f"whatever they are multiplied by, and {self._name(change.place)}, a number that "
                f"it closes over, was {change.before!r} and then {after}. {remedy}"
            )

    def _changed_number(self) -> _Change | None:
        for place, before in self._watched.values():
            if self._change is not None:
                break  # once is enough: a switch may be back where it was
            now = place.get()
            if now is not before and repr(now) != repr(before):  # NaN is written alike
                self._change = _Change(place, before, now)
        return self._change

    def _name(self, place: _Place) -> str:
        """Name a place by the way that the search took to it: "model.layers[0].calls"."""
        name, way = place.name, ""
        while not name:
            if place is _NOWHERE:
                return "something"
            owner, way = place.owner, place.suffix + way
            place = self.found_at.get(id(owner), _NOWHERE)
            name = place.name
            if not name and id(place.owner) not in self.found_at:  # the function itself, `self`
                name = getattr(owner, "__name__", type(owner).__name__)
        return name + way

    def _left_behind(self) -> list[tuple[Any, Any]]:
        now = capture(self._holders)
        self._watched = now._watched | self._watched
        self.found_at |= now.found_at
        self._changed_number()
        return [(k, v) for k, v in now._known.items() if self._known.get(k, GONE) is not v]

    def _substitute(self, original: Any, values: Sequence[Any]) -> Any:
        """Rebuild what stood in a place: a box, or a tuple or partial with boxes in it."""
        number = self._numbers.get(id(original))
        if number is not None:
            return values[number]
        if isinstance(original, functools.partial):
            return functools.partial(
                self._substitute(original.func, values),
                *self._substitute(original.args, values),
                **{k: self._substitute(v, values) for k, v in original.keywords.items()},
            )
        if isinstance(original, tuple):
            parts = [self._substitute(part, values) for part in original]
            if hasattr(original, "_fields"):
                return type(original)(*parts)
            return type(original)(parts) if type(original) is not tuple else tuple(parts)
        return original

    def note(self, box: Any) -> None:
        if id(box) not in self._numbers:
            self._numbers[id(box)] = len(self.boxes)
            self.boxes.append(box)

    def place(self, place: _Place, original: Any) -> None:
        self._places.append((place, original))
        self._slots = None

    def names(self) -> list[str]:
        """Name every box by a variable, an attribute or an entry that refers to it."""
        found = {id(original): place for place, original in reversed(self._places)}
        return [self._name(found.get(id(box), _NOWHERE)) for box in self.boxes]

    def numbers(self) -> dict[Any, Any]:
        """Return the numbers that the functions close over, as they are now, by place."""
        return {key: place.get() for key, (place, _) in self._watched.items()}

    def set_numbers_back(self) -> None:
        """Set them to what they were when they were found."""
        self.put_numbers({key: before for key, (_, before) in self._watched.items()})

    def put_numbers(self, numbers: dict[Any, Any]) -> None:
        """Set them to what `numbers()` has returned before."""
        for key, value in numbers.items():
            place, _ = self._watched[key]
            if value is not GONE and place.get() is not value:
                place.put(value)

    def name_of_number(self, key: Any) -> str:
        return self._name(self._watched[key][0])

    def know(self, value: Any) -> None:
        """Remember a number or an array that is there; held, so that no other takes its id."""
        if isinstance(value, _CachedFunction):
            self._known["cache", id(value)] = sys.intern(f"{value.cache_info().currsize} entries")
        elif isbox(value) or np.asarray(value).dtype.kind in "fc":
            self._known[id(value)] = value
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            self.buffers.append(value)

    def watch(self, place: _Place, number: Any) -> None:
        if place is not _NOWHERE:
            self._watched[id(place.owner), place.key] = place, number


def _left(value: Any) -> UnsupportedError:
    if isinstance(value, str):
        return UnsupportedError(
            "the function fills a functools cache: what was computed while nothing was recorded "
            "would be a constant later on; compute it outside, or without cache"
        )
    kind = "a traced value" if isbox(value) else f"a {type(value).__name__}"
    return UnsupportedError(
        f"the function left {kind} of shape {np.shape(value)} behind in what it closes over (a "
        "list, a dict, an attribute, a cache). Gradients would not flow through it, and a re-run "
        "would leave it once more. Return it instead: as part of the state, or as an output of "
        "remat.checkpointed_scan"
    )


def capture(holders: Sequence[list[Any]], *, arrays: bool = False) -> Captures:
    """Search what stands in `holders`, lists of one function each, for what it closes over.

    With `arrays`, those of floating-point numbers are taken as if they were traced already.
    """
    is_wanted = _is_box_or_floats if arrays else isbox
    found = Captures(holders)
    seen = found.found_at
    work: list[tuple[Any, _Place]] = [(holder[0], _Item(holder, 0)) for holder in holders]
    while work:
        value, place = work.pop()
        if _is_number(value):
            found.watch(place, value)
        if isinstance(value, _ATOMS):
            continue
        if is_wanted(value):
            found.note(value)
            found.know(value)
            found.place(place, value)
        elif isinstance(value, np.ndarray | np.generic):
            found.know(value)
        elif isinstance(value, tuple | functools.partial):
            boxes = list(_inside(value, is_wanted))
            if boxes:
                for box in boxes:
                    found.note(box)
                found.place(place, value)
            work += _children(value)
        elif id(value) not in seen:
            seen[id(value)] = place
            if isinstance(value, GENERATORS):
                found.generators.append(value)
            elif isinstance(value, _CachedFunction):
                found.know(value)
                work.append((value.__wrapped__, _NOWHERE))
            else:
                work += _children(value)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or (isinstance(value, tuple) and all(map(_is_number, value)))


def _is_box_or_floats(value: Any) -> bool:
    return isbox(value) or (type(value) is np.ndarray and value.dtype.kind in "fc")


def _inside(value: Any, is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
    if is_wanted(value):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _inside(part, is_wanted)
    elif isinstance(value, functools.partial):
        yield from _inside((value.func, *value.args, *value.keywords.values()), is_wanted)


def _children(value: Any) -> list[tuple[Any, _Place]]:  # noqa: PLR0912  (one branch a kind)
    """Return what `value` refers to, each with the place where it stands."""
    if isinstance(value, tuple):
        # A box in here is exchanged together with the tuple; anything mutable by itself.
        return [(part, _NOWHERE) for part in (*value, type(value))]
    if isinstance(value, functools.partial):
        return _children((value.func, *value.args, *value.keywords.values()))
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, types.MethodType):
        return [(value.__self__, _NOWHERE), (value.__func__, _NOWHERE)]
    if isinstance(value, types.BuiltinMethodType):
        return [(value.__self__, _NOWHERE)] if isinstance(value.__self__, GENERATORS) else []
    if isinstance(value, staticmethod | classmethod):
        return [(value.__func__, _NOWHERE)]
    if isinstance(value, property):
        return [(value.fget, _NOWHERE)]
    if isinstance(value, functools.cached_property):
        return [(value.func, _NOWHERE)]
    if isinstance(value, _LISTS):
        return [(part, _Item(value, i)) for i, part in enumerate(value)]
    if isinstance(value, dict):
        return [(part, _Item(value, key)) for key, part in value.items()]
    if isinstance(value, type):
        if _is_opaque(value):
            return []
        inside = [(part, _Attribute(value, name)) for name, part in vars(value).items()]
        return inside + [(base, _NOWHERE) for base in value.__bases__]
    if isinstance(value, types.ModuleType) or _is_opaque(type(value)):
        return []
    attributes = [(part, _Attribute(value, name)) for name, part in _attributes(value)]
    return [*attributes, (type(value), _NOWHERE)]


def _of_function(function: types.FunctionType) -> list[tuple[Any, _Place]]:
    if _is_opaque(function):
        return []
    children: list[tuple[Any, _Place]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            children.append((cell.cell_contents, _Attribute(cell, "cell_contents", name)))
        except ValueError:  # a name that has no value yet
            continue
    if function.__defaults__:
        children.append((function.__defaults__, _Attribute(function, "__defaults__")))
    children += [
        (value, _Item(table, key, f"{function.__name__}.{key}"))
        for table in (function.__kwdefaults__ or {}, function.__dict__)
        for key, value in table.items()
    ]
    table, names = function.__globals__, _names_in(function.__code__)
    for name in names & table.keys():
        value = table[name]
        children.append((value, _Item(table, name, name)))
        if isinstance(value, types.ModuleType) and not _is_library(
            value.__name__.partition(".")[0]
        ):
            children += [
                (getattr(value, inner), _Attribute(value, inner))
                for inner in names
                if hasattr(value, inner)
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
        for slot in (slots,) if isinstance(slots, str) else slots:
            hidden = slot.startswith("__") and not slot.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{slot}" if hidden else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
