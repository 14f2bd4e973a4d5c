"""A few bytes that stand for a result, to find out whether it is the same again."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

__all__ = ["fingerprint"]


def fingerprint(value: Any) -> Any:
    """Return a few bytes that change if any bit of a result changes."""
    if isinstance(value, tuple):
        return tuple(map(fingerprint, value))
    if isinstance(value, float | complex | np.inexact):
        value = np.asarray(value)  # what is a Python number in a call is NumPy's in a recorded one
    if not isinstance(value, np.ndarray):
        return repr(value)  # NaN is not equal to itself, but written alike
    # Copies of long doubles have other bytes where none are in use.
    data = value.astype(np.complex128) if value.dtype == np.clongdouble else value
    data = data.astype(np.float64) if data.dtype == np.longdouble else data
    digest = hashlib.blake2b(np.ascontiguousarray(data).data, digest_size=16).digest()
    return value.shape, value.dtype.str, digest
