"""Comparing arrays and numbers bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...loops.differences import same_object

__all__ = ["difference_of"]

_NUMBERS = (np.ndarray, np.generic, bool, int, float, complex)


def difference_of(one: Any, other: Any) -> str | None:
    """Compare bit for bit: NaNs are equal to themselves, 0.0 is not -0.0."""
    if one is other:
        return None
    if not (isinstance(one, _NUMBERS) and isinstance(other, _NUMBERS)):
        return None if same_object(one, other) else f"is {one!r} instead of {other!r}"
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {a.dtype} of shape {a.shape} instead of {b.dtype} of shape {b.shape}"
    if a.dtype.kind not in "biufc" or not a.size:
        return None if same_object(a, b) else f"is {one!r} instead of {other!r}"
    # The bytes of a long double are not all in use.
    padded = a.dtype in (np.longdouble, np.clongdouble)
    if np.array_equal(a, b, equal_nan=True) if padded else np.array_equal(*_bits(a, b)):
        return None
    wrong = a != b
    if not np.any(wrong):
        return "differs in the sign of a zero"
    largest = np.max(np.abs(np.subtract(a, b, dtype=np.complex128)))
    return f"differs in {np.count_nonzero(wrong)} of {a.size} entries, by up to {largest:.3g}"


def _bits(a: Any, b: Any) -> tuple[Any, Any]:
    """Look at two arrays as integers, without a copy where both are laid out alike."""
    if a.flags.f_contiguous and b.flags.f_contiguous:
        a, b = a.T, b.T
    size = a.dtype.itemsize
    kind = np.uint64 if size % 8 == 0 else np.uint32 if size % 4 == 0 else np.uint8
    return np.ravel(a).view(kind), np.ravel(b).view(kind)
