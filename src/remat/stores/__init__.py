"""Where a checkpoint rests: in memory, rounded, or on disk. Knows no engine."""

from __future__ import annotations

from .base import Arrays, Narrow, RoundingShelf, Shelf, Store
from .disk import DiskStore
from .memory import MemoryStore
from .reduced import ReducedPrecisionStore, overflow_error

__all__ = [
    "Arrays",
    "DiskStore",
    "MemoryStore",
    "Narrow",
    "ReducedPrecisionStore",
    "RoundingShelf",
    "Shelf",
    "Store",
    "find_store",
    "overflow_error",
]


def find_store(store: str | Store) -> Store:
    """Read the argument `store`: a name, or a store.

    >>> find_store("bfloat16")
    ReducedPrecisionStore('bfloat16')
    """
    match store:
        case "memory":
            return MemoryStore()
        case "bfloat16" | "float16":
            return ReducedPrecisionStore(store)
        case "disk":
            return DiskStore()
        case str():
            raise ValueError(f'store is "memory", "bfloat16", "float16" or "disk", got {store!r}')
    if isinstance(store, type) or not (hasattr(store, "open") and hasattr(store, "on_disk")):
        raise TypeError(
            'store is "memory", "bfloat16", "float16", "disk", or an object such as '
            f"MemoryStore(), ReducedPrecisionStore() or DiskStore(), got {store!r}"
        )
    return store
