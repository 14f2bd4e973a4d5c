"""Checkpoints that round: half the bytes, the error known, integers untouched."""

from __future__ import annotations

import numpy as np
import pytest

from remat.engines.numpy.arrays import NumpyArrays
from remat.errors import StoreError
from remat.stores import ReducedPrecisionStore


def checkpoints(dtype: str = "bfloat16"):
    return ReducedPrecisionStore(dtype).open(NumpyArrays())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_the_bytes_of_float32_and_a_quarter_of_float64(dtype) -> None:
    held = checkpoints(dtype)
    held.put(0, [np.ones(100, np.float32)])
    assert held.nbytes == 200
    held.put(1, [np.ones(100), np.arange(10), np.ones(5, bool), 3.0])
    assert held.nbytes == 200 + 200 + 80 + 5
    held.drop(0)
    assert held.nbytes == 285
    held.close()
    assert held.nbytes == 0


def test_the_error_is_the_largest_so_far() -> None:
    held = checkpoints()
    assert not held.exact
    held.put(0, [np.array([1.0, 2.0])])
    assert held.error == 0.0
    held.put(1, [np.array([0.1]), np.array([300.1])])
    assert held.error == np.abs(held.get(1)[1][0] - 300.1) > 0
    held.drop(1)
    held.put(2, [np.array([0.1])])
    assert held.error > 0.05


def test_what_is_no_wide_float_is_the_very_object() -> None:
    held = checkpoints()
    leaves = [np.arange(3), np.ones(2, np.float16), 2.5, None, "text"]
    held.put(0, leaves)
    assert all(a is b for a, b in zip(held.get(0), leaves, strict=True))


def test_what_is_one_array_comes_back_as_one() -> None:
    held = checkpoints()
    one, other = np.ones(3), np.ones(3)
    held.put(0, [one, other, one])
    a, b, c = held.get(0)
    assert a is c
    assert a is not b
    assert held.nbytes == 12


def test_what_is_stored_does_not_change() -> None:
    held = checkpoints()
    held.put(0, [np.ones(3)])
    held.get(0)[0][:] = 7  # (nobody may; each get makes its own all the same)
    np.testing.assert_array_equal(held.get(0)[0], np.ones(3))
    assert list(held) == [0]
    assert 0 in held


def test_a_value_that_does_not_fit_is_not_stored() -> None:
    held = checkpoints("float16")
    with pytest.raises(StoreError, match=r'value 1e\+06.*float16 is 65504.*store="bfloat16"'):
        held.put(3, [np.array([1e6])])
    assert 3 not in held
