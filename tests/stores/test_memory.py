"""Shelves in memory keep the very leaves that were put there."""

from __future__ import annotations

import numpy as np
import pytest

from remat.engines.numpy.arrays import NumpyArrays
from remat.stores import MemoryStore


def test_the_very_leaves_come_back() -> None:
    shelf = MemoryStore().open(NumpyArrays())
    leaves = [np.ones(3), 7, "text", None]
    shelf.put(4, leaves)
    leaves.clear()  # the list is the caller's
    shelf.get(4).clear()
    assert [type(leaf) for leaf in shelf.get(4)] == [np.ndarray, int, str, type(None)]
    assert shelf.get(4)[0] is shelf.get(4)[0]
    assert shelf.exact
    assert shelf.error == 0.0


def test_bytes_are_counted_once_for_what_is_one_array() -> None:
    shelf = MemoryStore().open(NumpyArrays())
    array = np.ones(10)
    shelf.put(0, [array, array, 3.0])
    shelf.put(1, [np.ones(5, np.float32)])
    assert shelf.nbytes == 80 + 20
    shelf.put(1, [])
    assert shelf.nbytes == 80


def test_keys_come_and_go() -> None:
    shelf = MemoryStore().open(NumpyArrays())
    for key in (3, 1, 2):
        shelf.put(key, [np.full(2, key)])
    assert sorted(shelf) == [1, 2, 3]
    for key in shelf:  # may be dropped on the way
        shelf.drop(key)
    assert 3 not in shelf
    with pytest.raises(KeyError):
        shelf.get(3)
    shelf.put(5, [1])
    shelf.close()
    shelf.close()
    assert list(shelf) == []
    assert shelf.nbytes == 0


def test_one_store_serves_many_passes() -> None:
    store = MemoryStore()
    one, other = store.open(NumpyArrays()), store.open(NumpyArrays())
    one.put(0, [1])
    assert 0 not in other
    assert not store.on_disk
