"""What a `for` loop iterates over: turn by turn at first, and entry by entry once it runs as steps.

Only what has entries that can be asked for again, without effects, is run as steps: ranges, lists,
tuples, arrays, views of dicts, and zip, enumerate, reversed and steps of such things. Everything
else (a generator, a file) is iterated as it is.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .protocols import Values

__all__ = ["Items", "IterableWithOptions", "items_of", "lazy"]

_SEQUENCES: tuple[type, ...] = (
    *(range, list, tuple, str, bytes, dict),
    *(type({}.keys()), type({}.values()), type({}.items())),
)


class IterableWithOptions(Iterable[Any]):
    """An iterable with options for the loop over it."""

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


class Items:
    """Something that can just be iterated over."""

    length: int | None = None  # None: cannot be asked for entries
    needs_step = True  # to find an entry

    def __init__(self, native: Callable[[], Iterable[Any]], what: str) -> None:
        self.native = native  # returns what Python iterates over
        self.what = what  # in words

    def prepare(self, first: int, sources: list[Any], scanned: list[Any], api: Values) -> None:
        """Add what entries come from to the sources, or to what a scan hands to each step."""
        raise NotImplementedError

    def get(self, step: int, sources: tuple[Any, ...], x: Any) -> Any:
        """Return an entry; `sources` and `x` come from `prepare`."""
        raise NotImplementedError

    def entry(self, step: int) -> Any:
        """Return an entry as it is outside of steps."""
        raise NotImplementedError


class _SequenceItems(Items):
    """The entries of a sequence."""

    def __init__(
        self, native: Callable[[], Iterable[Any]], entries: Any, *, is_array: bool = False
    ) -> None:
        super().__init__(native, type(entries).__name__)
        self._entries = entries
        self._is_array = is_array
        self._place = 0
        self.length = len(entries)

    def prepare(self, first: int, sources: list[Any], scanned: list[Any], api: Values) -> None:
        self.needs_step = not (self._is_array and api.is_tracked(self._entries))
        if not (self._is_array or isinstance(self._entries, tuple | range | str | bytes)):
            self._entries = tuple(self._entries)  # as it is now: it may be changed after the loop
        into = sources if self.needs_step else scanned
        self._place = len(into)
        into.append(self._entries if self.needs_step else self._entries[first : self.length])

    def get(self, step: int, sources: tuple[Any, ...], x: Any) -> Any:
        return sources[self._place][step] if self.needs_step else x[self._place]

    def entry(self, step: int) -> Any:
        return self._entries[step]


class _ZipItems(Items):
    """The entries of several things, in tuples."""

    def __init__(
        self, native: Callable[[], Iterable[Any]], items: list[Items], length: int
    ) -> None:
        super().__init__(native, "zip")
        self._items = items
        self.length = length

    def prepare(self, first: int, sources: list[Any], scanned: list[Any], api: Values) -> None:
        for each in self._items:
            each.length = self.length
            each.prepare(first, sources, scanned, api)
        self.needs_step = any(each.needs_step for each in self._items)

    def get(self, step: int, sources: tuple[Any, ...], x: Any) -> Any:
        return tuple([each.get(step, sources, x) for each in self._items])

    def entry(self, step: int) -> Any:
        return tuple([each.entry(step) for each in self._items])


def items_of(iterable: Any, api: Values) -> tuple[Items, dict[str, Any]]:
    """Return how to get at the entries of an iterable, and the options that come with it."""
    options: dict[str, Any] = {}
    while isinstance(iterable, IterableWithOptions):
        options, iterable = {**iterable.options, **options}, iterable.iterable
    if isinstance(iterable, Items):
        return iterable, options
    is_array = api.is_array_type(type(iterable)) and iterable.ndim > 0
    if is_array or isinstance(iterable, _SEQUENCES) or _is_module_list(iterable):
        return _SequenceItems(lambda: iterable, iterable, is_array=is_array), options
    return Items(lambda: iterable, type(iterable).__name__), options


def _is_module_list(value: Any) -> bool:
    """Say whether a value is a ModuleList or the like; theirs are iterated over as lists are."""
    kind = type(value)
    names = ("ModuleList", "Sequential", "ParameterList")
    return kind.__module__ == "torch.nn.modules.container" and kind.__name__ in names


def lazy(api: Values, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call zip, enumerate, reversed or `steps` so that entries can be asked for."""
    if getattr(function, "makes_steps", False):  # (`steps` itself is not known here)
        return function(*args, **kwargs)
    given = [items_of(arg, api)[0] for arg in args]

    def native() -> Iterable[Any]:
        natives = (arg.native() if isinstance(arg, Items) else arg for arg in args)
        return function(*natives, **kwargs)  # type: ignore[no-any-return]

    lengths = [each.length for each in given]
    if function is builtins.enumerate and given and lengths[0] is not None:
        start = [*args[1:], *kwargs.values()]
        if not start or (len(start) == 1 and type(start[0]) is int):
            begin = start[0] if start else 0
            numbers = range(begin, begin + lengths[0])
            return _ZipItems(
                native, [_SequenceItems(lambda: numbers, numbers), given[0]], lengths[0]
            )
    known = [each for each in lengths if each is not None]
    if function is builtins.zip and known and len(known) == len(lengths):
        if not kwargs.get("strict") or len(set(known)) == 1:
            return _ZipItems(native, given, min(known))
        return Items(native, "zip of unequal lengths")
    if function is builtins.reversed and len(args) == 1 and not kwargs:
        (value,) = args
        # (A tensor has a flipped copy of itself for that.)
        is_array = api.is_array_type(type(value)) and not hasattr(value, "__reversed__")
        if isinstance(value, range | list | tuple) or _is_module_list(value):
            backward = value[::-1] if isinstance(value, range) else tuple(reversed(value))
            return _SequenceItems(native, backward)
        if is_array and getattr(value, "ndim", 0) > 0:
            return _SequenceItems(native, value[::-1], is_array=True)
    return native()
