"""Numbers that a step closes over: where states are zero they must not change.

A counter times zeros is zero every time, but its slope is the counter. States are compared when a
step is run again; where these are zeros, a number in reach that has changed is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import RecomputeMismatchError
from ..introspect import GONE, Attribute, Item, Place

__all__ = ["ClosedOverNumbers"]


class _Number(NamedTuple):
    place: Place
    before: Any  # its value when it was found
    name: Callable[[], str]


class ClosedOverNumbers:
    """The numbers that functions refer to, with their values when they were found."""

    def __init__(self) -> None:
        self._found: dict[Any, _Number] = {}  # by place
        self._change: str | None = None  # in words

    def add(self, place: Place, value: Any, name: Callable[[], str]) -> None:
        """Note a number if it is in a place where it can change; `name()` names that place."""
        if isinstance(place, Item | Attribute):
            self._found[id(place.owner), place.key] = _Number(place, value, name)

    def update(self, others: ClosedOverNumbers | None = None) -> bool:
        """Add what another search has found, and say whether any number has changed.

        Once is enough: it may be set back later.
        """
        if others is not None:
            self._found = others._found | self._found
        if self._change is None:
            for place, before, name in self._found.values():
                now = place.get()
                if now is not before and repr(now) != repr(before):  # NaN is written alike
                    now = "gone" if now is GONE else repr(now)
                    self._change = (
                        f"{name()}, a number that it closes over, was {before!r} and then {now}"
                    )
                    break
        return self._change is not None

    @property
    def changed(self) -> bool:
        return self._change is not None

    def refuse_change(self, step: int) -> None:
        """Raise if one has changed, where states cannot show that it makes no difference."""
        if self.update():
            raise RecomputeMismatchError(
                f"step {step} was run again, and whether it did the same cannot be seen: zeros "
                f"agree whatever they are multiplied by, and {self._change}. Keep the number in "
                "the state, take it from the xs of remat.checkpointed_scan, or run no step twice "
                '(schedule="all")'
            )

    # -- as they are now -----------------------------------------------------------------------

    def values(self) -> dict[Any, Any]:
        """Return the values by place."""
        return {key: number.place.get() for key, number in self._found.items()}

    def put(self, values: dict[Any, Any]) -> None:
        """Set them to what `values` has returned before."""
        for key, value in values.items():
            place = self._found[key].place
            if value is not GONE and place.get() is not value:
                place.put(value)

    def restore(self) -> None:
        """Set them to what they were when they were found."""
        self.put({key: number.before for key, number in self._found.items()})

    def name(self, key: Any) -> str:
        return self._found[key].name()
