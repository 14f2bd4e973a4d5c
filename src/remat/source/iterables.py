"""What a `for` loop iterates over: turn by turn at first, and entry by entry once it runs as steps.

Only what has entries that can be asked for again, without effects, is run as steps: ranges, lists,
tuples, arrays, views of dicts, and zip, enumerate, reversed and steps of such things. Everything
else (a generator, a file) is iterated as it is.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from .protocols import Values

__all__ = ["Items", "Opaque", "Steps", "items_of", "lazy"]

_SEQUENCES = (range, list, tuple, str, bytes, dict)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


class Steps(Iterable[Any]):
    """An iterable with options for the loop over it."""

    __slots__ = ("iterable", "options")

    def __init__(self, iterable: Iterable[Any], options: dict[str, Any]) -> None:
        self.iterable = iterable
        self.options = options

    def __iter__(self) -> Iterator[Any]:
        items = self.iterable
        return iter(items.native() if isinstance(items, Items) else items)

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self.iterable)  # type: ignore[call-overload, no-any-return]


class Items(ABC):
    """What can be iterated over, or asked for an entry."""

    length: int | None = None  # None: cannot be asked for entries
    needs_step = True  # to find an entry
    what = "zip of unequal lengths"  # in words, if it cannot

    @abstractmethod
    def native(self) -> Iterable[Any]:
        """Return what Python iterates over."""

    def get(self, step: int, sources: tuple[Any, ...], x: Any) -> Any:
        """Return an entry; `sources` and `x` come from `prepare`."""
        raise NotImplementedError

    def prepare(self, first: int, sources: list[Any], scanned: list[Any], api: Values) -> None:
        """Add what entries come from to the sources, or to what a scan hands to each step."""
        raise NotImplementedError

    def entry(self, step: int) -> Any:
        """Return an entry as it is outside of steps."""
        raise NotImplementedError


class Opaque(Items):
    """Something that can just be iterated over."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable
        self.what = type(iterable).__name__

    def native(self) -> Iterable[Any]:
        return self._iterable  # type: ignore[no-any-return]


class _Sequence(Items):
    def __init__(self, sequence: Any, *, is_array: bool = False) -> None:
        self._sequence = sequence
        self._is_array = is_array
        self._place = -1
        self._scanned = -1
        self._now = sequence
        self.length = len(sequence)

    def native(self) -> Iterable[Any]:
        return self._sequence  # type: ignore[no-any-return]

    def prepare(self, first: int, sources: list[Any], scanned: list[Any], api: Values) -> None:
        if self._is_array and api.is_tracked(self._sequence):
            self._scanned = len(scanned)
            self.needs_step = False
            scanned.append(self._sequence[first : self.length])
            return
        self._place = len(sources)
        self._now = _as_it_is_now(self._sequence)
        sources.append(self._now)

    def get(self, step: int, sources: tuple[Any, ...], x: Any) -> Any:
        return x[self._scanned] if self._scanned >= 0 else sources[self._place][step]

    def entry(self, step: int) -> Any:
        return self._now[step]


class _Zip(Items):
    def __init__(self, parts: list[Items], strict: bool) -> None:
        self._parts = parts
        self._strict = strict
        lengths = [part.length for part in parts]
        if lengths and None not in lengths and not (strict and len(set(lengths)) > 1):
            self.length = min(lengths)  # type: ignore[type-var]

    def native(self) -> Iterable[Any]:
        return zip(*(part.native() for part in self._parts), strict=self._strict)

    def prepare(self, first: int, sources: list[Any], scanned: list[Any], api: Values) -> None:
        for part in self._parts:
            _shorten(part, self.length)
            part.prepare(first, sources, scanned, api)
        self.needs_step = any(part.needs_step for part in self._parts)

    def get(self, step: int, sources: tuple[Any, ...], x: Any) -> Any:
        return tuple([part.get(step, sources, x) for part in self._parts])

    def entry(self, step: int) -> Any:
        return tuple([part.entry(step) for part in self._parts])


