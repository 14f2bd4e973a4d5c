"""Tensors as stores see them: bytes and back, narrower and back."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat.engines.torch.arrays import TorchArrays
from remat.errors import StoreError

from ...stores.oracles import LARGEST, nearest, numbers

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
arrays = TorchArrays()
NARROW = ["bfloat16", "float16"]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
]


@st.composite
def layouts(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """Tensors with axes in any order, with gaps or expanded."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = torch.randint(0, 9, shape, generator=generator).to(dtype)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    if shape and draw(st.booleans()):
        tensor = tensor.expand(2, *tensor.shape)
    return tensor


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    fresh = [t.clone(memory_format=torch.contiguous_format).view(-1) for t in (one, other)]
    return torch.equal(*(t.view(torch.uint8) for t in fresh))


@given(st.sampled_from(DTYPES).flatmap(layouts))
def test_bytes_and_back(tensor: torch.Tensor) -> None:
    data = arrays.to_bytes(tensor)
    assert data.format == "B"
    assert len(data) == arrays.nbytes(tensor) == tensor.numel() * tensor.element_size()
    assert same(arrays.from_bytes(bytearray(data), arrays.kind(tensor)), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dense_tensor_is_not_copied_and_keeps_its_strides(dtype) -> None:
    image = torch.zeros(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)
    for tensor in (image, image.transpose(1, 3), torch.zeros(3, 4, dtype=dtype).T):
        data = arrays.to_bytes(tensor)
        back = arrays.from_bytes(data, arrays.kind(tensor))
        assert back.data_ptr() == tensor.data_ptr()
        assert back.stride() == tensor.stride()


def test_conjugate_and_negative_views_come_back_as_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    for view in (tensor.conj(), tensor.conj().imag):
        back = arrays.from_bytes(arrays.to_bytes(view), arrays.kind(view))
        assert torch.equal(back, view)
        assert not back.is_conj()
        assert not back.is_neg()


def test_what_comes_back_is_detached() -> None:
    tensor = torch.nn.Parameter(torch.ones(3))
    back = arrays.from_bytes(arrays.to_bytes(tensor), arrays.kind(tensor))
    stored, _ = arrays.narrowed(tensor * 2, "bfloat16")
    assert not back.requires_grad
    assert not stored.requires_grad
    assert type(back) is torch.Tensor


class Sub(torch.Tensor):
    pass


def wrapped() -> torch.Tensor:
    found = []
    torch.func.vmap(lambda x: (found.append(x), x)[1])(torch.ones(2))
    return found[0]


OTHERS = {
    "number": lambda: 2.5,
    "none": lambda: None,
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "subclass": lambda: torch.ones(3).as_subclass(Sub),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
    "vmap": wrapped,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_kind_stays_as_it_is(name: str) -> None:
    leaf = OTHERS[name]()
    assert arrays.kind(leaf) is None
    assert arrays.narrowed(leaf, "bfloat16")[0] is leaf
    assert arrays.nbytes(leaf) >= 0


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        tensor = torch.ones(3, device="cpu")
        back = arrays.from_bytes(arrays.to_bytes(tensor), arrays.kind(tensor))
        stored, _ = arrays.narrowed(tensor, "float16")
        wide = arrays.widened(stored, arrays.kind(tensor))
    assert torch.equal(back, tensor)
    assert torch.equal(wide, tensor)


# -- rounding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", NARROW)
@given(data=st.data())
def test_float64_is_rounded_once_to_nearest_even(narrow, data) -> None:
    values = data.draw(st.lists(numbers(narrow), max_size=20))
    exact = torch.tensor(values, dtype=torch.float64)
    stored, error = arrays.narrowed(exact, narrow)
    wide = arrays.widened(stored, arrays.kind(exact))
    expected = torch.tensor([nearest(value, narrow) for value in values], dtype=torch.float64)
    assert torch.equal(wide.nan_to_num(nan=7e7, posinf=8e88), expected.nan_to_num(7e7, 8e88))
    assert torch.equal(wide.signbit()[~wide.isnan()], expected.signbit()[~wide.isnan()])
    errors = (exact - expected).abs()[exact.isfinite()].tolist()
    assert error == max(errors, default=0.0)


@pytest.mark.parametrize("narrow", NARROW)
def test_float32_is_rounded_as_torch_does(narrow) -> None:
    values = torch.linspace(-300, 300, 600_001)  # more than one block
    stored, error = arrays.narrowed(values, narrow)
    assert torch.equal(stored, values.to(getattr(torch, narrow)))
    assert error == float((values - stored.float()).abs().max())


@pytest.mark.parametrize("narrow", NARROW)
@given(data=st.data())
def test_narrower_and_back_keeps_the_layout(narrow, data) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.complex64]))
    tensor = data.draw(layouts(dtype))
    stored, error = arrays.narrowed(tensor, narrow)
    assert error == 0.0
    assert stored.numel() == tensor.numel() * (2 if dtype.is_complex else 1)
    assert stored.element_size() == 2
    assert same(arrays.widened(stored, arrays.kind(tensor)), tensor)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize <= 2 or not d.is_signed])
def test_what_is_not_wider_is_untouched(dtype) -> None:
    tensor = torch.ones(3).to(dtype)
    for narrow in NARROW:
        assert arrays.narrowed(tensor, narrow)[0] is tensor


def test_integers_are_untouched() -> None:
    tensor = torch.arange(3)
    assert arrays.narrowed(tensor, "float16")[0] is tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("narrow", NARROW)
def test_a_value_that_is_too_large_is_an_error_and_no_infinity(dtype, narrow) -> None:
    large = {"float16": -7e4, "bfloat16": -3.4e38}[narrow]
    words = re.escape(f"value {large:.6g}, and the largest of {narrow} is {LARGEST[narrow]:.6g}")
    tensor = torch.zeros(300_000, dtype=dtype)
    tensor[290_000] = large
    tensor[5] = math.inf
    with pytest.raises(StoreError, match=words):
        arrays.narrowed(tensor, narrow)
