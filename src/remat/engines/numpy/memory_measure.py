"""Measures memory: the bytes that code allocates, and the memory that arrays share."""

from __future__ import annotations

import itertools
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...core.engine import Memory

__all__ = ["held_elsewhere", "memories", "memory_behind", "nbytes", "references", "traced_memory"]

_lock = threading.Lock()
_users = 0  # of a tracemalloc that we have started


@contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """Count the bytes that are allocated; what was switched on is switched off."""
    ours = _start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        if ours:
            _stop()


def _start() -> bool:
    """Return whether we have started tracemalloc; the program may have done so itself."""
    global _users  # noqa: PLW0603  (there is one tracemalloc for all threads)
    with _lock:
        ours = bool(_users) or not tracemalloc.is_tracing()
        if ours and not _users:
            tracemalloc.start()
        _users += ours
    return ours


def _stop() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if not _users:
            tracemalloc.stop()


def nbytes(leaf: Any) -> int:
    return int(getattr(leaf, "nbytes", 0) or np.asarray(leaf).nbytes)


def memories(values: Iterable[Any]) -> dict[Hashable, int]:
    """Return the pieces of memory that arrays stand in: a key for each, and its bytes."""
    owners = [_owner(value) for value in values if isinstance(value, np.ndarray)]
    return {_key(owner): owner.nbytes for owner in owners}


def memory_behind(array: Any) -> Memory:
    """Return the memory that an array is in."""
    owner = _owner(array)
    return Memory(_key(owner), owner, int(owner.nbytes))


def _owner(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


_keys: dict[int, tuple[Any, int]] = {}  # by id: a weak reference, and the number of the memory
_numbers = itertools.count()


def _key(owner: Any) -> Hashable:
    """Return the same key for the same memory, and never that of one that is gone."""
    place = id(owner)
    reference, number = _keys.get(place, (None, 0))
    if reference is None or reference() is not owner:
        number = next(_numbers)
        _keys[place] = weakref.ref(owner, lambda gone: _forget(place, gone)), number
    return "numpy", number


def _forget(place: int, gone: Any) -> None:
    if _keys.get(place, (None, 0))[0] is gone:  # or another array has taken the place already
        del _keys[place]


def references(values: list[Any]) -> list[int]:
    """Count the references to each value. Only differences of two counts mean anything."""
    return [sys.getrefcount(values[i]) for i in range(len(values))]


def held_elsewhere(values: list[Any]) -> list[bool]:
    """Return for each array in a list whether there are other references to it, or to its memory.

    A tape may hold the results of a call (tanh computes its slope from them) or not (sin does
    not), and their bytes are counted once either way.
    """
    array, view = [np.empty(1)], [np.empty(1)[:]]
    alone, base_alone = sys.getrefcount(array[0]), sys.getrefcount(view[0].base)
    found = []
    for i in range(len(values)):
        twice = sum(value is values[i] for value in values) - 1
        held = sys.getrefcount(values[i]) > alone + twice
        if isinstance(values[i], np.ndarray) and values[i].base is not None:
            views = {id(v) for v in values if getattr(v, "base", None) is values[i].base}
            # (No name for the base: it would count.)
            held |= sys.getrefcount(values[i].base) > base_alone + len(views) - 1
        found.append(held)
    return found
