"""Arrays as stores see them: bytes and back, narrower and back."""

from __future__ import annotations

import math
import re
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from remat.engines.numpy.arrays import NumpyArrays
from remat.errors import StoreError

from ...stores.oracles import LARGEST, nearest, numbers

arrays = NumpyArrays()
NARROW = ["bfloat16", "float16"]
DTYPES = ["f2", "f4", "f8", ">f8", "g", "c8", "c16", ">c8", "?", "i1", "u8", ">i4", "M8[s]", "S3"]


@st.composite
def layouts(draw: st.DrawFn, dtype: str) -> np.ndarray:
    """Arrays with axes in any order, of either direction, with gaps or repeated."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    array = rng.integers(0, 100, shape).astype(dtype)
    array = array.transpose(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        array = array[:: draw(st.sampled_from([-1, 2]))]
    if shape and draw(st.booleans()):
        array = np.broadcast_to(array, (2, *array.shape))
    return array


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return (
        type(one) is type(other)
        and (one.dtype, one.shape) == (other.dtype, other.shape)
        and one.tobytes() == other.tobytes()
    )


@given(st.sampled_from(DTYPES).flatmap(layouts))
def test_bytes_and_back(array: np.ndarray) -> None:
    data = arrays.to_bytes(array)
    assert data.format == "B"
    assert len(data) == arrays.nbytes(array) == array.nbytes
    back = arrays.from_bytes(bytearray(data), arrays.kind(array))
    assert same(back, array)
    copy = array.copy(order="K")
    assert (back.flags.c_contiguous, back.flags.f_contiguous) == (
        copy.flags.c_contiguous,
        copy.flags.f_contiguous,
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_a_dense_array_is_not_copied_and_keeps_its_order(order) -> None:
    array = np.arange(24.0).reshape(2, 3, 4).transpose(order)
    data = arrays.to_bytes(array)
    assert np.shares_memory(np.frombuffer(data), array)
    back = arrays.from_bytes(data, arrays.kind(array))
    assert np.shares_memory(back, array)
    assert back.strides == array.strides


def test_numpy_scalars_come_back_as_scalars() -> None:
    for scalar in (np.float32(1.5), np.int8(3), np.bool_(True), np.complex64(1 + 2j)):
        back = arrays.from_bytes(arrays.to_bytes(scalar), arrays.kind(scalar))
        assert type(back) is type(scalar)
        assert back == scalar
    narrow, error = arrays.narrowed(np.float64(0.1), "float16")
    wide = arrays.widened(narrow, arrays.kind(np.float64(0.1)))
    assert type(wide) is np.float64
    assert abs(wide - 0.1) == error > 0


OTHERS = [
    3,
    2.5,
    None,
    "text",
    [1.0],
    np.array([{}, None]),
    np.ma.masked_array([1.0], [True]),
    np.zeros(3, "V0"),
]


@pytest.mark.parametrize("leaf", OTHERS, ids=repr)
def test_what_has_no_kind_stays_as_it_is(leaf: object) -> None:
    assert arrays.kind(leaf) is None
    assert arrays.narrowed(leaf, "bfloat16")[0] is leaf
    assert arrays.nbytes(leaf) == getattr(leaf, "nbytes", 0)


@pytest.mark.parametrize("dtype", ["?", "i4", "u8", "f2", ">f2", "M8[s]", "S3"])
@pytest.mark.parametrize("narrow", NARROW)
def test_what_is_not_wider_is_untouched(dtype, narrow) -> None:
    array = np.ones(3, "i8").astype(dtype)
    assert arrays.narrowed(array, narrow)[0] is array


# -- rounding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", NARROW)
@given(data=st.data())
def test_float64_is_rounded_once_to_nearest_even(narrow, data) -> None:
    values = data.draw(st.lists(numbers(narrow), max_size=20))
    exact = np.array(values, dtype=np.float64)
    stored, error = arrays.narrowed(exact, narrow)
    assert stored.nbytes == 2 * exact.size
    wide = arrays.widened(stored, arrays.kind(exact))
    expected = np.array([nearest(value, narrow) for value in values], dtype=np.float64)
    np.testing.assert_array_equal(wide, expected)
    assert np.array_equal(np.signbit(wide), np.signbit(expected))
    finite = np.isfinite(exact)
    assert error == max(np.abs(exact[finite] - expected[finite]), default=0.0)


def all_kinds_of_bits(count: int = 300_000) -> np.ndarray:
    bits = np.random.default_rng(0).integers(0, 2**32, count, np.uint32)
    bits[::7] &= 0xFFFF0000
    bits[::7] |= 0x8000  # ties
    bits[:4] = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800000]  # NaNs, -inf
    return bits.view(np.float32)


def test_float32_to_bfloat16_is_what_torch_makes_of_it() -> None:
    values = all_kinds_of_bits()
    torchs = torch.from_numpy(values.copy()).to(torch.bfloat16)
    fits = (torchs.isfinite() | ~torch.from_numpy(values).isfinite()).numpy()
    stored, _ = arrays.narrowed(values[fits], "bfloat16")
    expected = torchs.float().numpy()[fits]
    np.testing.assert_array_equal(arrays.widened(stored, arrays.kind(values[fits])), expected)


def test_float16_is_what_struct_makes_of_it() -> None:
    values = all_kinds_of_bits(20_000)
    values = values[(np.abs(values) < 65520) | np.isinf(values)].astype(np.float64)
    expected = [struct.unpack("e", struct.pack("e", value))[0] for value in values]
    stored, _ = arrays.narrowed(values, "float16")
    np.testing.assert_array_equal(arrays.widened(stored, arrays.kind(values)), expected)


@pytest.mark.parametrize("narrow", NARROW)
@given(data=st.data())
def test_narrower_and_back_keeps_the_layout(narrow, data) -> None:
    dtype = data.draw(st.sampled_from(["f4", "f8", ">f4", "g", "c8", ">c16", "c16"]))
    array = data.draw(layouts(dtype))  # small integers: nothing is rounded
    stored, error = arrays.narrowed(array, narrow)
    assert error == 0.0
    assert arrays.nbytes(stored) == array.size * (4 if array.dtype.kind == "c" else 2)
    back = arrays.widened(stored, arrays.kind(array))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


def test_many_blocks_and_a_long_double() -> None:
    values = np.linspace(-3, 3, 200_001)
    expected = torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16).double().numpy()
    stored, error = arrays.narrowed(values.astype(np.longdouble), "bfloat16")
    back = arrays.widened(stored, arrays.kind(values.astype(np.longdouble)))
    assert back.dtype == np.longdouble
    assert np.mean(back == expected) > 0.999  # torch rounds twice
    assert error == pytest.approx(2.0**-7, rel=0.01)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8"])
@pytest.mark.parametrize("narrow", NARROW)
def test_a_value_that_is_too_large_is_an_error_and_no_infinity(dtype, narrow) -> None:
    large = {"float16": -7e4, "bfloat16": -3.4e38}[narrow]
    words = re.escape(f"value {large:.6g}, and the largest of {narrow} is {LARGEST[narrow]:.6g}")
    array = np.zeros(100_000, dtype)
    array[99_000] = large
    array[5] = np.inf
    with pytest.raises(StoreError, match=words):  # (and no warning, which would be an error here)
        arrays.narrowed(array, narrow)


def test_the_largest_fits() -> None:
    for narrow in NARROW:
        stored, error = arrays.narrowed(np.array([LARGEST[narrow], -np.inf, np.nan]), narrow)
        back = arrays.widened(stored, arrays.kind(np.zeros(3)))
        assert back[:2].tolist() == [LARGEST[narrow], -math.inf]
        assert math.isnan(back[2])
        assert error == 0.0
