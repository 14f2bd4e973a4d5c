"""Every function of NumPy on traced arrays: the right number, or an error; never a wrong one."""

# ruff: noqa: PLW0108, PLC3002  (lambdas in one form make a table)

from __future__ import annotations

import math

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import remat

from .every_function import complaints, functions
from .oracles import difference_quotient, same_bits

FUNCTIONS = functions()

# Gradients or values that differ from NumPy's: see the complaints of `judge` for the patterns.
WRONG: dict[str, str] = {}
# Errors that are neither UnsupportedError nor TypeError nor NotImplementedError.
CRASHES: dict[str, str] = {
    "np.linalg.svd": "mask,A,0, traced [1, 2]: raised ValueError: The truth val...",
}


def marked(known: dict[str, str]) -> list[object]:
    return [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=known[name]))
        if name in known
        else name
        for name in FUNCTIONS
    ]


@pytest.mark.parametrize("name", marked(WRONG))
def test_a_function_gives_the_right_number_or_none(name: str) -> None:
    assert [words for words in complaints(name) if "raised" not in words] == []


@pytest.mark.parametrize("name", marked(CRASHES))
def test_a_function_that_is_not_followed_says_so(name: str) -> None:
    assert [words for words in complaints(name) if "raised" in words] == []


# -- what has to be followed, not just refused -----------------------------------------------------

A = np.array([[0.31, 0.82, 0.53], [0.94, 0.25, 0.66], [0.47, 0.78, 0.19]])
V = np.array([0.2, 0.5, 0.9])

