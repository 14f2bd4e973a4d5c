"""The variables of a loop as a state, and back.

A loop runner wants a state of arrays whose structure stays the same. So the state of a `Frame` is a
flat tuple: the arrays, empty places for more of them, and one `Static` leaf with all the rest,
which also says where each array belongs. If all variables are arrays and nothing else has to be
known, the state of a `BareFrame` is just these arrays.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

from .identity import NO_TOKENS, Origins
from .kept import aliased, loses_gradients
from .layouts import ATOMS, UNBOUND, Static, take_apart
from .protocols import Place, Values

__all__ = ["BareFrame", "Frame"]

_EMPTY = 0  # in the place of an array
_NEW = ("new",)  # the token of an array that a step has made
_UNKNOWN = ("unknown",)


class Frame:
    """The variables of one run of a loop. It does not change while the loop runs."""

    __slots__ = (
        *("_api", "_at", "_changed", "_owns_reads", "_items", "_last", "_numbers", "_origins"),
        *("_outputs", "_room", "_scans", "_vetted", "unbound"),
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
        origins: Origins,
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
        self._origins = origins
        self._vetted: dict[int, Any] = {}  # objects that hold no arrays
        self._at = at

    # -- for generated code --------------------------------------------------------------------

    def open(self, state: Any) -> Sequence[Any]:
        """Return the values of the variables; what a step changes in place is its own."""
        static, origins = state[-1], self._origins
        arrays, others = origins.begin(state, static.tokens), static.others
        values: Sequence[Any] = static.layout.put_together(arrays, others)
        if self._changed:
            private = self._private(values)
            arrays = [private.get(id(each), each) for each in arrays]
            others = [private.get(id(each), each) for each in others]
            values = static.layout.put_together(arrays, others)
        values = origins.begin_containers(values, static.tokens)
        return values if self._outputs is None else values[: self._outputs.first_window]

    def close(
        self,
        state: Any,
        leaves_by: int,
        outputs: tuple[Any, ...],
        reads: tuple[Any, ...],
        *values: Any,
    ) -> Any:
        """Return the state after a step, and its outputs if it has any."""
        step = state[-1].step
        self._origins.end(step, reads)
        made: Any = ()
        if self._outputs is not None:
            made = self._outputs.made_by(step, outputs, self.refuse_objects)
            values += self._outputs.windows(outputs)
        if not leaves_by and step + 1 == self._last:
            leaves_by = -1
        new = self._state(values, step + 1, leaves_by)
        self._origins.forget_step()
        return (new, made) if self._scans else new

    def collect(self, place: int, state: Any) -> Any:
        """Return what takes the place of an output while a step runs."""
        windows = (
            self.values(state)[self._outputs.first_window :] if self._outputs.has_windows else ()
        )
        return self._outputs.collector(place, windows)

    def item(self, state: Any, sources: tuple[Any, ...], x: Any) -> Any:
        """Return the item of a `for` loop that belongs to this turn."""
        return self._item(state[-1].step, sources, x)

    def _item(self, step: int, sources: tuple[Any, ...], x: Any) -> Any:
        item = self._items.get(step, sources, x)
        item = aliased(item, self._api) if self._owns_reads else item
        self._origins.item(step, item)
        return item

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

    def initial(self, values: tuple[Any, ...], step: int) -> Any:
        """Return the state before the first turn."""
        return self._state(values, step, 0, is_first=True)

    def _state(
        self, values: tuple[Any, ...], step: int, leaves_by: int, *, is_first: bool = False
    ) -> Any:
        """Return the state before a turn."""
        layout, arrays, others = take_apart(values, self._api, self._numbers)
        if is_first:
            tokens = self._origins.first(values, arrays)
        else:
            tokens = self._origins.tokens(values, arrays, step)
        if not layout.is_plain:
            self._refuse_numbers(arrays)
        if others:
            self.refuse_objects(others)
        empty = self._room - len(arrays)
        if empty < 0:
            raise self._at.error(
                f"its variables hold {len(arrays)} arrays after this turn, with room for "
                f"{self._room}: they held fewer before"
            )
        static = Static(step, leaves_by, layout, others, tokens)
        return (*arrays, *([_EMPTY] * empty), static) if empty else (*arrays, static)

    def final(self, state: Any, volatile: Sequence[int]) -> tuple[int, Sequence[Any]]:
        """Return how the loop was left, and the values of its variables.

        The function may write to the arrays in those that are `volatile`.
        """
        static, origins = state[-1], self._origins
        arrays = origins.final(state, static.tokens)
        values: Sequence[Any] = static.layout.put_together(arrays, static.others)
        if volatile:
            origins.own(values, volatile)
            arrays = origins.final(state, static.tokens)
            values = static.layout.put_together(arrays, static.others)
        values = origins.containers(values, static.tokens)
        if self._outputs is not None:
            self._outputs.deliver(origins)
            values = values[: self._outputs.first_window]
        return static.leaves_by, values

    def values(self, state: Any) -> Sequence[Any]:
        static = state[-1]
        values: Sequence[Any] = static.layout.put_together(state, static.others)
        return values

    def refuse_objects(self, others: Sequence[Any]) -> None:
        """Refuse new objects that hold arrays: no gradient would flow through them."""
        for leaf in others:
            if type(leaf) in ATOMS or self._vetted.get(id(leaf), self) is leaf:
                continue
            if loses_gradients(leaf, self._api):
                raise self._at.error(
                    f"a turn gives a {type(leaf).__name__} that holds arrays, or makes some; give "
                    "an array or a tuple, list, dict or dataclass of them"
                )
            self._vetted[id(leaf)] = leaf

    def _refuse_numbers(self, arrays: Sequence[Any]) -> None:
        if self._numbers:
            return
        for leaf in arrays:
            if self._api.is_traced_number(leaf):
                raise self._at.error(
                    "a variable holds a Python number that has come to depend on what is "
                    "differentiated; begin with np.float64(…) instead"
                )

    def _private(self, values: Sequence[Any]) -> dict[int, Any]:
        """Copy what a step changes; return the copies by the identity of the originals."""
        found: dict[int, Any] = {}
        for value in (values[place] for place in self._changed):
            if id(value) in found or isinstance(value, list | dict | deque):
                continue  # (lists are put together for each step)
            is_array = self._api.is_array_type(type(value))
            found[id(value)] = self._origins.copied(value) if is_array else copy.copy(value)
        return found


class BareFrame(Frame):
    """The only variable of a loop, an array, where no step needs to know anything else."""

    __slots__ = ("_copy", "_initial", "_last_new")
    is_bare = True

    def __init__(self, api: Values, **facts: Any) -> None:
        super().__init__(api, **facts)
        self._copy: Any = None  # that the step changes
        self._last_new: Any = None  # the token of what the last step gave that was not its own
        self._initial: Any = None

    def open(self, state: Any) -> Sequence[Any]:
        self._origins.begin((), NO_TOKENS)
        if not self._changed:
            return (state,)
        self._copy = self._origins.copied(state)
        return (self._copy,)

    def close(
        self,
        state: Any,
        leaves_by: int,
        outputs: tuple[Any, ...],
        reads: tuple[Any, ...],
        *values: Any,
    ) -> Any:
        (value,) = values
        if value is not state:
            self._origins.read_by_step(reads)
        self._note(state, value)
        self._origins.tokens(values, values, 0)
        self._origins.forget_step()
        self._copy = None
        # Small steps are run by the thousand.
        if not self._api.is_plain_array_type(type(value)):
            self._check(values)
        return (value, ()) if self._scans else value

    def _note(self, state: Any, value: Any) -> None:
        """Note whether a step gives what it began with, an object from outside, or a new one."""
        if value is state or (value is self._copy and not self._origins.is_written(value)):
            if self._last_new is not None and self._last_new[0] == "item":
                self._last_new = _UNKNOWN  # of which turn, nobody knows here
            return
        self._last_new = self._origins.outside(value) or _NEW

    def _check(self, values: tuple[Any, ...]) -> None:
        layout, arrays, others = take_apart(values, self._api, self._numbers)
        if others or layout.structure is not None:
            raise self._at.error("a variable that held an array holds none after this turn")
        self._refuse_numbers(arrays)

    def item(self, state: Any, sources: tuple[Any, ...], x: Any) -> Any:
        return self._item((self._last or 1) - 1, sources, x)

    def example(self, state: Any) -> Any:
        return state

    def initial(self, values: tuple[Any, ...], step: int) -> Any:
        self._check(values)
        (self._initial,) = values
        return self._initial

    def final(self, state: Any, volatile: Sequence[int]) -> tuple[int, Sequence[Any]]:
        if self._last_new is None:
            return 0, (self._initial,)
        if self._last_new is _UNKNOWN:
            raise self._at.error("a turn hands on what the loop iterates over; hand on a copy")
        value = self._origins.from_outside(self._last_new)
        if value is None:
            value = self._api.copied(state) if volatile else state
        return 0, (value,)
