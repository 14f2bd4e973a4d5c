"""Numbers that a step closes over: where states are zero they must not change.

A counter times zeros is zero every time, but its slope is the counter. States are compared when a
step is run again; where these are zeros, a number in reach that has changed is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....errors import RecomputeMismatchError
from ....introspect import GONE, Attribute, Item, Place, Walk

__all__ = ["ClosedOverScalars"]

_KINDS = (int, float, complex)


class ClosedOverScalars:
    """The numbers that a function refers to, with their values when they were found."""

    def __init__(self) -> None:
        self._places: list[tuple[str, Place, Any]] = []
        self._change: str | None = None  # in words

    def add(self, value: Any, place: Place, walk: Walk) -> None:
        """Note a value if it is a number in a place where it can change."""
        if isinstance(value, _KINDS) and isinstance(place, Item | Attribute):
            self._places.append((walk.name(place), place, value))

    def update(self) -> None:
        """Find out whether one has changed; once is enough, it may be set back later."""
        if self._change is None:
            for name, place, before in self._places:
                now = place.get()
                if now is not before and repr(now) != repr(before):
                    now = "gone" if now is GONE else repr(now)
                    self._change = f"{name} was {before!r} and then {now}"
                    break

    @property
    def changed(self) -> bool:
        return self._change is not None

    def check(self, step: int, before: list[Any], after: list[Any]) -> None:
        """Raise if the states around a step are no proof that the change makes no difference."""
        start = [leaf for leaf in before if _counts(leaf)]
        ends = [leaf for leaf in after if _counts(leaf)]
        if any(map(_is_zero, ends)) or (start and all(map(_is_zero, start))):
            raise RecomputeMismatchError(
                f"step {step} was run again, and whether it did the same cannot be seen: zeros "
                f"agree whatever they are multiplied by, and a number that it closes over has "
                f"changed: {self._change}. Keep the number in the state, take it from the xs of "
                'remat.checkpointed_scan, or run no step twice (schedule="all")'
            )


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _is_zero(leaf: Tensor) -> bool:
    return leaf.numel() > 0 and not bool(torch.any(leaf.detach() != 0))