FOLLOWED = {
    "concatenate": lambda np, x: np.concatenate([x, x * 2, V[None]]),
    "concatenate axis": lambda np, x: np.concatenate((x, x**2), axis=1),
    "stack": lambda np, x: np.stack([x[0], x[1] * 2]),
    "vstack": lambda np, x: np.vstack([x[0], x]),
    "hstack": lambda np, x: np.hstack([x, x]),
    "where": lambda np, x: np.where(x > 0.5, x**2, np.sin(x)),
    "einsum": lambda np, x: np.einsum("ij,jk->ik", x, x),
    "einsum batch": lambda np, x: np.einsum("bi,bi->b", x, x),
    "dot": lambda np, x: np.dot(x, x),
    "matmul": lambda np, x: x @ V,
    "tensordot": lambda np, x: np.tensordot(x, x, axes=1),
    "outer": lambda np, x: np.outer(x[0], x[1]),
    "sum": lambda np, x: np.sum(x, axis=0),
    "mean": lambda np, x: np.mean(x, axis=1, keepdims=True),
    "var": lambda np, x: np.var(x, axis=0),
    "max": lambda np, x: np.max(x, axis=0),
    "prod": lambda np, x: np.prod(x, axis=1),
    "cumsum": lambda np, x: np.cumsum(x, axis=1),
    "sort": lambda np, x: np.sort(x[0]),
    "clip": lambda np, x: np.clip(x, 0.3, 0.75),
    "maximum": lambda np, x: np.maximum(x, 0.45),
    "reshape": lambda np, x: np.reshape(x, (9,)),
    "transpose": lambda np, x: np.transpose(x),
    "expand_dims": lambda np, x: np.expand_dims(x, 1),
    "squeeze": lambda np, x: np.squeeze(x[None]),
    "swapaxes": lambda np, x: np.swapaxes(x, 0, 1),
    "roll": lambda np, x: np.roll(x, 1, axis=0),
    "repeat": lambda np, x: np.repeat(x, 2, axis=0),
    "tile": lambda np, x: np.tile(x, (2, 1)),
    "diag": lambda np, x: np.diag(x),
    "trace": lambda np, x: np.trace(x),
    "tril": lambda np, x: np.tril(x),
    "inv": lambda np, x: np.linalg.inv(x),
    "solve": lambda np, x: np.linalg.solve(x, V),
    "det": lambda np, x: np.linalg.det(x),
    "norm": lambda np, x: np.linalg.norm(x),
    "cholesky": lambda np, x: np.linalg.cholesky(x @ x.T + np.eye(3)),
    "eigh": lambda np, x: np.linalg.eigh(x + x.T)[0],
    "svd": lambda np, x: np.linalg.svd(x, full_matrices=False)[1],
    "slogdet": lambda np, x: np.linalg.slogdet(x)[1],
    "fft": lambda np, x: np.abs(np.fft.fft(x)),
    "logaddexp": lambda np, x: np.logaddexp(x, 0.3),
    "exp": lambda np, x: np.exp(x),
    "power": lambda np, x: x**2.5,
    "split": lambda np, x: np.split(x, 3)[1],
    "pad": lambda np, x: np.pad(x, ((1, 0), (0, 2)), mode="constant"),
    "moveaxis": lambda np, x: np.moveaxis(x, 0, 1),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_plain_numpy_gives_the_bits_of_autograd_numpy(name: str) -> None:
    function = FOLLOWED[name]
    expected = autograd.grad(lambda x: anp.sum(function(anp, x) * 1.3))(A)
    found = remat.grad(lambda x: np.sum(function(np, x) * 1.3))(A)
    assert same_bits(found, expected)


@pytest.mark.parametrize("name", FOLLOWED)
def test_plain_numpy_agrees_with_difference_quotients(name: str) -> None:
    def f(x: np.ndarray) -> float:
        return np.sum(np.sin(FOLLOWED[name](np, x)))

    np.testing.assert_allclose(remat.grad(f)(A), difference_quotient(f, A), rtol=1e-6, atol=1e-7)


BEYOND_AUTOGRAD = {
    "pad by default": lambda x: np.pad(x, 1),
    "diagonal": lambda x: np.diagonal(x),
    "diagonal method": lambda x: x.diagonal(),
    "broadcast_to": lambda x: np.broadcast_to(x, (2, 3, 3)),
    "linalg.trace": lambda x: np.linalg.trace(x),
    "gradient": lambda x: np.gradient(x, axis=0),
    "outer of matrices": lambda x: np.outer(x, x),
    "diag of a wide matrix": lambda x: np.diag(x[:2]),
    "cumprod method": lambda x: x.cumprod(axis=0),
    "transpose method": lambda x: x.transpose(1, 0),
    "take method": lambda x: x.take([0, 2], axis=1),
    "compress method": lambda x: x.compress([True, False, True], axis=0),
    "eigh by name": lambda x: np.linalg.eigh(x + x.T).eigenvalues,
    "tile by a number": lambda x: np.tile(x, 2),
    "linspace": lambda x: np.linspace(x[0, 0], x[1, 1]),
    "linspace of rows": lambda x: np.linspace(x[0], x[1], 5, endpoint=False, axis=1),
    "linspace with its step": lambda x: np.linspace(x[0], 2.0, num=4, retstep=True)[1],
    "cross with axes": lambda x: np.cross(x, x * x, axisa=0, axisb=1, axisc=0),
    "cross with an axis": lambda x: np.cross(x, x[::-1], axis=0),
    "cross in the plane": lambda x: np.cross(x[:, :2], x[::-1, 1:]),
    "cross of a plane and space": lambda x: np.cross(x[:, :2], x[::-1]),
    "rfft shorter": lambda x: np.abs(np.fft.rfft(x, n=2)),
    "rfft longer": lambda x: np.imag(np.fft.rfft(x, n=8, axis=0)),
    "rfft of odd length": lambda x: np.real(np.fft.rfft(x, norm="ortho")),
    "rfft2": lambda x: np.abs(np.fft.rfft2(x, s=(4, 5))),
    "rfftn forward": lambda x: np.imag(np.fft.rfftn(x, norm="forward")),
    "irfft": lambda x: np.fft.irfft(x * (1 + 2j * x)),
    "irfft odd": lambda x: np.fft.irfft(x * (1 + 2j * x), n=5),
    "irfft shorter": lambda x: np.fft.irfft(x * (1 + 2j * x), n=2, axis=0),
    "irfft2": lambda x: np.fft.irfft2(x * (1 + 2j * x), s=(2, 7)),
    "irfftn of reals": lambda x: np.fft.irfftn(x),
    "svd of a square": lambda x: np.abs(np.linalg.svd(x)[0]),
    "svd, values of a wide one": lambda x: np.linalg.svd(x[:2])[1],
    "svd, product of a tall one": lambda x: (lambda u, s, v: (u[:, :2] * s) @ v)(
        *np.linalg.svd(x[:, :2])
    ),
    "einsum ii": lambda x: np.einsum("ii", x),
    "einsum ii->i": lambda x: np.einsum("ii->i", x),
    "einsum iij": lambda x: np.einsum("iij,j->i", x[:, None] * x.T[..., None], V),
    "einsum ...ii": lambda x: np.einsum("...ii,jj->...j", np.stack([x, x * x]), x),
    "einsum lists": lambda x: np.einsum(x, [0, 0], x, [0, 1], [1]),
    "item, tolist": lambda x: np.stack([x.item(4), *x.tolist()[0]]),
    "format": lambda x: x * float(f"{x[0, 0]:.1f}"),
}


@pytest.mark.filterwarnings("ignore:Arrays of 2-dimensional vectors")
@pytest.mark.parametrize("name", BEYOND_AUTOGRAD)
def test_functions_that_autograd_does_not_follow(name: str) -> None:
    def f(x: np.ndarray) -> float:
        return np.sum(np.sin(BEYOND_AUTOGRAD[name](x)))

    np.testing.assert_allclose(remat.grad(f)(A), difference_quotient(f, A), rtol=1e-6, atol=1e-7)


METHODS = {
    "sum": lambda x: x.sum(axis=0),
    "mean": lambda x: x.mean(axis=1, keepdims=True),
    "std": lambda x: x.std(),
    "var": lambda x: x.var(axis=0),
    "prod": lambda x: x.prod(axis=0),
    "max": lambda x: x.max(axis=1),
    "min": lambda x: x.min(),
    "cumsum": lambda x: x.cumsum(axis=0),
    "clip": lambda x: x.clip(0.3, 0.75),
    "reshape": lambda x: x.reshape(9),
    "reshape star": lambda x: x.reshape(1, 9),
    "ravel": lambda x: x.ravel(),
    "flatten": lambda x: x.flatten(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "squeeze": lambda x: x[None].squeeze(),
    "repeat": lambda x: x.repeat(2, axis=1),
    "trace": lambda x: x.trace(),
    "dot": lambda x: x.dot(V),
    "copy": lambda x: x.copy(),
    "astype float32": lambda x: x.astype(np.float32),
    "conj": lambda x: x.conj(),
    "real": lambda x: x.real,
    "round": lambda x: x + x.round(),
    "ptp": lambda x: np.ptp(x, axis=0),
    "iteration": lambda x: sum(row * i for i, row in enumerate(x)),
    "builtin sum": lambda x: sum(x),
    "builtin abs": lambda x: abs(x - 0.5),
    "unpacking": lambda x: (lambda a, b, c: a * b + c)(*x),
    "neg, pos": lambda x: -x + +x * 3,
    "mod": lambda x: x % 0.35,
    "floordiv": lambda x: x + x // 0.3,
    "reflected": lambda x: 2.0 / (2.0 - x),
    "rpow": lambda x: 2.0**x,
    "rmatmul": lambda x: V @ x,
    "np.float64 on the left": lambda x: np.float64(2.0) * x - np.float64(1.0) / x,
    "array on the left": lambda x: A * x - A / x + A @ x,
    "add.reduce": lambda x: np.add.reduce(x),
    "multiply.reduce": lambda x: np.multiply.reduce(x, axis=1),
    "maximum.reduce": lambda x: np.maximum.reduce(x, axis=None),
    "add.accumulate": lambda x: np.add.accumulate(x),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_and_operators(name: str) -> None:
    def f(x: np.ndarray) -> float:
        return np.sum(np.sin(METHODS[name](x)))

    value, gradient = remat.value_and_grad(f)(A)
    assert value == f(A)
    tolerance = 1e-3 if "float32" in name else 1e-6
    expected = difference_quotient(f, A, 1e-2 if "float32" in name else 1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [int, bool, np.int32])
def test_a_cast_to_whole_numbers_has_no_slope(dtype: type) -> None:
    def f(x: np.ndarray) -> float:
        return np.sum(x.astype(dtype) * x)

    np.testing.assert_allclose(remat.grad(f)(V + 2), difference_quotient(f, V + 2), rtol=1e-6)


@pytest.mark.parametrize(
    "lossy",
    [
        lambda x: np.array([x[0], x[1]]),
        lambda x: np.asarray(x),
        lambda x: np.array(x),
        lambda x: np.ascontiguousarray(x),
        lambda x: np.zeros(3).__setitem__(slice(None), x),
        lambda x: np.zeros(3).__iadd__(x),
        lambda x: np.add(x, 1.0, out=np.zeros(3)),
        lambda x: float(x[0]),
        lambda x: np.fromiter(iter(x), float),
        lambda x: np.random.default_rng(0).normal(x),
        lambda x: np.r_[x, x],
        lambda x: np.c_[x, x],
        lambda x: np.sum([x[0], x[1]]),
        lambda x: np.sin([x[0], x[1]]),
        lambda x: np.full(3, x[0]),
        lambda x: np.array([x[0], x[1]], dtype=object),
        lambda x: math.exp(x[0]),
        lambda x: np.zeros(3).__setitem__(0, x[0]),
        lambda x: np.zeros(3, int).__setitem__(0, x[0]),
        lambda x: x.flat[0],
    ],
    ids=[
        "array",
        "asarray",
        "array2",
        "contiguous",
        "setitem",
        "iadd",
        "out",
        "float",
        "iter",
        "rng",
        *("r_", "c_", "list", "ufunc of a list", "full", "objects", "math", "entry", "whole entry"),
        "flat",
    ],
)
def test_a_traced_array_never_becomes_a_plain_one_in_silence(lossy) -> None:
    with pytest.raises(remat.UnsupportedError):
        remat.grad(lambda x: np.sum(x) + 0.0 * np.sum(lossy(x)))(V)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_gradient_has_the_type_of_the_argument(dtype: type) -> None:
    gradient = remat.grad(lambda x: np.sum(np.tanh(x @ x)))(A.astype(dtype))
    assert gradient.dtype == dtype


def test_filling_a_plain_array_says_what_to_write_instead() -> None:
    def fill(x):
        out = np.zeros(3)
        out[0] = x[0]
        return np.sum(out)

    with pytest.raises(remat.UnsupportedError, match=r"out = np.zeros.*np.stack"):
        remat.grad(fill)(V)


@pytest.mark.parametrize("options", [{"where": V > 0.3}, {"initial": 0.1}], ids=str)
@pytest.mark.parametrize("name", ["sum", "max", "min", "mean", "std", "var", "prod"])
def test_methods_refuse_the_options_that_functions_refuse(name: str, options: dict) -> None:
    with pytest.raises((remat.UnsupportedError, TypeError)):
        remat.grad(lambda x: getattr(x, name)(**options))(V)


def test_the_vectors_that_a_full_svd_adds_have_no_gradient() -> None:
    with pytest.raises(remat.UnsupportedError, match="full_matrices=False"):
        remat.grad(lambda x: np.sum(np.linalg.svd(np.stack([x, x * x]))[2][2]))(V)
