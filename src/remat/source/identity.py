"""Any values as arrays and the rest, and which object is which in and after a loop.

Variables hold anything: arrays, containers of them, numbers, None, objects, or no value at all. A
runner hands on the *contents* of the arrays; between two steps, and after the loop, they are other
objects. So each array, and each list or dict that is a variable, has a *token*: two have the same
token exactly if they would be one object in the plain loop. What a step gets, the item of its turn
and what it reads have tokens when the step begins; whatever it returns is looked up by its
identity, and is new if it is not found. Then

1. within a step, variables with the same token hold the same object,
2. after the loop, a token from outside (of an array before the loop, an item, something that is
   read) gives the very object from outside, and other tokens give one object each, in variables
   and in lists that the loop appends to.

A step changes copies in place, so a token that was written to does not give the object from
outside; nobody else refers to that (see `runtime`). What a turn has added to a list and a later one
has written to is what a variable holds at the end, or an error if none holds it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import trees
from .protocols import LoopSite, Values

__all__ = [
    "ATOMS",
    "UNBOUND",
    "Contents",
    "LoopResults",
    "StepObjects",
    "Token",
    "parts",
    "take_apart",
]

ATOMS = (bool, int, float, complex, str, bytes, type(None))
Token = tuple[
    Any, ...
]  # (numbers in dicts and attributes would be closed-over numbers that change)
_OUTSIDE = ("before", "read", "item")  # the first part of tokens of objects from outside


class _Unbound:
    """The value of a variable that has none."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<no value>"

    def __reduce__(self) -> str:
        return "UNBOUND"


UNBOUND = _Unbound()


# -- arrays and the rest -----------------------------------------------------------------------


class Layout(NamedTuple):
    """Where arrays and other leaves stand among the leaves of some values."""

    arrays: tuple[int, ...]
    others: tuple[int, ...]
    structure: trees.Structure | None = None  # None: every value is a leaf
    is_plain: bool = False  # no array among them may stand for a number

    def values(self, arrays: Sequence[Any], others: Sequence[Any]) -> Any:
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
    values: tuple[Any, ...], api: Values
) -> tuple[Layout, Sequence[Any], tuple[Any, ...]]:
    """Return arrays and other leaves of some values."""
    layout, leaves = _flat_layout(tuple(map(type, values)), api), values
    if layout is None:
        parts, structure = trees.flatten(values)
        layout = _layout(tuple(map(type, parts)), api)._replace(structure=structure)
        leaves = tuple(parts)
    elif not layout.others:
        return layout, values, ()
    return layout, [leaves[i] for i in layout.arrays], tuple([leaves[i] for i in layout.others])


@functools.lru_cache(maxsize=1024)
def _flat_layout(kinds: tuple[type, ...], api: Any) -> Layout | None:
    if all(kind in ATOMS or kind is _Unbound or api.is_array_type(kind) for kind in kinds):
        layout = _layout(kinds, api)
        is_plain = all(api.is_plain_array_type(kinds[place]) for place in layout.arrays)
        return layout._replace(is_plain=is_plain)
    return None


def _layout(kinds: tuple[type, ...], api: Values) -> Layout:
    is_array = list(map(api.is_array_type, kinds))
    arrays = tuple(i for i, is_one in enumerate(is_array) if is_one)
    return Layout(arrays, tuple(i for i, is_one in enumerate(is_array) if not is_one))


class Contents(NamedTuple):
    """All of some values but their arrays."""

    layout: Layout
    others: tuple[Any, ...]
    arrays: tuple[Token, ...]  # tokens of the arrays, in order
    containers: tuple[Token | None, ...]  # of the values, None if it is none; () if all are none
    is_distinct: bool  # all tokens are different ones


# -- in steps ----------------------------------------------------------------------------------


