"""Checkpoints in memory keep the very leaves that were put there."""

from __future__ import annotations

import numpy as np
import pytest

from remat.engines.numpy.arrays import NumpyArrays
from remat.stores import MemoryStore


def test_the_very_leaves_come_back() -> None:
    checkpoints = MemoryStore().open(NumpyArrays())
    leaves = [np.ones(3), 7, "text", None]
    checkpoints.put(4, leaves)
    leaves.clear()  # the list is the caller's
    checkpoints.get(4).clear()
    assert [type(leaf) for leaf in checkpoints.get(4)] == [np.ndarray, int, str, type(None)]
    assert checkpoints.get(4)[0] is checkpoints.get(4)[0]
    assert checkpoints.exact
    assert checkpoints.error == 0.0


def test_bytes_are_counted_once_for_what_is_one_array() -> None:
    checkpoints = MemoryStore().open(NumpyArrays())
    array = np.ones(10)
    checkpoints.put(0, [array, array, 3.0])
    checkpoints.put(1, [np.ones(5, np.float32)])
    assert checkpoints.nbytes == 80 + 20
    checkpoints.put(1, [])
    assert checkpoints.nbytes == 80


def test_keys_come_and_go() -> None:
    checkpoints = MemoryStore().open(NumpyArrays())
    for key in (3, 1, 2):
        checkpoints.put(key, [np.full(2, key)])
    assert sorted(checkpoints) == [1, 2, 3]
    for key in checkpoints:  # may be dropped on the way
        checkpoints.drop(key)
    assert 3 not in checkpoints
    with pytest.raises(KeyError):
        checkpoints.get(3)
    checkpoints.put(5, [1])
    checkpoints.close()
    checkpoints.close()
    assert list(checkpoints) == []
    assert checkpoints.nbytes == 0


def test_one_store_serves_many_passes() -> None:
    store = MemoryStore()
    one, other = store.open(NumpyArrays()), store.open(NumpyArrays())
    one.put(0, [1])
    assert 0 not in other
    assert not store.on_disk
