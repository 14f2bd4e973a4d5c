"""What loops have to know of an engine's arrays, beyond what stores have to know."""

from __future__ import annotations

from typing import Any, Protocol

from ..stores import Arrays

__all__ = ["LoopArrays"]


class LoopArrays(Arrays, Protocol):
    """Describes an engine's arrays to loops."""

    def as_array(self, leaf: Any) -> Any:
        """Return an output of a step as an array; it may be a number."""
        ...

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """Return an array of the same kind as another one, with any numbers in it."""
        ...

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any: ...

    def put(self, stack: Any, value: Any, step: int) -> Any:
        """Put a value into a stack, which may have to be of another type, and return it."""
        ...

    def difference(self, one: Any, other: Any) -> str | None:
        """Say how two leaves differ; None if they are the same bit for bit."""
        ...

    def difference_in(self, stack: Any, value: Any, step: int) -> str | None:
        """Say how a value differs from that of the same step in a stack."""
        ...

    def is_zero(self, leaf: Any) -> bool:
        """Say whether an array has entries, and all are zero."""
        ...
