"""Access to a region that does not keep it alive: what the scopes of all engines share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["RegionAccess"]


class InspectableRegion(Protocol):
    """A region whose values can be listed, recomputed and dropped."""

    def held(self) -> list[Any]: ...

    def recompute(self) -> list[Any]: ...

    def drop_all(self) -> None: ...


R = TypeVar("R", bound=InspectableRegion)


class RegionAccess(Generic[R]):
    """Refers to a region weakly: only its own backward pass keeps it alive."""

    def __init__(self, region: R | None) -> None:
        self._region: Callable[[], R | None] = (
            (lambda: None) if region is None else weakref.ref(region)
        )

    def held(self) -> list[Any]:
        """Return what the region holds of what was computed in it."""
        region = self._region()
        return [] if region is None else region.held()

    def recompute(self) -> list[Any]:
        """Recompute and return what the region has dropped and backward still needs."""
        region = self._region()
        return [] if region is None else region.recompute()

    def drop(self) -> None:
        """Drop what can be recomputed."""
        region = self._region()
        if region is not None:
            region.drop_all()
