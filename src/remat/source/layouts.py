"""Any values as arrays and the rest, and back.

Variables hold anything: arrays, containers of them, numbers, None, objects, or no value at all. A
`Layout` says where the arrays stand among the leaves of some values; a `Static` is all of a state
that is no array, as one leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import trees
from .identity import Tokens
from .protocols import Values

__all__ = ["ATOMS", "UNBOUND", "Layout", "Static", "spare_room", "take_apart"]

ATOMS = (bool, int, float, complex, str, bytes, type(None))
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
    is_plain: bool = False  # no array among them may stand for a number

    def put_together(self, arrays: Sequence[Any], others: Sequence[Any]) -> Any:
        """Put values together; of the arrays, as many as there are places for them."""
        if not self.others and self.structure is None:
            return arrays[: len(self.arrays)]  # the usual case
        leaves: list[Any] = [None] * (len(self.arrays) + len(self.others))
        for place, leaf in zip(self.arrays, arrays, strict=False):
            leaves[place] = leaf
        for place, leaf in zip(self.others, others, strict=True):
            leaves[place] = leaf
        return leaves if self.structure is None else trees.unflatten(self.structure, leaves)


def take_apart(
    values: tuple[Any, ...], api: Values, numbers: bool
) -> tuple[Layout, Sequence[Any], tuple[Any, ...]]:
    """Return arrays and other leaves of some values; `numbers`: Python floats count as arrays."""
    layout, leaves = _flat_layout(tuple(map(type, values)), api, numbers), values
    if layout is None:
        parts, structure = trees.flatten(values)
        arrays, others = _split(tuple(map(type, parts)), api, numbers)
        layout, leaves = Layout(arrays, others, structure), tuple(parts)
    elif not layout.others:
        return layout, values, ()
    return layout, [leaves[i] for i in layout.arrays], tuple([leaves[i] for i in layout.others])


@functools.lru_cache(maxsize=1024)
def _flat_layout(kinds: tuple[type, ...], api: Any, numbers: bool) -> Layout | None:
    if all(kind in ATOMS or kind is _Unbound or api.is_array_type(kind) for kind in kinds):
        arrays, others = _split(kinds, api, numbers)
        is_plain = all(api.is_plain_array_type(kinds[place]) for place in arrays)
        return Layout(arrays, others, None, is_plain)
    return None


def _split(
    kinds: tuple[type, ...], api: Values, numbers: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    is_array = [api.is_array_type(kind) or (numbers and kind in (float, complex)) for kind in kinds]
    arrays = tuple(i for i, is_one in enumerate(is_array) if is_one)
    return arrays, tuple(i for i, is_one in enumerate(is_array) if not is_one)


class Static:
    """All of a state that is no array."""

    __slots__ = ("layout", "leaves_by", "others", "step", "tokens")

    def __init__(
        self, step: int, leaves_by: int, layout: Layout, others: tuple[Any, ...], tokens: Tokens
    ) -> None:
        self.step = step  # the number of the turn that comes next
        self.leaves_by = leaves_by  # 0: goes on
        self.layout = layout
        self.others = others
        self.tokens = tokens

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        same = (self.step, self.leaves_by) == (other.step, other.leaves_by)
        if not same or len(self.others) != len(other.others):
            return False
        same = self.layout[:3] == other.layout[:3]  # (how a step is run shows in is_plain)
        return same and all(map(_same, self.others, other.others))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<turn {self.step}, exit {self.leaves_by}, {self.others!r}>"


def _same(one: Any, other: Any) -> bool:
    """Compare leaves that are no arrays: what is no number or text proves nothing."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    return type(one) not in ATOMS or one == other or repr(one) == repr(other)  # NaN


def spare_room(values: Sequence[Any], others: Sequence[Any]) -> int:
    """Return how many more arrays variables may come to hold: those without one may get some."""
    if not others:
        return 0
    open_ended = any(leaf is UNBOUND or leaf is None for leaf in values)
    return min(len(others), 8) + (_SPARE if open_ended else 0)
