"""Checkpoints in memory, rounded to two bytes a number."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from ..errors import StoreError
from ..sizes import shown
from .base import Arrays, CheckpointsByKey, Narrow, distinct

__all__ = ["ReducedPrecisionCheckpoints", "ReducedPrecisionStore", "overflow_error"]

_LARGEST: dict[Narrow, float] = {"bfloat16": (2 - 2**-7) * 2.0**127, "float16": 65504.0}


class ReducedPrecisionStore:
    """Keeps checkpoints in memory in bfloat16 or float16: half the bytes of float32.

    Floating and complex arrays are rounded to nearest, ties to even; integers, bools and what is
    not wider than two bytes a number stay as they are. Steps then start from rounded states, so
    gradients are near the exact ones and not equal to them; the largest rounding error of a state
    is what `CheckpointProfiler` reports. bfloat16 has the range of float32 and 3 digits; float16
    has 4 digits and ends at 65504: a larger value is a `StoreError`, never an infinity.

    >>> ReducedPrecisionStore("float16")
    ReducedPrecisionStore('float16')
    """

    on_disk = False

    def __init__(self, dtype: Narrow = "bfloat16") -> None:
        if dtype not in _LARGEST:
            raise ValueError(f'dtype must be "bfloat16" or "float16", got {shown(dtype)}')
        self.dtype: Narrow = dtype

    def open(self, arrays: Arrays) -> ReducedPrecisionCheckpoints:
        """Return the checkpoints of one pass: none yet."""
        return ReducedPrecisionCheckpoints(arrays, self.dtype)

    def __repr__(self) -> str:
        return f"ReducedPrecisionStore({self.dtype!r})"


class _Rounded(NamedTuple):
    """An array that was rounded; anything else is kept as it is."""

    narrow: Any
    kind: Hashable


class _RoundedCheckpoint(NamedTuple):
    parts: list[Any]
    places: list[int]  # of each leaf among the parts
    nbytes: int


class ReducedPrecisionCheckpoints(CheckpointsByKey[_RoundedCheckpoint]):
    exact = False
    in_memory = True

    def __init__(self, arrays: Arrays, dtype: Narrow) -> None:
        super().__init__()
        self.error = 0.0
        self._arrays = arrays
        self._dtype: Narrow = dtype

    @property
    def nbytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self._held.values())

    def put(self, key: int, leaves: list[Any]) -> None:
        checkpoint, error = self._round(leaves)
        self.error = max(self.error, error)
        self._held[key] = checkpoint

    def get(self, key: int) -> list[Any]:
        return self._leaves(self._held[key])

    def as_stored(self, leaves: list[Any]) -> list[Any]:
        """Return leaves as they would come back, without storing them."""
        return self._leaves(self._round(leaves)[0])

    def _round(self, leaves: list[Any]) -> tuple[_RoundedCheckpoint, float]:
        once, places = distinct(leaves)
        parts, total, largest = [], 0, 0.0
        for leaf in once:
            narrow, error = self._arrays.narrowed(leaf, self._dtype)
            largest = max(largest, error)
            total += self._arrays.nbytes(narrow)
            parts.append(leaf if narrow is leaf else _Rounded(narrow, self._arrays.kind(leaf)))
        return _RoundedCheckpoint(parts, places, total), largest

    def _leaves(self, checkpoint: _RoundedCheckpoint) -> list[Any]:
        parts, places, _ = checkpoint
        once = [self._widened(part) if isinstance(part, _Rounded) else part for part in parts]
        return [once[place] for place in places]

    def _widened(self, part: _Rounded) -> Any:
        return self._arrays.widened(part.narrow, part.kind)


def overflow_error(value: float, dtype: Narrow) -> StoreError:
    """Return what to raise if a finite value would become infinite."""
    wider = 'store="bfloat16", store="memory"' if dtype == "float16" else 'store="memory"'
    return StoreError(
        f"a checkpoint holds the value {value:.6g}, and the largest of {dtype} is "
        f'{_LARGEST[dtype]:.6g}: stored so it would become infinite; use {wider} or store="disk"'
    )
