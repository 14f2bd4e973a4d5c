"""Places whose contents are exchanged together.

A loop over layers closes over a list of all weights, and exchanges them before and after each
step. So a list or a dict of n arrays is exchanged in one go, not entry by entry.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ...introspect import GONE, Item, Place

__all__ = ["Slots", "are", "group"]


class Slots(Protocol):
    """Some places, and what stood in them when they were found."""

    originals: list[Any]

    def get(self) -> list[Any]: ...

    def put(self, values: list[Any], before: list[Any]) -> None:
        """Put `values` where `before`, what `get` has returned, has shown something to be."""
        ...


class SinglePlace:
    """Any place by itself."""

    def __init__(self, place: Place, original: Any) -> None:
        self.place = place
        self.originals = [original]

    def get(self) -> list[Any]:
        return [self.place.get()]

    def put(self, values: list[Any], before: list[Any]) -> None:
        if before[0] is not GONE:
            self.place.put(values[0])


class ListEntries:
    """Entries of a list that follow one another."""

    def __init__(self, owner: list[Any], start: int, originals: list[Any]) -> None:
        self.owner = owner
        self.start = start
        self.originals = originals

    def get(self) -> list[Any]:
        return self.owner[self.start : self.start + len(self.originals)]

    def put(self, values: list[Any], before: list[Any]) -> None:
        self.owner[self.start : self.start + len(before)] = values[: len(before)]


class DictEntries:
    """Entries of a dict."""

    def __init__(self, owner: dict[Any, Any], keys: list[Any], originals: list[Any]) -> None:
        self.owner = owner
        self.keys = keys
        self.originals = originals

    def get(self) -> list[Any]:
        return list(map(self.owner.get, self.keys, [GONE] * len(self.keys)))

    def put(self, values: list[Any], before: list[Any]) -> None:
        pairs: Iterable[tuple[Any, Any]] = zip(self.keys, values, strict=True)
        if any(map(operator.is_, before, [GONE] * len(before))):
            pairs = [pair for pair, b in zip(pairs, before, strict=True) if b is not GONE]
        self.owner.update(pairs)


def are(now: list[Any], expected: list[Any]) -> bool:
    """Tell whether two lists hold the same objects."""
    return len(now) == len(expected) and all(map(operator.is_, now, expected))


def group(places: Sequence[tuple[Place, Any]]) -> list[Slots]:
    """Put places together that can be exchanged in one go."""
    groups: list[Slots] = []
    lists: dict[int, tuple[list[Any], dict[int, Any]]] = {}
    dicts: dict[int, DictEntries] = {}
    for place, original in places:
        owner = place.owner
        if isinstance(place, Item) and type(owner) is list:
            lists.setdefault(id(owner), (owner, {}))[1][place.key] = original
        elif isinstance(place, Item) and type(owner) is dict:
            if id(owner) not in dicts:
                groups.append(dicts.setdefault(id(owner), DictEntries(owner, [], [])))
            dicts[id(owner)].keys.append(place.key)
            dicts[id(owner)].originals.append(original)
        else:
            groups.append(SinglePlace(place, original))
    for owner, entries in lists.values():
        groups += _runs(owner, entries)
    return groups


def _runs(owner: list[Any], entries: dict[int, Any]) -> list[ListEntries]:
    runs: list[ListEntries] = []
    for i in sorted(entries):
        if not runs or i != runs[-1].start + len(runs[-1].originals):
            runs.append(ListEntries(owner, i, []))
        runs[-1].originals.append(entries[i])
    return runs
