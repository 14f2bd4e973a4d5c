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

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from autograd.tracer import isbox

from ...errors import UnsupportedError
from ...introspect import (
    GONE,
    NOWHERE,
    Item,
    Place,
    name_of,
    references,
)
from ...loops import ClosedOverNumbers
from ..hidden_results import refuse_hidden
from .randomness import GENERATORS
from .slots import Slots, are, group

__all__ = ["CapturedArrays", "capture", "objects_among", "refuse_traced_inside"]

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_NUMBERS = (bool, int, float, complex, np.generic)
_CachedFunction = type(functools.lru_cache(lambda: None))
_LEAVES = (*_ATOMS, np.generic, np.dtype, type, *GENERATORS)  # hold no arrays of the program


class CapturedArrays:
    """The traced arrays that functions close over, and the places that refer to them."""

    def __init__(self, holders: Sequence[list[Any]] = ()) -> None:
        self.boxes: list[Any] = []  # or arrays, if those were asked for
        self.buffers: list[Any] = []  # arrays of whole numbers and the like
        self.generators: list[Any] = []
        self.found_at: dict[int, Place] = {}  # where the search came first upon an object
        self._holders = holders
        self._places: list[tuple[Place, Any]] = []  # and what stands there
        self._slots: list[Slots] | None = None
        self._prepared: list[tuple[Sequence[Any], list[list[Any]]]] = []  # for the last `values`
        self._positions: dict[int, int] = {}  # of boxes, by id
        self._known: dict[Any, Any] = {}
        self.numbers = ClosedOverNumbers()

    @contextmanager
    def filled(self, values: Sequence[Any]) -> Iterator[None]:
        """Put `values` in the place of the boxes for a while."""
        if self._slots is None:
            self._slots = group(self._places)
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
            if isbox(value) or isinstance(
                value, str
            ):  # the content of a functools cache is not visible
                raise _left(value)
            self._known[key] = value

    def refuse_leftovers(self) -> None:
        """Refuse numbers that the function has left behind in what it closes over."""
        for _, value in self._left_behind():
            raise _left(value)

    def refuse_hidden(self, results: Iterable[Any]) -> None:
        """Refuse results whose arrays would lose their gradient: in an object that is no pytree.

        What the function refers to, or was given, may be returned: that holds nothing new.
        """
        given = {id(holder[0]) for holder in self._holders}
        suspects = [r for r in results if _is_object(r) and id(r) not in given]
        known = capture(self._holders).found_at if suspects else {}
        for result in suspects:
            refuse_hidden(result, _is_traced_or_float, "the function", known)

    def _name(self, place: Place) -> str:
        return name_of(place, self.found_at)

    def _left_behind(self) -> list[tuple[Any, Any]]:
        now = capture(self._holders)
        self.found_at |= now.found_at
        self.numbers.update(now.numbers)
        return [(k, v) for k, v in now._known.items() if self._known.get(k, GONE) is not v]

    def _substitute(self, original: Any, values: Sequence[Any]) -> Any:
        """Rebuild what stood in a place: a box, or a tuple or partial with boxes in it."""
        position = self._positions.get(id(original))
        if position is not None:
            return values[position]
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
        if id(box) not in self._positions:
            self._positions[id(box)] = len(self.boxes)
            self.boxes.append(box)

    def place(self, place: Place, original: Any) -> None:
        self._places.append((place, original))
        self._slots = None

    def names(self) -> list[str]:
        """Name every box by a variable, an attribute or an entry that refers to it."""
        found = {id(original): place for place, original in reversed(self._places)}
        return [self._name(found.get(id(box), NOWHERE)) for box in self.boxes]

    def know(self, value: Any) -> None:
        """Remember a number or an array that is there; held, so that no other takes its id."""
        if isinstance(value, _CachedFunction):
            self._known["cache", id(value)] = sys.intern(f"{value.cache_info().currsize} entries")
        elif isbox(value) or np.asarray(value).dtype.kind in "fc":
            self._known[id(value)] = value
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            self.buffers.append(value)


def objects_among(leaves: Iterable[Any]) -> dict[int, list[Any]]:
    """Return holders for those leaves of a tree, by number, that may refer to arrays."""
    return {i: [leaf] for i, leaf in enumerate(leaves) if _is_object(leaf)}


def refuse_traced_inside(results: Iterable[Any]) -> None:
    """Refuse results that hold traced arrays in an object that is no pytree."""
    for result in results:
        if _is_object(result):
            refuse_hidden(result, isbox, "the function")


def _is_object(leaf: Any) -> bool:
    """Return whether a leaf of a tree may hold arrays."""
    if isinstance(leaf, np.ndarray):
        return bool(leaf.dtype.hasobject)
    return not (isinstance(leaf, _LEAVES) or isbox(leaf))


def _is_traced_or_float(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "fc"
    return type(value) in (float, complex) or isbox(value)


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


def capture(holders: Sequence[list[Any]], *, arrays: bool = False) -> CapturedArrays:
    """Search what stands in `holders`, lists of one function each, for what it closes over.

    With `arrays`, those of floating-point numbers are taken as if they were traced already.
    """
    is_wanted = _is_box_or_floats if arrays else isbox
    found = CapturedArrays(holders)
    seen = found.found_at
    work: list[tuple[Any, Place]] = [(holder[0], Item(holder, 0)) for holder in holders]
    while work:
        value, place = work.pop()
        if _is_number(value):
            found.numbers.add(place, value, functools.partial(name_of, place, seen))
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
            for box in boxes:
                found.note(box)
            if boxes:
                found.place(place, value)
            work += references(value)
        elif id(value) not in seen:
            seen[id(value)] = place
            work += _look_into(value, found)
    return found


def _look_into(value: Any, found: CapturedArrays) -> list[tuple[Any, Place]]:
    """Note an object that is found for the first time; return what it refers to."""
    if isinstance(value, GENERATORS):
        found.generators.append(value)
        return []
    if isinstance(value, _CachedFunction):
        found.know(value)
        return [(value.__wrapped__, NOWHERE)]
    return references(value)


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