class StepObjects:
    """Tokens of the objects in the steps of one loop. It refers to no array between two steps."""

    def __init__(self, api: Values, at: LoopSite, *, views_matter: bool) -> None:
        self.api = api
        self.at = at
        self._views_matter = views_matter  # somebody may write to what the loop gives
        self.written: dict[Token, tuple[int]] = {}  # the last step that wrote to it
        self._forget()

    def _forget(self) -> None:
        self._known: dict[int, Token] = {}  # by id
        self._copies: list[tuple[Any, Any, Token]] = []  # that the step may write to
        self._around: list[tuple[Any, Token]] = []  # what the step gets; kept alive, for the ids
        self._given: list[tuple[Any, Token]] = []  # and those that it gives

    def before(self, values: tuple[Any, ...]) -> tuple[Contents, Sequence[Any], list[Any]]:
        """Take variables apart before the loop; return also the objects, by token."""
        objects: list[Any] = []
        known: dict[int, Token] = {}

        def token(value: Any) -> Token:
            if id(value) not in known:
                known[id(value)] = ("before", len(objects))
                objects.append(value)
            return known[id(value)]

        return *self._pack(values, token), objects

    def begin(self, arrays: Sequence[Any], contents: Contents, changed: Sequence[int]) -> Any:
        """Return the values that a step begins with: one object for each token.

        Those at the places that are `changed` are copies that the step may write to.
        """
        self._forget()
        known, tokens = self._known, contents.arrays
        arrays = arrays[: len(tokens)]
        if not contents.is_distinct:
            first: dict[Token, Any] = {}
            arrays = [first.setdefault(t, each) for t, each in zip(tokens, arrays, strict=True)]
        for token, array in zip(tokens, arrays, strict=True):
            known[id(array)] = token
        if self._views_matter:
            self._around += zip(arrays, tokens, strict=True)
        values = contents.layout.values(arrays, contents.others)
        if changed:
            own = self._copies_of([values[place] for place in changed])
            arrays = [own.get(id(each), each) for each in arrays]
            others = [own.get(id(each), each) for each in contents.others]
            values = contents.layout.values(arrays, others)
        if not contents.containers:
            return values
        containers: dict[Token, Any] = {}
        found = list(values)
        for place, key in enumerate(contents.containers):
            if key is not None:
                found[place] = containers.setdefault(key, found[place])
                known[id(found[place])] = key
        return found

    def _copies_of(self, values: Iterable[Any]) -> dict[int, Any]:
        """Copy what a step changes; return the copies by the identity of the originals."""
        found: dict[int, Any] = {}
        for value in values:
            if id(value) in found or isinstance(value, list | dict | deque):
                continue  # (lists are put together for each step)
            if not self.api.is_array_type(type(value)):
                found[id(value)] = copy.copy(value)
                continue
            found[id(value)] = own = self.api.copied(value)
            token = self._known[id(own)] = self._known[id(value)]
            self._copies.append((own, self.api.content_mark(own, value), token))
        return found

    def note(self, kind: str, number: int, value: Any) -> None:
        """Note the item of a turn, or something that it reads."""
        for place, part in enumerate(parts(value, self.api)):
            token = (kind, number, place)
            self._known.setdefault(id(part), token)
            self._around.append((part, token))

    def ran(self, step: int, reads: Sequence[Any]) -> None:
        """Note what a step has read, and which copies it has written to."""
        for number, value in enumerate(reads):
            self.note("read", number, value)
        for own, mark, token in self._copies:
            if self.api.is_content_changed(own, mark):
                self.written[token] = max((step,), self.written.get(token, (step,)))

    def pack(
        self, values: tuple[Any, ...], step: int, output: int = -1
    ) -> tuple[Contents, Sequence[Any]]:
        """Take apart what a step gives; return the contents and the arrays."""
        known = self._known

        def token(value: Any) -> Token:
            found = known.get(id(value))
            if found is None:
                found = known[id(value)] = (step, output, len(known))
            return found

        contents, arrays = self._pack(values, token)
        if self._views_matter:
            self._given += zip(arrays, contents.arrays, strict=True)
        return contents, arrays

    def _pack(
        self, values: tuple[Any, ...], token: Callable[[Any], Token]
    ) -> tuple[Contents, Sequence[Any]]:
        layout, arrays, others = take_apart(values, self.api)
        tokens = tuple([token(array) for array in arrays])
        if arrays is values:  # the usual case: all are arrays
            return Contents(layout, (), tokens, (), len(set(tokens)) == len(tokens)), arrays
        containers = tuple([token(value) if is_container(value) else None for value in values])
        some = [each for each in containers if each is not None]
        is_distinct = len({*tokens, *some}) == len(tokens) + len(some)
        return Contents(layout, others, tokens, containers if some else (), is_distinct), arrays

    def end(self) -> None:
        """Forget the step that ran."""
        if self._views_matter:
            self._refuse_views()
        self._forget()

    def _refuse_views(self) -> None:
        """Refuse what a step gives if it is a part of another array that lives on."""
        given = {token for _, token in self._given}
        owners: dict[Any, Token] = {}
        for array, token in (*self._around, *self._given):
            is_outside = token[0] in _OUTSIDE
            if not (is_outside or token in given):
                continue
            memory = self.api.memory(array)
            is_first = memory is None or owners.setdefault(memory, token) == token
            if not (is_first or is_outside):
                raise self.at.error(
                    "a variable or a list gets a view of another array, and the function may "
                    "write to one of them; take a copy"
                )


