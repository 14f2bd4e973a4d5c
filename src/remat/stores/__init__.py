"""Stores of checkpoints: in memory, at reduced precision, on disk. They know no engine."""

from __future__ import annotations

from ..sizes import did_you_mean, shown
from .base import Arrays, Checkpoints, Narrow, RoundedCheckpoints, Store
from .disk import DiskStore
from .memory import MemoryStore
from .reduced import ReducedPrecisionStore, overflow_error

__all__ = [
    "Arrays",
    "Checkpoints",
    "DiskStore",
    "MemoryStore",
    "Narrow",
    "ReducedPrecisionStore",
    "RoundedCheckpoints",
    "Store",
    "find_store",
    "overflow_error",
]


_NAMES = "memory", "bfloat16", "float16", "disk"


def find_store(store: str | Store) -> Store:
    """Read the argument `store`: a name, or a store.

    >>> find_store("bfloat16")
    ReducedPrecisionStore('bfloat16')
    """
    match store if isinstance(store, str) else None:
        case "memory":
            return MemoryStore()
        case "bfloat16" | "float16" as dtype:
            return ReducedPrecisionStore(dtype)
        case "disk":
            return DiskStore()
        case str() as unknown:
            near = did_you_mean(unknown, _NAMES)
            raise ValueError(
                f'store must be "memory", "bfloat16", "float16" or "disk", got {unknown!r}{near}'
            )
    if isinstance(store, type) or not (hasattr(store, "open") and hasattr(store, "on_disk")):
        raise TypeError(
            'store must be "memory", "bfloat16", "float16", "disk", or an object such as '
            f"MemoryStore(), ReducedPrecisionStore() or DiskStore(), got {shown(store)}"
        )
    return store
