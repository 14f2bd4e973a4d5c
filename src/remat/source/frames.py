"""The variables of a loop as a state, and back.

A loop runner wants a state of arrays whose structure stays the same. Variables hold anything:
arrays, containers of them, numbers, None, objects, or no value at all, and may change from one to
the other. So a state is a flat tuple: the arrays, empty places for more of them, and one `Static`
leaf with all the rest, which also says where each array belongs. If all variables are arrays and
nothing else has to be known, the state is just these arrays.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from .. import trees
from .protocols import Place, Values

__all__ = ["UNBOUND", "Frame", "Kept", "Layout", "Static", "spare_room", "take_apart"]

_EMPTY = 0  # in the place of an array
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_SPARE = 4


class _Unbound:
    """The value of a variable that has none."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<no value>"

    def __reduce__(self) -> str:
        return "UNBOUND"


UNBOUND = _Unbound()


class Layout(NamedTuple):
    """Where arrays and other leaves stand among the leaves of some values."""

    arrays: tuple[int, ...]
    others: tuple[int, ...]
    structure: trees.Structure | None = None  # None: every value is a leaf

    def put_together(self, arrays: Sequence[Any], others: Sequence[Any]) -> Any:
        leaves: list[Any] = [None] * (len(self.arrays) + len(self.others))
        for place, leaf in zip(self.arrays, arrays, strict=False):
            leaves[place] = leaf
        for place, leaf in zip(self.others, others, strict=True):
            leaves[place] = leaf
        return leaves if self.structure is None else trees.unflatten(self.structure, leaves)


def take_apart(
    values: tuple[Any, ...], api: Values, numbers: bool
) -> tuple[Layout, list[Any], tuple[Any, ...]]:
    """Return arrays and other leaves of some values; `numbers`: Python floats count as arrays."""
    layout, leaves = _flat_layout(tuple(map(type, values)), api, numbers), values
    if layout is None:
        parts, structure = trees.flatten(values)
        arrays, others = _split(tuple(map(type, parts)), api, numbers)
        layout, leaves = Layout(arrays, others, structure), tuple(parts)
    return layout, [leaves[i] for i in layout.arrays], tuple([leaves[i] for i in layout.others])


@functools.lru_cache(maxsize=1024)
def _flat_layout(kinds: tuple[type, ...], api: Any, numbers: bool) -> Layout | None:
    if all(kind in _ATOMS or kind is _Unbound or api.is_array_type(kind) for kind in kinds):
        return Layout(*_split(kinds, api, numbers))
    return None


