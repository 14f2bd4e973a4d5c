"""Saved activations: those that a chain of layers holds, and those that backward starts from.

Both are the same objects, so nothing is stored twice. Each pass has its own references, so its
backward does not depend on what is cleared, evicted or saved in the meantime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .. import trees
from ..errors import StoreError
from ..stores import Arrays, Store
from ..stores.base import distinct

__all__ = ["Activation", "Activations", "PassStore", "nbytes_of"]


class Activation:
    """The activation of one layer: a detached copy in a store."""

    def __init__(self, layer: int, value: Any, arrays: Arrays, store: Store) -> None:
        leaves, self._structure = trees.flatten(value)
        self._arrays = arrays
        self._checkpoints = store.open(arrays)
        copies = self._copies(leaves)
        try:
            self._checkpoints.put(0, copies)
        except StoreError as error:
            fact, _, _ = str(error).partition("; use")
            raise StoreError(f"layer {layer}: {fact}; set use_mixed_precision=False") from error
        self.nbytes = self._checkpoints.nbytes  # as it is stored
        self.full_nbytes = sum(map(arrays.nbytes, distinct(copies)[0]))
        self.error = self._checkpoints.error

    def leaves(self) -> list[Any]:
        """Return the leaves as they are saved."""
        return self._checkpoints.get(0)

    def value(self) -> Any:
        """Return a copy, which the caller may modify."""
        return trees.unflatten(self._structure, self._copies(self.leaves()))

    def _copies(self, leaves: list[Any]) -> list[Any]:
        once, places = distinct(leaves)
        copies = list(map(self._arrays.copied, once))
        return [copies[place] for place in places]


class Activations:
    """Activations by layer, the oldest first, and the bytes of those that are not held."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[int, Activation] = {}
        self._passed: dict[int, int] = {}

    def keep(self, layer: int, activation: Activation) -> None:
        """Hold an activation; if there is no room, evict the oldest."""
        self.forget(layer)
        while len(self._held) >= self.limit:
            oldest = next(iter(self._held))
            self._passed[oldest] = self._held.pop(oldest).full_nbytes
        self._held[layer] = activation

    def passed(self, layer: int, nbytes: int) -> None:
        """Count an activation that was computed and is not held."""
        if layer not in self._held:
            self._passed[layer] = nbytes

    def forget(self, layer: int) -> None:
        """Drop the activation and the count of a layer."""
        self._held.pop(layer, None)
        self._passed.pop(layer, None)

    def clear(self) -> None:
        self._held.clear()
        self._passed.clear()

    @property
    def stored_bytes(self) -> int:
        return sum(activation.nbytes for activation in self._held.values())

    @property
    def saved_bytes(self) -> int:
        return sum(self._passed.values())

    def __getitem__(self, layer: int) -> Activation:
        return self._held[layer]

    def __contains__(self, layer: object) -> bool:
        return layer in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class PassStore:
    """The store of one pass over a chain. In forward it also adds its checkpoints to `held`.

    If the pass is run again, for a second backward, `held` may belong to a later pass and is not
    changed.
    """

    on_disk = False

    def __init__(
        self,
        store: Store,
        structure: trees.Structure,
        layers: Mapping[int, int],  # by the position of their activation
        held: Activations,
    ) -> None:
        self.store = store
        self.structure = structure
        self.layers = layers
        self.held: Activations | None = held

    def open(self, arrays: Arrays) -> _PassCheckpoints:
        """Make the checkpoints of a run of the pass."""
        return _PassCheckpoints(self, arrays)

    def end_forward(self) -> None:
        """Stop adding checkpoints to `held`."""
        self.held = None


class _PassCheckpoints:
    def __init__(self, store: PassStore, arrays: Arrays) -> None:
        self.exact = store.store.open(arrays).exact
        self.in_memory = True
        self.error = 0.0
        self._store = store
        self._arrays = arrays
        self._own: dict[int, Activation] = {}

    @property
    def nbytes(self) -> int:
        return sum(activation.nbytes for activation in self._own.values())

    def put(self, key: int, leaves: list[Any]) -> None:
        layer, value = self._store.layers[key], trees.unflatten(self._store.structure, leaves)
        activation = Activation(layer, value, self._arrays, self._store.store)
        self.error = max(self.error, activation.error)
        self._own[key] = activation
        if self._store.held is not None:
            self._store.held.keep(layer, activation)

    def get(self, key: int) -> list[Any]:
        return self._own[key].leaves()

    def as_stored(self, leaves: list[Any]) -> list[Any]:
        """Return leaves as the store would return them, without storing them."""
        value = trees.unflatten(self._store.structure, leaves)
        return Activation(0, value, self._arrays, self._store.store).leaves()

    def drop(self, key: int) -> None:
        del self._own[key]

    def __contains__(self, key: object) -> bool:
        return key in self._own

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._own))

    def close(self) -> None:
        self._own.clear()


def nbytes_of(activation: Any) -> int:
    """Return the bytes of an activation of any engine, traced or not."""
    arrays = [leaf for leaf in trees.flatten(activation)[0] if hasattr(leaf, "dtype")]
    return sum(_size(leaf) for leaf in distinct(arrays)[0])


def _size(leaf: Any) -> int:
    numbers = 1
    for length in leaf.shape:
        numbers *= length
    return int(numbers * leaf.dtype.itemsize)