class _Enumerate(Items):
    def __init__(self, part: Items, start: Any) -> None:
        self._part = part
        self._start = start
        self.length = part.length

    def native(self) -> Iterable[Any]:
        return enumerate(self._part.native(), self._start)

    def prepare(self, first: int, sources: list[Any], scanned: list[Any], api: Values) -> None:
        _shorten(self._part, self.length)
        self._part.prepare(first, sources, scanned, api)

    def get(self, step: int, sources: tuple[Any, ...], x: Any) -> Any:
        return self._start + step, self._part.get(step, sources, x)

    def entry(self, step: int) -> Any:
        return self._start + step, self._part.entry(step)


class _Reversed(Items):
    def __init__(self, sequence: Any) -> None:
        self._sequence = sequence
        self._place = -1
        self.length = self._length = len(sequence)

    def native(self) -> Iterable[Any]:
        return reversed(self._sequence)  # type: ignore[no-any-return]

    def prepare(self, first: int, sources: list[Any], scanned: list[Any], api: Values) -> None:
        self._place = len(sources)
        sources.append(_as_it_is_now(self._sequence))

    def get(self, step: int, sources: tuple[Any, ...], x: Any) -> Any:
        return sources[self._place][self._length - 1 - step]

    def entry(self, step: int) -> Any:
        return self._sequence[self._length - 1 - step]


def _shorten(part: Items, length: int | None) -> None:
    part.length = length


def items_of(iterable: Any, api: Values) -> tuple[Items, dict[str, Any]]:
    """Return how to get at the entries of an iterable, and the options that come with it."""
    options: dict[str, Any] = {}
    while isinstance(iterable, Steps):
        options, iterable = {**iterable.options, **options}, iterable.iterable
    if isinstance(iterable, Items):
        return iterable, options
    if api.is_array_type(type(iterable)) and iterable.ndim:
        return _Sequence(iterable, is_array=True), options
    if isinstance(iterable, (*_SEQUENCES, *_VIEWS)) or _is_module_list(iterable):
        return _Sequence(iterable), options
    return Opaque(iterable), options


def _as_it_is_now(sequence: Any) -> Any:
    """Copy what may be changed after the loop, before its steps are run again."""
    is_fixed = isinstance(sequence, tuple | range | str | bytes) or hasattr(sequence, "dtype")
    return sequence if is_fixed else tuple(sequence)


def _is_module_list(value: Any) -> bool:
    """Say whether a value is a ModuleList or the like; theirs are iterated over as lists are."""
    kind = type(value)
    if kind.__module__ != "torch.nn.modules.container":
        return False
    return kind.__name__ in ("ModuleList", "Sequential", "ParameterList")


def lazy(api: Values, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call zip, enumerate, reversed or `steps` so that entries can be asked for."""
    if getattr(function, "makes_steps", False):  # (`steps` itself is not known here)
        return function(*args, **kwargs)
    parts = [items_of(arg, api)[0] for arg in args]
    if function is builtins.zip and _are_known(parts) and not kwargs.keys() - {"strict"}:
        return _Zip(parts, bool(kwargs.get("strict", False)))
    if function is builtins.enumerate and _are_known(parts[:1]) and len(args) + len(kwargs) < 3:
        start = args[1] if len(args) > 1 else kwargs.get("start", 0)
        if type(start) is int:
            return _Enumerate(parts[0], start)
    is_reversed = function is builtins.reversed and len(args) == 1 and not kwargs
    if is_reversed and _has_entries_backward(args[0], api):
        return _Reversed(args[0])
    return function(*(arg.native() if isinstance(arg, Items) else arg for arg in args), **kwargs)


def _are_known(parts: list[Items]) -> bool:
    return bool(parts) and all(part.length is not None for part in parts)


def _has_entries_backward(value: Any, api: Values) -> bool:
    if isinstance(value, range | list | tuple) or _is_module_list(value):
        return True
    # (A tensor has a flipped copy of itself for that.)
    is_array = api.is_array_type(type(value)) and not hasattr(value, "__reversed__")
    return is_array and getattr(value, "ndim", 0) > 0
