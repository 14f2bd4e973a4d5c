"""What a store of checkpoints is, and what it has to know of an engine's arrays.

A `Store` is chosen by the user and serves any number of passes. `Checkpoints` are those of one
pass over one loop. A checkpoint is a list of leaves that are not modified any more, neither by the
caller nor by the store. A leaf that occurs twice in a checkpoint is stored once and comes back as
one object: for a step that writes in place, one array and two equal ones are different.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

__all__ = [
    "Arrays",
    "Checkpoints",
    "CheckpointsByKey",
    "Narrow",
    "RoundedCheckpoints",
    "Store",
    "distinct",
]

Narrow = Literal["bfloat16", "float16"]


class Arrays(Protocol):
    """Describes an engine's arrays to stores.

    Leaves that are no arrays (Python numbers, text, None), and arrays that are more than memory
    with a layout (object arrays, sparse tensors, subclasses) have no kind: they are kept as is.
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


class Checkpoints(Protocol):
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
        """Store leaves under a key, and forget what was stored there."""
        ...

    def get(self, key: int) -> list[Any]:
        """Return the leaves; they stay stored."""
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
class RoundedCheckpoints(Protocol):
    """What checkpoints that are not exact should also have.

    With it a loop can check that a step repeats itself where a state was rounded.
    """

    def as_stored(self, leaves: list[Any]) -> list[Any]:
        """Return leaves as they would come back, every time alike, without storing them."""
        ...


class Store(Protocol):
    """Stores checkpoints. One object serves many passes, also concurrently."""

    @property
    def on_disk(self) -> bool:
        """Whether it fills the disk tier of a schedule, and not the memory tier."""
        ...

    def open(self, arrays: Arrays) -> Checkpoints:
        """Return the checkpoints of one pass: none yet."""
        ...


T = TypeVar("T")


class CheckpointsByKey(Generic[T]):
    """The part of `Checkpoints` that does not depend on how one is stored."""

    def __init__(self) -> None:
        self._held: dict[int, T] = {}

    def drop(self, key: int) -> None:
        del self._held[key]

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._held))

    def close(self) -> None:
        self._held.clear()


def distinct(leaves: list[Any]) -> tuple[list[Any], list[int]]:
    """Return each object once, and for each leaf its index among them.

    >>> distinct(["a", "b", "a"])
    (['a', 'b'], [0, 1, 0])
    """
    once = {id(leaf): leaf for leaf in leaves}
    place = {key: number for number, key in enumerate(once)}
    return list(once.values()), [place[id(leaf)] for leaf in leaves]
