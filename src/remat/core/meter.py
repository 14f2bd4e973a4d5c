"""Counts the bytes of memory that are alive, and the most that were at a time."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any
from weakref import ref

from .engine import Memory

__all__ = ["Meter"]


class Meter:
    """Counts memory by key, each once; it holds none of it.

    >>> meter = Meter()
    >>> meter.put("a", 10), meter.put("b", 5), meter.take("a"), meter.put("b", 5)
    (None, None, None, None)
    >>> meter.live, meter.peak
    (5, 15)
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.curve: list[int] = []  # what was alive whenever something was added
        self._counted: dict[Hashable, tuple[int, int]] = {}  # how often it was put, and bytes
        self._watched: dict[Hashable, ref[Any]] = {}

    def put(self, key: Hashable, nbytes: int) -> None:
        """Count memory; what is put several times counts until it is taken as often."""
        times, known = self._counted.get(key, (0, nbytes))
        self._counted[key] = times + 1, known
        if not times:
            self.live += nbytes
            self.peak = max(self.peak, self.live)

    def take(self, key: Hashable) -> None:
        """Take back one `put`; without effect for what was never put."""
        times, nbytes = self._counted.pop(key, (0, 0))
        if times > 1:
            self._counted[key] = times - 1, nbytes
        else:
            self.live -= nbytes

    def add(self, memory: Memory | None) -> bool:
        """Count memory until it is freed; return whether it was not counted before."""
        if memory is None or memory.key in self._watched:
            return False
        key, owner, nbytes = memory
        self._watched[key] = ref(owner, partial(_freed, ref(self), key))
        self.put(key, nbytes)
        self.curve.append(self.live)
        return True

    def has(self, memory: Memory | None) -> bool:
        """Return whether memory is counted until it is freed."""
        return memory is not None and memory.key in self._watched

    def remove(self, memory: Memory | None) -> None:
        """Count memory no longer that was added."""
        if memory is not None:
            self._remove(memory.key)

    def note_peak(self, nbytes: int) -> None:
        """Count memory that a kernel had besides, while it made what was counted last."""
        self.peak = max(self.peak, self.live + nbytes)

    def _remove(self, key: Hashable) -> None:
        if self._watched.pop(key, None) is not None:
            self.take(key)


def _freed(meter: ref[Meter], key: Hashable, _: Any) -> None:
    if (counting := meter()) is not None:
        counting._remove(key)
