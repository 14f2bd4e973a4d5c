"""Plain arrays that a traced op reads: the program may change them, but not in silence."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import remat
from remat.engines.numpy.recording.constants import checksum_of

from .oracles import same_bits

LARGE = 20_000  # floats: 160 KB
X = np.linspace(0.1, 1.0, LARGE)


def add_one(a: Any) -> None:
    a += 1


def exchange_neighbours(a: Any) -> None:
    a[7], a[8] = a[8], a[7]


def turn_around(a: Any) -> None:
    a[:] = a[::-1].copy()


def through_a_view(a: Any) -> None:
    a.reshape(2, -1)[1, 5] = 0


def negate(a: Any) -> None:
    a *= -1


CHANGES = [negate, add_one, exchange_neighbours, turn_around, through_a_view]


@pytest.mark.parametrize("change", CHANGES)
def test_a_large_array_that_changes_is_an_error(change) -> None:
    a = np.linspace(1, 2, LARGE)

    def f(x: Any) -> Any:
        y = x * a
        change(a)
        return np.sum(y)

    with pytest.raises(remat.ModifiedInputError, match=r"multiply.*test_plain_operands\.py:\d+"):
        remat.grad(f)(X)


@pytest.mark.parametrize("change", CHANGES)
def test_a_small_array_that_changes_is_copied(change) -> None:
    a = np.linspace(1, 2, 100)
    before = a.copy()

    def f(x: Any) -> Any:
        y = x * a
        change(a)
        return np.sum(y)

    assert same_bits(remat.grad(f)(X[:100]), before)


@pytest.mark.parametrize("scoped", [False, True])
def test_an_array_in_a_file_that_changes_is_an_error(scoped: bool, tmp_path) -> None:
    a = np.memmap(tmp_path / "a", np.float64, "w+", shape=LARGE)

    def f(x: Any) -> Any:
        with remat.CheckpointScope("part", enabled=scoped):
            y = np.sin(x * a)
        a[5] = 1
        return np.sum(y)

    with pytest.raises(remat.ModifiedInputError):
        remat.grad(f)(X)


def test_an_array_that_is_changed_back_is_an_error() -> None:
    mask = np.ones(LARGE)

    def f(x: Any) -> Any:
        total = 0.0
        for i in range(3):
            mask[i] = 0
            total = total + np.sum(x * mask) ** 2
            mask[i] = 1
        return total

    with pytest.raises(remat.ModifiedInputError):
        remat.grad(f)(X)


def test_signs_that_alternate_are_an_error() -> None:
    sign = np.ones(1 << 14)

    def f(x: Any) -> Any:
        total = 0.0
        for _ in range(4):  # at the end it is what it was
            total = total + np.sum(x * sign) ** 2
            np.negative(sign, out=sign)
        return total

    with pytest.raises(remat.ModifiedInputError):
        remat.grad(f)(np.linspace(0.1, 1.0, 1 << 14))


def test_an_index_that_changes_is_an_error() -> None:
    index = np.arange(LARGE)

    def f(x: Any) -> Any:
        y = x[index] * x
        index[:] = 0
        return np.sum(y)

    with pytest.raises(remat.ModifiedInputError, match="getitem"):
        remat.grad(f)(X)


def test_an_array_that_a_rule_and_a_scope_have_read() -> None:
    a = np.linspace(1, 2, LARGE)

    def f(x: Any) -> Any:
        with remat.CheckpointScope("part"):
            x = np.sin(x * a)
        x = x * a
        a[3] = 0
        return np.sum(x)

    with pytest.raises(remat.ModifiedInputError):
        remat.grad(f)(X)


def test_what_no_rule_needs_may_change() -> None:
    a = np.linspace(1, 2, LARGE)

    def f(x: Any) -> Any:
        y = x + a  # the slope does not depend on it
        seen = x * a  # is not a part of the result
        a[:] = 0
        assert seen.shape == y.shape
        return np.sum(y * y)

    assert same_bits(remat.grad(f)(X), 2 * (X + np.linspace(1, 2, LARGE)))


def test_an_array_that_nobody_can_write_to_is_not_looked_at(monkeypatch) -> None:
    a, x = np.full(LARGE, 3.0), X.copy()
    a.flags.writeable = x.flags.writeable = False
    monkeypatch.setattr("remat.engines.numpy.recording.constants.checksum_of", None)
    assert same_bits(remat.grad(lambda x: np.sum(x * a))(x), a)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(30_000.0).reshape(150, 200),
        np.arange(30_000.0).reshape(150, 200).T,
        np.arange(60_000.0)[::2],
        np.arange(90_000, dtype=np.uint8),
        np.arange(90_001, dtype=np.float32)[1:],
        np.arange(30_000, dtype=np.complex128).reshape(3, 100, 100).swapaxes(0, 2),
    ],
    ids=["c", "f", "strided", "bytes", "odd", "turned"],
)
def test_a_checksum_sees_any_change(array) -> None:
    before = checksum_of(array)
    for place in (0, 1, array.size // 2, array.size - 1):
        index = np.unravel_index(place, array.shape)
        old = array[index].copy()
        array[index] = old + 1
        assert checksum_of(array) != before
        array[index] = old
    index = np.unravel_index([5, 6], array.shape)
    array[index] = array[index][::-1]
    assert checksum_of(array) != before


def test_a_checksum_of_a_broadcast_array_reads_it_once() -> None:
    small = np.arange(5.0)
    assert checksum_of(np.broadcast_to(small, (10_000, 5))) == checksum_of(small)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.complex128])
def test_a_checksum_sees_changes_of_sign(dtype) -> None:
    # 16 whole rows of 4 KB: sums modulo 2**64 of such rows do not see an even number of signs.
    count = 16 * 4096 // np.dtype(dtype).itemsize
    checkerboard = (-1.0) ** np.add.outer(np.arange(16), np.arange(count // 16))
    for numbers in (np.ones(count), checkerboard, 1000 * np.sin(np.arange(count))):
        array = numbers.astype(dtype)
        assert checksum_of(array) == checksum_of(array.copy())
        assert checksum_of(array) != checksum_of(-array)


def test_a_checksum_sees_every_bit() -> None:
    array = np.random.default_rng(0).standard_normal(1024)
    words = array.view(np.uint64)
    before = checksum_of(array)
    for place in range(512):
        for bit in range(64):
            words[place] ^= np.uint64(1) << np.uint64(bit)
            assert checksum_of(array) != before
            words[place] ^= np.uint64(1) << np.uint64(bit)


SHAPE_ONLY = {
    "fft": lambda y: np.real(np.fft.ifft(np.fft.fft(y))),
    "index": lambda y: y[np.arange(0, LARGE, 2)],
    "slice": lambda y: y[1:] * 1.0,
    "reshape": lambda y: np.reshape(y, (2, -1)) * 1.0,
    "ravel": lambda y: np.ravel(y) * 1.0,
}


@pytest.mark.parametrize("name", SHAPE_ONLY)
def test_a_rule_that_needs_a_shape_holds_no_array(name) -> None:
    alive = []

    def f(x: Any) -> Any:
        y = x * 2.0
        alive.append(weakref.ref(y._value))
        z = SHAPE_ONLY[name](y)
        del y
        assert alive[0]() is None
        return np.sum(z)

    gradient = remat.grad(f)(X)
    assert gradient.shape == X.shape
    np.testing.assert_allclose(gradient.max(), 2.0)
