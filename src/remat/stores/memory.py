"""Checkpoints in memory, as they are."""

from __future__ import annotations

from typing import Any

from .base import Arrays, CheckpointsByKey, distinct

__all__ = ["MemoryCheckpoints", "MemoryStore"]


class MemoryStore:
    """Keeps checkpoints in memory as they are: the default, exact and without overhead."""

    on_disk = False

    def open(self, arrays: Arrays) -> MemoryCheckpoints:
        """Return the checkpoints of one pass: none yet."""
        return MemoryCheckpoints(arrays)

    def __repr__(self) -> str:
        return "MemoryStore()"


class MemoryCheckpoints(CheckpointsByKey[list[Any]]):
    exact = True
    in_memory = True
    error = 0.0

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        self._arrays = arrays

    @property
    def nbytes(self) -> int:
        return sum(map(self._nbytes_of, self._held.values()))

    def _nbytes_of(self, leaves: list[Any]) -> int:
        return sum(map(self._arrays.nbytes, distinct(leaves)[0]))

    def put(self, key: int, leaves: list[Any]) -> None:
        self._held[key] = list(leaves)

    def get(self, key: int) -> list[Any]:
        return list(self._held[key])
