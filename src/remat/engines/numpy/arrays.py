"""What stores have to know of NumPy arrays: their bytes, their layout, how to round them.

NumPy has no bfloat16, so its numbers are kept as `uint16`: the upper half of a float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...stores import Narrow, overflow_error
from .array_function import plain

__all__ = ["ArrayKind", "NumpyArrays"]

_BLOCK = 1 << 16  # numbers that are rounded at once: their temporaries stay in the cache


@dataclass(frozen=True, slots=True)
class ArrayKind:
    """An array without its values."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: tuple[int, ...]  # the axes, from the longest stride to the shortest
    scalar: bool  # np.float64(3.0), not an array


class NumpyArrays:
    """Tells stores about NumPy arrays."""

    def nbytes(self, leaf: Any) -> int:
        return leaf.nbytes if isinstance(leaf, np.ndarray | np.generic) else 0

    def copied(self, leaf: Any) -> Any:
        value = plain(leaf)
        return value.copy(order="K") if isinstance(value, np.ndarray) else value

    def kind(self, leaf: Any) -> ArrayKind | None:
        # A subclass may be more than its memory (a mask, a file), so it is kept as it is.
        if type(leaf) is not np.ndarray and not isinstance(leaf, np.generic):
            return None
        if leaf.dtype.kind not in "biufcmMSUV" or leaf.dtype.hasobject or not leaf.itemsize:
            return None
        order = tuple(sorted(range(leaf.ndim), key=lambda axis: -abs(leaf.strides[axis])))
        return ArrayKind(leaf.dtype, leaf.shape, order, isinstance(leaf, np.generic))

    def narrowed(self, leaf: Any, dtype: Narrow) -> tuple[Any, float]:
        kind = self.kind(leaf)
        if kind is None or not _is_wider(kind.dtype):
            return leaf, 0.0
        numbers = _real(_flat(leaf, kind))
        narrow = np.empty(numbers.size, np.uint16 if dtype == "bfloat16" else np.float16)
        rounded = _to_bfloat16 if dtype == "bfloat16" else _to_float16
        error = 0.0
        with np.errstate(all="ignore"):
            for block in _blocks(numbers.size):
                error = max(error, _round(numbers[block], narrow[block], rounded))
        if error == np.inf:
            raise overflow_error(_largest_finite(numbers), dtype)
        return narrow, error

    def widened(self, narrow: Any, kind: ArrayKind) -> Any:
        flat = np.empty(narrow.size * _real_type(kind.dtype).itemsize, np.uint8)
        numbers = flat.view(_real_type(kind.dtype))
        for block in _blocks(narrow.size):
            numbers[block] = _wide(narrow[block])
        return _shaped(flat.view(kind.dtype), kind)

    def to_bytes(self, leaf: Any) -> memoryview:
        kind = self.kind(leaf)
        assert kind is not None
        return _flat(leaf, kind).view(np.uint8).data

    def from_bytes(self, data: bytearray | memoryview, kind: ArrayKind) -> Any:
        return _shaped(np.frombuffer(data, kind.dtype), kind)


def _flat(leaf: Any, kind: ArrayKind) -> NDArray[Any]:
    """Return the numbers in the order in which they lie in memory; a copy if there are gaps."""
    in_order: NDArray[Any] = np.asarray(leaf).transpose(kind.order)
    return np.ascontiguousarray(in_order).reshape(-1)


def _shaped(flat: NDArray[Any], kind: ArrayKind) -> Any:
    array = flat.reshape([kind.shape[axis] for axis in kind.order])
    array = array.transpose(np.argsort(kind.order)) if kind.order else array
    return array[()] if kind.scalar else array


def _is_wider(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fc" and _real_type(dtype).itemsize > 2


def _real_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind != "c":
        return dtype
    return np.dtype(f"f{dtype.itemsize // 2}").newbyteorder(dtype.byteorder)


def _real(flat: NDArray[Any]) -> NDArray[Any]:
    return flat.view(_real_type(flat.dtype))


def _blocks(size: int) -> Iterator[slice]:
    for start in range(0, size, _BLOCK):
        yield slice(start, start + _BLOCK)


# -- rounding ----------------------------------------------------------------------------------


def _round(
    exact: NDArray[Any], narrow: NDArray[Any], rounded: Callable[[NDArray[Any]], NDArray[Any]]
) -> float:
    """Round numbers into `narrow`; return the largest error, infinite if one became infinite."""
    narrow[:] = rounded(exact)
    error = np.abs(exact - _wide(narrow))
    largest = float(np.max(error))
    if not np.isnan(largest):
        return largest
    # There is a NaN among the errors: of a NaN, or of an infinity that stayed one.
    return float(np.max(error, where=np.isfinite(exact), initial=0.0))


def _to_float16(exact: NDArray[Any]) -> NDArray[Any]:
    return exact.astype(np.float16)  # directly: NumPy rounds a float64 once


def _to_bfloat16(exact: NDArray[Any]) -> NDArray[Any]:
    single = exact.astype(np.float32)
    bits = single.view(np.uint32)
    if exact.itemsize > 4:
        _undo_first_rounding(exact, single, bits)
    upper = bits >> 16
    # To nearest, ties to even: add just less than a half, and the rest if the last bit is odd.
    rounded = (bits + ((upper & 1) + np.uint32(0x7FFF))) >> 16
    is_nan = np.isnan(single)
    if is_nan.any():  # rounding up might carry a NaN into the sign bit
        rounded[is_nan] = upper[is_nan] | 0x40
    return rounded


def _undo_first_rounding(
    exact: NDArray[Any], single: NDArray[Any], bits: NDArray[np.uint32]
) -> None:
    """Move a float32 that lies half-way between two bfloat16 to where its exact value lies.

    Only there does it matter that a number was rounded to float32 first: rounding keeps the order,
    so a number on one side of the middle stays there or arrives at the middle.
    """
    (ties,) = np.nonzero((bits & 0xFFFF) == 0x8000)
    if ties.size:
        ahead = np.abs(exact[ties]) - np.abs(single[ties])
        # The sign bit stands for itself, so larger bits are a larger magnitude.
        bits[ties] += (ahead > 0).astype(np.uint32) - (ahead < 0).astype(np.uint32)


def _wide(narrow: NDArray[Any]) -> NDArray[Any]:
    if narrow.dtype == np.uint16:
        return (narrow.astype(np.uint32) << 16).view(np.float32)
    return narrow


def _largest_finite(numbers: NDArray[Any]) -> float:
    finite = numbers[np.isfinite(numbers)]
    return float(finite[np.argmax(np.abs(finite))])