# -- after the loop ----------------------------------------------------------------------------


class LoopResults:
    """What a loop gives: objects from outside as they were, and one object for each other token."""

    def __init__(
        self,
        objects: StepObjects,
        before: list[Any],
        reads: Sequence[Any],
        entry: Callable[[int], Any] | None,
    ) -> None:
        self._api = objects.api
        self._at = objects.at
        self._written = objects.written
        self._before = before
        self._reads = [list(parts(each, self._api)) for each in reads]
        self._entry = entry  # of what a `for` iterates over
        self._found: dict[Token, Any] = {}

    def values(self, arrays: Sequence[Any], contents: Contents, volatile: Sequence[int]) -> Any:
        """Return the values of variables; the function may write to those that are `volatile`."""
        tokens = contents.arrays
        found = self._objects(arrays, contents)
        values = contents.layout.values(found, contents.others)
        by_id = {id(array): token for token, array in zip(tokens, found, strict=True)}
        for place in volatile:
            token = by_id.get(id(values[place]))
            if token is not None and self.outside(token) is None:
                # The runner still refers to it.
                self._found[token] = self._api.copied(values[place])
        values = contents.layout.values(self._objects(arrays, contents), contents.others)
        return self._with_containers(values, contents)

    def items(self, arrays: Sequence[Any], contents: Contents, step: int, name: str) -> Any:
        """Return what a list gets from one step."""
        for token in contents.arrays:
            if token not in self._found and self._written.get(token, (step,)) > (step,):
                raise self._at.error(
                    f"a turn adds an array to {name} that a later turn changes in place; add a copy"
                )
        found = self._objects(arrays, contents)
        return self._with_containers(contents.layout.values(found, contents.others), contents)

    def _with_containers(self, values: Sequence[Any], contents: Contents) -> list[Any]:
        """Return values of which lists, dicts and the like are what they were before the loop."""
        found = list(values)
        for place, token in enumerate(contents.containers):
            if token is not None:
                value = found[place]
                if token not in self._found:
                    original = self.outside(token)
                    is_same = original is not None and _holds_same(original, value)
                    self._found[token] = original if is_same else value
                found[place] = self._found[token]
        return found

    def _objects(self, arrays: Sequence[Any], contents: Contents) -> list[Any]:
        for token, array in zip(contents.arrays, arrays, strict=False):
            if token not in self._found:
                original = self.outside(token)
                self._found[token] = array if original is None else original
        return [self._found[token] for token in contents.arrays]

    def outside(self, token: Token) -> Any:
        """Return the object from outside that a token stands for; None: it is a new one."""
        kind = None if token in self._written else token[0]
        if kind == "before":
            return self._before[token[1]]
        if kind == "read":
            return self._reads[token[1]][token[2]]
        if kind == "item" and self._entry is not None:
            found = list(parts(self._entry(token[1]), self._api))
            return self._found.setdefault(token, found[token[2]])
        return None


def is_container(value: Any) -> bool:
    """Say whether a value is a list, a dict or the like: changeable, and taken apart as a tree."""
    kind: type = type(value)
    return _is_container_type(kind)


@functools.lru_cache(maxsize=1024)
def _is_container_type(kind: type) -> bool:
    return issubclass(kind, list | dict | deque) or dataclasses.is_dataclass(kind)


def parts(value: Any, api: Values) -> Iterator[Any]:
    """Generate the arrays and containers in a value, itself among them."""
    if api.is_array_type(type(value)):
        yield value
        return
    if is_container(value):
        yield value
    if isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from parts(part, api)


def _holds_same(one: Any, other: Any) -> bool:
    leaves, structure = trees.flatten(one)
    others, same = trees.flatten(other)
    return structure == same and all(a is b for a, b in zip(leaves, others, strict=True))
