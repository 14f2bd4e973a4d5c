"""The variables of a loop as a state, and back.

A loop runner wants a state of arrays whose structure stays the same. So the state of a `Frame` is a
flat tuple: the arrays, empty places for more of them, and one `Static` leaf with all the rest,
which also says where each array belongs. If all variables are arrays and nothing else has to be
known, the state of a `BareFrame` is just these arrays.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from .kept import aliased
from .layouts import UNBOUND, Static, take_apart
from .protocols import Place, Values

__all__ = ["BareFrame", "Frame"]

_EMPTY = 0  # in the place of an array


class Frame:
    """The variables of one run of a loop. It does not change while the loop runs."""

    __slots__ = (
        *("_api", "_at", "_changed", "_owns_reads", "_items", "_last", "_numbers", "_outputs"),
        *("_room", "_scans", "unbound"),
    )
    is_bare = False

    def __init__(
        self,
        api: Values,
        *,
        room: int,
        numbers: bool,
        changed: tuple[int, ...],
        last: int | None,
        items: Any,
        outputs: Any,
        scans: bool,
        owns_reads: bool,
        at: Place,
    ) -> None:
        self.unbound = UNBOUND
        self._api = api
        self._room = room  # for arrays
        self._numbers = numbers  # whether Python floats count as arrays
        self._changed = changed  # places of variables whose objects steps change
        self._last = last  # the number of turns, if it is known
        self._items = items  # of a `for`
        self._outputs = outputs
        self._scans = scans
        self._owns_reads = owns_reads  # and items
        self._at = at

    # -- for generated code --------------------------------------------------------------------

    def open(self, state: Any) -> Sequence[Any]:
        """Return the values of the variables; what a step changes in place is its own."""
        values = self.values(state)
        if self._changed:
            values = list(values)
            for place in self._changed:
                values[place] = self._private(values[place])
        return values if self._outputs is None else values[: self._outputs.first_window]

    def close(self, state: Any, leaves_by: int, outputs: tuple[Any, ...], *values: Any) -> Any:
        """Return the state after a step, and its outputs if it has any."""
        step = state[-1].step
        made: Any = ()
        if self._outputs is not None:
            made = self._outputs.made_by(step, outputs)
            values += self._outputs.windows(outputs)
        if not leaves_by and step + 1 == self._last:
            leaves_by = -1
        new = self.initial(values, step + 1, leaves_by)
        return (new, made) if self._scans else new

    def collect(self, place: int, state: Any) -> Any:
        """Return what takes the place of an output while a step runs."""
        windows = (
            self.values(state)[self._outputs.first_window :] if self._outputs.has_windows else ()
        )
        return self._outputs.collector(place, windows)

    def item(self, state: Any, sources: tuple[Any, ...], x: Any) -> Any:
        """Return the item of a `for` loop that belongs to this turn."""
        item = self._items.get(state[-1].step, sources, x)
        return aliased(item, self._api) if self._owns_reads else item

    def own(self, *values: Any) -> list[Any]:
        """Return values from outside as parts of the graph of this step."""
        return [aliased(value, self._api) for value in values]

    def is_done(self, state: Any) -> bool:
        return bool(state[-1].leaves_by)

    def idle(self, state: Any) -> Any:
        """Return what a step gives that comes after the end of the loop."""
        return (
            (state, self._outputs.placeholders() if self._outputs else ()) if self._scans else state
        )

    # -- around the steps ----------------------------------------------------------------------

    @property
    def scans(self) -> bool:
        """Whether steps have outputs, or inputs, of their own."""
        return self._scans

    def example(self, state: Any) -> Any:
        """Return an array of a state."""
        return state[0]

    def goes_on(self, state: Any) -> bool:
        return not state[-1].leaves_by

    def initial(self, values: tuple[Any, ...], step: int, leaves_by: int = 0) -> Any:
        """Return the state before a turn."""
        layout, arrays, others = take_apart(values, self._api, self._numbers)
        if not layout.is_plain:
            self._refuse_numbers(arrays)
        empty = self._room - len(arrays)
        if empty < 0:
            raise self._at.error(
                f"its variables hold {len(arrays)} arrays after this turn, with room for "
                f"{self._room}: they held fewer before"
            )
        static = Static(step, leaves_by, layout, others)
        return (*arrays, *([_EMPTY] * empty), static) if empty else (*arrays, static)

    def final(self, state: Any) -> tuple[int, Sequence[Any]]:
        """Return how the loop was left, and the values of its variables."""
        values = self.values(state)
        if self._outputs is not None:
            values = values[: self._outputs.first_window]
        return state[-1].leaves_by, values

    def values(self, state: Any) -> Sequence[Any]:
        static = state[-1]
        values: Sequence[Any] = static.layout.put_together(state, static.others)
        return values

    def _refuse_numbers(self, arrays: Sequence[Any]) -> None:
        if self._numbers:
            return
        for leaf in arrays:
            if self._api.is_traced_number(leaf):
                raise self._at.error(
                    "a variable holds a Python number that has come to depend on what is "
                    "differentiated; begin with np.float64(…) instead"
                )

    def _private(self, value: Any) -> Any:
        if self._api.is_array_type(type(value)):
            return self._api.copied(value)
        if isinstance(value, list | dict):
            return value  # put together for this step
        return copy.copy(value)


class BareFrame(Frame):
    """The variables of a loop that are all arrays, where no step needs to know anything else."""

    __slots__ = ("_is_single",)
    is_bare = True

    def __init__(self, api: Values, **facts: Any) -> None:
        super().__init__(api, **facts)
        self._is_single = self._room == 1

    def open(self, state: Any) -> Sequence[Any]:
        if self._is_single and not self._changed:
            return (state,)
        return super().open(state)

    def close(self, state: Any, leaves_by: int, outputs: tuple[Any, ...], *values: Any) -> Any:
        # One array is the usual case, and small steps are run by the thousand.
        if self._is_single and self._api.is_plain_array_type(type(values[0])):
            return (values[0], ()) if self._scans else values[0]
        new = self.initial(values, 0)
        return (new, ()) if self._scans else new

    def item(self, state: Any, sources: tuple[Any, ...], x: Any) -> Any:
        item = self._items.get(0, sources, x)
        return aliased(item, self._api) if self._owns_reads else item

    def example(self, state: Any) -> Any:
        return state if self._is_single else state[0]

    def initial(self, values: tuple[Any, ...], step: int, leaves_by: int = 0) -> Any:
        layout, arrays, others = take_apart(values, self._api, self._numbers)
        if others or layout.structure is not None:
            raise self._at.error("a variable that held an array holds none after this turn")
        self._refuse_numbers(arrays)
        return arrays[0] if self._is_single else values

    def final(self, state: Any) -> tuple[int, Sequence[Any]]:
        return 0, self.values(state)

    def values(self, state: Any) -> Sequence[Any]:
        return (state,) if self._is_single else state