def _split(
    kinds: tuple[type, ...], api: Values, numbers: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    is_array = [api.is_array_type(kind) or (numbers and kind in (float, complex)) for kind in kinds]
    arrays = tuple(i for i, is_one in enumerate(is_array) if is_one)
    return arrays, tuple(i for i, is_one in enumerate(is_array) if not is_one)


class Static:
    """All of a state that is no array."""

    __slots__ = ("layout", "leaves_by", "others", "step")

    def __init__(self, step: int, leaves_by: int, layout: Layout, others: tuple[Any, ...]) -> None:
        self.step = step  # the number of the turn that comes next
        self.leaves_by = leaves_by  # 0: goes on
        self.layout = layout
        self.others = others

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        same = (self.step, self.leaves_by) == (other.step, other.leaves_by)
        if not same or len(self.others) != len(other.others):
            return False
        return self.layout == other.layout and all(map(_same, self.others, other.others))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<turn {self.step}, exit {self.leaves_by}, {self.others!r}>"


def _same(one: Any, other: Any) -> bool:
    """Compare leaves that are no arrays: what is no number or text proves nothing."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    return type(one) not in _ATOMS or one == other or repr(one) == repr(other)  # NaN


class Frame:
    """The variables of one run of a loop. It does not change while the loop runs."""

    __slots__ = (
        *("_api", "_at", "_changed", "_has_inner", "_is_bare", "_last", "_numbers", "_outputs"),
        *("_room", "_scans", "_single", "_where", "unbound"),
    )

    def __init__(
        self,
        api: Values,
        *,
        room: int,
        is_bare: bool,
        is_single: bool,
        numbers: bool,
        changed: tuple[int, ...],
        last: int | None,
        where: Any,
        outputs: Any,
        scans: bool,
        has_inner: bool,
        at: Place,
    ) -> None:
        self.unbound = UNBOUND
        self._api = api
        self._room = room  # for arrays
        self._is_bare = is_bare
        self._single = is_single
        self._numbers = numbers
        self._changed = changed  # places of variables whose objects steps change
        self._last = last  # the number of turns, if it is known
        self._where = where  # the items of a `for`
        self._outputs = outputs
        self._scans = scans
        self._has_inner = has_inner  # loops
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
        step = -1 if self._is_bare else state[-1].step
        made: Any = ()
        if self._outputs is not None:
            made = self._outputs.made_by(step, outputs)
            values += self._outputs.windows(outputs)
        if self._is_bare:
            new = self._bare(values)
        else:
            if not leaves_by and step + 1 == self._last:
                leaves_by = -1
            new = self._full(values, step + 1, leaves_by)
        return (new, made) if self._scans else new

    def collect(self, place: int, state: Any) -> Any:
        """Return what takes the place of an output while a step runs."""
        windows = (
            self.values(state)[self._outputs.first_window :] if self._outputs.has_windows else ()
        )
        return self._outputs.collector(place, windows)

    def item(self, state: Any, sources: tuple[Any, ...], x: Any) -> Any:
        """Return the item of a `for` loop that belongs to this turn."""
        step = -1 if self._is_bare else state[-1].step
        item = self._where.get(step, sources, x)
        return _aliased(item, self._api) if self._has_inner else item

    def own(self, *values: Any) -> list[Any]:
        """Return values from outside as parts of the graph of this step.

        A loop inside of the step refers to them, and its gradients have to end in the step.
        """
        return [_aliased(value, self._api) for value in values]

    def is_done(self, state: Any) -> bool:
        return bool(state[-1].leaves_by)

    def idle(self, state: Any) -> Any:
        """Return what a step gives that comes after the end of the loop."""
        return (state, self._outputs.nothing() if self._outputs else ()) if self._scans else state

    # -- around the steps ----------------------------------------------------------------------

    @property
    def scans(self) -> bool:
        """Whether steps have outputs, or inputs, of their own."""
        return self._scans

    def example(self, state: Any) -> Any:
        """Return an array of a state."""
        return state if self._is_bare and self._single else state[0]

    def goes_on(self, state: Any) -> bool:
        return not state[-1].leaves_by

    def initial(self, values: tuple[Any, ...], step: int) -> Any:
        return self._bare(values) if self._is_bare else self._full(values, step, 0)

    def final(self, state: Any) -> tuple[int, Sequence[Any]]:
        """Return how the loop was left, and the values of its variables."""
        values = self.values(state)
        if self._outputs is not None:
            values = values[: self._outputs.first_window]
        return (0 if self._is_bare else state[-1].leaves_by), values

    def values(self, state: Any) -> Sequence[Any]:
        if self._is_bare:
            return (state,) if self._single else tuple(state)
        static = state[-1]
        values: Sequence[Any] = static.layout.put_together(state, static.others)
        return values

    def _bare(self, values: tuple[Any, ...]) -> Any:
        layout, arrays, others = take_apart(values, self._api, self._numbers)
        if others or layout.structure is not None:
            raise self._at.error("a variable that held an array holds none after this turn")
        self._refuse_numbers(arrays)
        return arrays[0] if self._single else tuple(arrays)

    def _full(self, values: tuple[Any, ...], step: int, leaves_by: int) -> Any:
        layout, arrays, others = take_apart(values, self._api, self._numbers)
        self._refuse_numbers(arrays)
        empty = self._room - len(arrays)
        if empty < 0:
            raise self._at.error(
                f"its variables hold {len(arrays)} arrays after this turn, with room for "
                f"{self._room}: they held fewer before"
            )
        return (*arrays, *([_EMPTY] * empty), Static(step, leaves_by, layout, others))

    def _refuse_numbers(self, arrays: list[Any]) -> None:
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


def _aliased(value: Any, api: Values) -> Any:
    if type(value) in (list, tuple, dict):
        leaves, structure = trees.flatten(value)
        aliases = [api.aliased(leaf) for leaf in leaves]
        if all(map(_is, aliases, leaves)):
            return value
        return trees.unflatten(structure, aliases)
    return api.aliased(value)


def _is(one: Any, other: Any) -> bool:
    return one is other


class Kept:
    """What steps read and do not bind, as it is now: lists and dicts may change after the loop.

    So may arrays that the function writes into elsewhere, which are `volatile`.
    """

    def __init__(
        self, named: Iterable[tuple[str, Any]], volatile: Container[str], api: Values
    ) -> None:
        self._trees: list[tuple[str, Any, list[Any], trees.Structure]] = []
        self.copies = [self._copy(name, value, name in volatile, api) for name, value in named]

    def _copy(self, name: str, value: Any, is_volatile: bool, api: Values) -> Any:
        if type(value) in (list, dict):
            leaves, structure = trees.flatten(value)
            tree = trees.unflatten(structure, leaves)
            self._trees.append((name, tree, leaves, structure))
            return tree
        if type(value) in (set, bytearray, deque):
            return copy.copy(value)
        return api.copied(value) if is_volatile and api.is_array_type(type(value)) else value

    def changed(self) -> str | None:
        """Name a list or dict that a function has changed which the loop calls."""
        for name, tree, leaves, structure in self._trees:
            now, new = trees.flatten(tree)
            if new != structure or not all(map(_is, now, leaves)):
                return name
        return None


def spare_room(values: Sequence[Any], others: Sequence[Any]) -> int:
    """Return how many more arrays variables may come to hold: those without one may get some."""
    if not others:
        return 0
    open_ended = any(leaf is UNBOUND or leaf is None for leaf in values)
    return min(len(others), 8) + (_SPARE if open_ended else 0)
