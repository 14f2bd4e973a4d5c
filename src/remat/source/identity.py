"""Which object is which: arrays and containers that pass through a loop come out as themselves.

A runner hands on the *contents* of arrays; between two steps, and after the loop, they are other
objects. So each array of a state, and each list or dict that is a variable, has a *token*: two have
the same token exactly if they would be one object in the plain loop. What a step gets, the item of
its turn and what it reads have tokens when the step begins; whatever it returns is looked up by its
identity, and is new if it is not found. Then

1. within a step, variables with the same token hold the same object,
2. after the loop, a token from outside (of an array before the loop, an item, something that is
   read) gives the very object from outside, and other tokens give one object each, in variables
   and in lists that the loop appends to.

A step changes copies in place, so a token that was written to does not give the object from
outside; nobody else refers to that (see `Runtime`). What was written to in a later turn than the
one in which a list got it is what it is at the end, or an error if that is not known any more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import trees
from .protocols import Place, Values

__all__ = ["NO_TOKENS", "Origins", "Tokens", "is_container"]

Token = Any  # a tuple; (numbers in dicts and attributes would be closed-over numbers that change)


class Tokens(NamedTuple):
    """The tokens of some values."""

    arrays: tuple[Token, ...]  # of their arrays, in order
    containers: tuple[Token, ...]  # of the values, None for those that are none; () if all are
    is_distinct: bool  # all arrays are different ones, and so are the containers


NO_TOKENS = Tokens((), (), is_distinct=True)


class Origins:
    """What is known of the identity of objects in one run of a loop."""

    def __init__(self, api: Values, at: Place, *, views_matter: bool) -> None:
        self._api = api
        self._at = at
        self._before: list[Any] = []  # objects before the loop, by token
        self._read: list[list[Any]] = []  # what steps read, with its parts
        self._entry: Callable[[int], Any] | None = None  # of what a `for` iterates over
        self._known: dict[int, Token] = {}  # in the step that runs, by id
        self._copies: list[tuple[Any, Any, Token]] = []  # that a step may write to
        self._written: dict[Token, tuple[int]] = {}  # the last step that wrote to it
        self._views_matter = views_matter  # somebody may write to what the loop gives
        self._around: list[tuple[Any, Token]] = []  # arrays that a step gets
        self._given: list[tuple[Any, Token]] = []  # and those that it gives
        self._delivered: dict[Token, Any] = {}

    # -- before the loop -----------------------------------------------------------------------

    def read(self, originals: Sequence[Any]) -> None:
        """Note what steps read."""
        self._read = [list(_parts(original, self._api)) for original in originals]

    def iterates(self, entry: Callable[[int], Any] | None) -> None:
        self._entry = entry

    def first(self, values: tuple[Any, ...], arrays: Sequence[Any]) -> Tokens:
        """Return the tokens of variables before the loop."""
        known: dict[int, Token] = {}

        def token(value: Any) -> Token:
            if id(value) not in known:
                known[id(value)] = ("before", len(self._before))
                self._before.append(value)
            return known[id(value)]

        return _tokens(values, arrays, token)

    # -- in a step -----------------------------------------------------------------------------

    def begin(self, arrays: Sequence[Any], tokens: Tokens) -> Sequence[Any]:
        """Note the arrays that a step gets; return them, the same one for the same token."""
        self._known = known = {}
        self._copies, self._around, self._given = [], [], []
        if self._views_matter:
            self._around += zip(arrays, tokens.arrays, strict=False)
        if tokens.is_distinct:
            for token, array in zip(tokens.arrays, arrays, strict=False):
                known[id(array)] = token
            return arrays
        first: dict[Token, Any] = {}
        for token, array in zip(tokens.arrays, arrays, strict=False):
            known[id(first.setdefault(token, array))] = token
        return [first[token] for token in tokens.arrays]

    def begin_containers(self, values: Sequence[Any], tokens: Tokens) -> Sequence[Any]:
        """Do the same for variables that are lists, dicts or the like."""
        if not tokens.containers:
            return values
        first: dict[Token, Any] = {}
        found = []
        for token, value in zip(tokens.containers, values, strict=True):
            one = value if token is None else first.setdefault(token, value)
            if token is not None:
                self._known[id(one)] = token
            found.append(one)
        return found

    def copied(self, value: Any) -> Any:
        """Return a copy for a step to write to, in the place of an array that it gets."""
        token = self._known.get(id(value))
        copy = self._api.copied(value)
        self._copies.append((copy, self._api.content_mark(copy, value), token))
        self._known[id(copy)] = token
        return copy

    def read_by_step(self, values: Sequence[Any]) -> None:
        """Note what stands in a step for what it reads."""
        for place, value in enumerate(values):
            if self._api.is_array_type(type(value)):
                self._known.setdefault(id(value), ("read", place, 0))
                self._around.append((value, ("read", place, 0)))
            elif isinstance(value, tuple | list | dict):
                for part, each in enumerate(_parts(value, self._api)):
                    self._known.setdefault(id(each), ("read", place, part))
                    self._around.append((each, ("read", place, part)))

    def item(self, step: int, value: Any) -> None:
        """Note the item of this turn."""
        for place, part in enumerate(_parts(value, self._api)):
            self._known.setdefault(id(part), ("item", step, place))
            self._around.append((part, ("item", step, place)))
            self._alive_now(part)

    def _alive_now(self, value: Any) -> None:
        self._copies.append((value, None, None))

    def outside(self, value: Any) -> Token:
        """Return the token of what a step reads or iterates over; None: it is something else."""
        return self._known.get(id(value))

    def is_written(self, copy: Any) -> bool:
        return any(c is copy and self._api.is_content_changed(c, m) for c, m, _ in self._copies)

    def forget_step(self) -> None:
        """Free what the step that ran has held."""
        if self._views_matter:
            self._refuse_views()
        self._known, self._copies, self._around, self._given = {}, [], [], []

    def forget(self) -> None:
        """Free what was there before the loop and what came out of it: steps may run again."""
        self._before, self._read, self._delivered, self._entry = [], [], {}, None

    def end(self, step: int, reads: Sequence[Any]) -> None:
        """Note what a step has read, and which copies it has written to."""
        self.read_by_step(reads)
        for copy, mark, token in self._copies:
            if token is not None and self._api.is_content_changed(copy, mark):
                self._written[token] = max((step,), self._written.get(token, (step,)))

    def tokens(
        self, values: tuple[Any, ...], arrays: Sequence[Any], step: int, what: int = -1
    ) -> Tokens:
        """Return the tokens of what a step gives; `what`: the number of an output."""
        known = self._known

        def token(value: Any) -> Token:
            found = known.get(id(value))
            if found is None:
                found = known[id(value)] = (step, what, len(known))
            return found

        if arrays is values:  # the usual case: all are arrays
            found = tuple([token(array) for array in arrays])
            tokens = Tokens(found, (), len(set(found)) == len(found))
        else:
            tokens = _tokens(values, arrays, token)
        if self._views_matter:
            self._given += zip(arrays, tokens.arrays, strict=True)
        return tokens

    def _refuse_views(self) -> None:
        """Refuse what a step gives if it is a part of another array that stays."""
        staying = {token for _, token in self._given}
        around = [
            (array, token)
            for array, token in self._around
            if token in staying or token[0] in ("before", "read", "item")
        ]
        owners: dict[Any, Token] = {}
        for array, token in (*around, *self._given):
            memory = self._api.memory(array)
            is_first = memory is None or owners.setdefault(memory, token) == token
            if not is_first and token[0] not in ("before", "read", "item"):
                raise self._at.error(
                    "a variable or a list gets a view of another array, and the function may "
                    "write to one of them; take a copy"
                )

    # -- after the loop ------------------------------------------------------------------------

    def final(self, arrays: Sequence[Any], tokens: Tokens) -> list[Any]:
        """Return the arrays that variables hold after the loop."""
        return [
            self._delivered.setdefault(token, self._original(token, array))
            for token, array in zip(tokens.arrays, arrays, strict=False)
        ]

    def own(self, values: Sequence[Any], places: Iterable[int]) -> None:
        """Copy arrays that the function may write to, while the runner still refers to them."""
        tokens = {id(array): token for token, array in self._delivered.items()}
        for place in places:
            token = tokens.get(id(values[place]))
            if token is not None and self.from_outside(token) is None:
                self._delivered[token] = self._api.copied(values[place])

    def output(self, array: Any, token: Token, step: int, name: str) -> Any:
        """Return an array that a list gets after the loop."""
        if token not in self._delivered:
            if self._written.get(token, (step,)) > (step,):
                raise self._at.error(
                    f"a turn adds an array to {name} that a later turn changes in place; add a copy"
                )
            self._delivered[token] = self._original(token, array)
        return self._delivered[token]

    def containers(self, values: Sequence[Any], tokens: Tokens) -> list[Any]:
        """Return values of which lists, dicts and the like are what they were before the loop."""
        if not tokens.containers:
            return list(values)
        found = []
        for token, value in zip(tokens.containers, values, strict=True):
            if token is not None and token not in self._delivered:
                original = self.from_outside(token)
                is_same = original is not None and _holds_same(original, value)
                self._delivered[token] = original if is_same else value
            found.append(value if token is None else self._delivered[token])
        return found

    def _original(self, token: Token, array: Any) -> Any:
        original = self.from_outside(token)
        return array if original is None else original

    def from_outside(self, token: Token) -> Any:
        """Return the object from outside that a token stands for; None: it is a new one."""
        if token in self._written:
            return None
        if token[0] == "before":
            return self._before[token[1]]
        if token[0] == "read":
            return self._read[token[1]][token[2]]
        if token[0] == "item" and self._entry is not None:
            parts = list(_parts(self._entry(token[1]), self._api))
            return self._delivered.setdefault(token, parts[token[2]])
        return None


def _tokens(
    values: tuple[Any, ...], arrays: Sequence[Any], token: Callable[[Any], Token]
) -> Tokens:
    of_arrays = tuple(map(token, arrays))
    containers = tuple([token(value) if is_container(value) else None for value in values])
    some = [each for each in containers if each is not None]
    if not some:
        containers = ()
    is_distinct = len({*of_arrays, *some}) == len(of_arrays) + len(some)
    return Tokens(of_arrays, containers, is_distinct)


def is_container(value: Any) -> bool:
    """Say whether a value is a list, a dict or the like: changeable, and taken apart as a tree."""
    kind: type = type(value)
    return _is_container_type(kind)


@functools.lru_cache(maxsize=1024)
def _is_container_type(kind: type) -> bool:
    return issubclass(kind, list | dict | deque) or dataclasses.is_dataclass(kind)


def _parts(value: Any, api: Values) -> Iterator[Any]:
    """Generate the arrays and containers in a value, itself among them."""
    if api.is_array_type(type(value)):
        yield value
        return
    if is_container(value):
        yield value
    if isinstance(value, tuple | list):
        for part in value:
            yield from _parts(part, api)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _parts(part, api)


def _holds_same(one: Any, other: Any) -> bool:
    leaves, structure = trees.flatten(one)
    others, same = trees.flatten(other)
    return structure == same and all(a is b for a, b in zip(leaves, others, strict=True))
