"""Counts the bytes of arrays that are alive."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np

from ..array_function import memory_of

__all__ = ["Meter"]


class Meter:
    """The memory that the activations of a pass take, from moment to moment."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.peak = 0
        self.curve: list[int] = []
        self._alive: dict[int, Any] = {}  # by id of the array that owns the memory

    def add(self, array: Any) -> None:
        """Count the memory of an array, once, until it is freed."""
        owner = memory_of(array)
        if not isinstance(owner, np.ndarray) or id(owner) in self._alive:
            return
        gone = partial(_freed, weakref.ref(self), id(owner), owner.nbytes)
        self._alive[id(owner)] = weakref.ref(owner, gone)
        self._note(owner.nbytes)

    def freed(self, key: int, nbytes: int) -> None:
        del self._alive[key]
        self._note(-nbytes)

    def _note(self, change: int) -> None:
        self.nbytes += change
        self.peak = max(self.peak, self.nbytes)
        self.curve.append(self.nbytes)


def _freed(meter: weakref.ref[Meter], key: int, nbytes: int, _: Any) -> None:
    counting = meter()
    if counting is not None:
        counting.freed(key, nbytes)
