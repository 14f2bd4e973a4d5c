"""What a place for checkpoints is, and what it has to know of an engine's arrays.

A `Store` is chosen by the user and serves any number of passes; a `Shelf` holds the checkpoints of
one pass over one loop. A checkpoint is a list of leaves at rest: nobody changes them any more, so a
shelf may keep them as they are, and what it hands out is at rest as well. A leaf that stands in a
checkpoint twice is stored once and comes back as one, because to a step that works in place one
array and two equal ones are not the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = ["Arrays", "Narrow", "RoundingShelf", "Shelf", "Store", "distinct"]

Narrow = Literal["bfloat16", "float16"]


class Arrays(Protocol):
    """What a store has to know of an engine's arrays; each engine has one.

    Leaves that are no arrays (numbers of Python, text, None), and arrays that are more than memory
    with a layout (of objects, sparse, of a subclass) have no kind: they are kept as they are.
    """

    def nbytes(self, leaf: Any) -> int:
        """Return the bytes of an array; 0 for what is none."""
        ...

    def copied(self, leaf: Any) -> Any:
        """Copy an array; no gradient flows through the copy. What is none comes back itself."""
        ...

    def kind(self, leaf: Any) -> Hashable:
        """Return all that is needed to rebuild an array but its values; None if it has no kind."""
        ...

    def narrowed(self, leaf: Any, dtype: Narrow) -> tuple[Any, float]:
        """Round an array; return the narrower one and the largest error of a finite value.

        What is not floating or not wider than `dtype` comes back itself, with an error of 0.0. If
        a finite value would become infinite, that is a `StoreError`.
        """
        ...

    def widened(self, narrow: Any, kind: Any) -> Any:
        """Make an array of this kind of what `narrowed` gave."""
        ...

    def to_bytes(self, leaf: Any) -> memoryview:
        """Return the bytes of an array that has a kind, without a copy where possible."""
        ...

    def from_bytes(self, data: bytearray | memoryview, kind: Any) -> Any:
        """Make an array of this kind over these bytes, on the device that it came from."""
        ...


class Shelf(Protocol):
    """The checkpoints of one pass over one loop."""

    @property
    def exact(self) -> bool:
        """Whether what comes back is bit for bit what was put there."""
        ...

    @property
    def error(self) -> float:
        """The largest absolute error that storing has caused so far."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes that are stored now, as they are stored."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether these bytes are memory of the program."""
        ...

    def put(self, key: int, leaves: list[Any]) -> None:
        """Store leaves at rest; what was stored under this key is forgotten."""
        ...

    def get(self, key: int) -> list[Any]:
        """Return the leaves, at rest; they stay stored."""
        ...

    def drop(self, key: int) -> None:
        """Forget a checkpoint."""
        ...

    def __contains__(self, key: object) -> bool: ...

    def __iter__(self) -> Iterator[int]: ...

    def close(self) -> None:
        """Forget everything; a second time does nothing."""
        ...


@runtime_checkable
class RoundingShelf(Protocol):
    """What a shelf that is not exact should also have.

    With it a loop can check that a step repeats itself where a state was rounded.
    """

    def as_stored(self, leaves: list[Any]) -> list[Any]:
        """Return leaves as they would come back, every time alike, without storing them."""
        ...


class Store(Protocol):
    """Where checkpoints rest. One object serves many passes, and many threads at once."""

    @property
    def on_disk(self) -> bool:
        """Whether it fills the disk tier of a schedule, and not the memory tier."""
        ...

    def open(self, arrays: Arrays) -> Shelf:
        """Make a shelf for one pass."""
        ...


def distinct(leaves: list[Any]) -> tuple[list[Any], list[int]]:
    """Return each object once, and for each leaf where it stands among them.

    >>> distinct(["a", "b", "a"])
    (['a', 'b'], [0, 1, 0])
    """
    once = {id(leaf): leaf for leaf in leaves}
    place = {key: number for number, key in enumerate(once)}
    return list(once.values()), [place[id(leaf)] for leaf in leaves]
