"""What loops have to know of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import NumpyArrays
from .comparing import difference_of

__all__ = ["NumpyLoopArrays"]


class NumpyLoopArrays(NumpyArrays):
    """Tells loops about NumPy arrays."""

    difference = staticmethod(difference_of)

    def as_array(self, leaf: Any) -> Any:
        return np.asarray(leaf)

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        return np.empty(shape, like.dtype)

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any:
        return np.zeros(shape, like.dtype)

    def put(self, stack: Any, value: Any, step: int) -> Any:
        common = np.result_type(stack.dtype, value.dtype)
        if common != stack.dtype:
            stack = stack.astype(common)
        stack[step] = value
        return stack

    def difference_in(self, stack: Any, value: Any, step: int) -> str | None:
        return difference_of(value.astype(stack.dtype), stack[step])

    def is_zero(self, leaf: Any) -> bool:
        return np.size(leaf) > 0 and not np.any(leaf)
