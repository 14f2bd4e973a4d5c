"""A traced call gives the bits and the type of the plain one, or an error of remat's own."""

# ruff: noqa: PLW0108, PLC3002  (lambdas in one form make a table)

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import remat

from .every_function import all_names, value_complaints
from .oracles import difference_quotient, same_bits

A = np.array([[0.31, 0.82, 0.53], [0.94, 0.25, 0.66], [0.47, 0.78, 0.19]])
Z = A * (1 - 0.5j)
SINGLE = A.astype(np.float32)
HOLES = np.array([0.3, np.nan, 0.5])


@pytest.mark.parametrize("part", range(8))
def test_a_sample_of_all_calls_of_all_functions(part: int) -> None:
    found = {name: value_complaints(name, one_in=64) for name in all_names()[part::8]}
    assert {name: words for name, words in found.items() if words} == {}


CALLS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "square": (lambda x: x**2, Z),
    "root": (lambda x: x**0.5, Z),
    "reciprocal": (lambda x: x**-1, Z),
    "square in place": (lambda x: operator.ipow(x.copy(), 2), Z),
    "multi_dot": (lambda x: np.linalg.multi_dot([x, x[:, :1], x[:1]]), A),
    "matrix_power": (lambda x: np.linalg.matrix_power(x, 7), A),
    "vecdot": (lambda x: np.vecdot(x, x), Z),
    "svdvals": (np.linalg.svdvals, A),
    "eigvalsh": (np.linalg.eigvalsh, A + A.T),
    "vector_norm": (np.linalg.vector_norm, Z.astype(np.complex64)),
    "cumprod": (np.cumprod, Z),
    "prod of a transposed array": (lambda x: np.prod(x.T), np.arange(1, 25.0).reshape(2, 3, 4) / 9),
    "median with NaN": (np.median, HOLES),
    "average": (lambda x: np.average(x, weights=x), SINGLE),
    "nanmean": (np.nanmean, SINGLE),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_segment_repeats_the_bits_of_its_first_run(call: tuple[Any, Any]) -> None:
    function, x = call
    values = []

    def f(x: Any) -> Any:
        y = remat.checkpoint(function, x)
        values.append(y)
        return np.sum(np.real(y))

    remat.grad(f)(x.copy())  # a RecomputeMismatchError, if the traced run differs
    assert same_bits(remat.value_and_grad(function)(x.copy())[0], function(x.copy()))


FOLLOWED = {
    "repeat by counts": lambda x: np.repeat(x, [1, 2, 0], axis=0),
    "repeat, method": lambda x: x[0].repeat([2, 1, 3]),
    "transpose(0)": lambda x: x[0].transpose(0) * x[0],
    "transpose of a vector": lambda x: np.transpose(x[1], -1),
    "divmod": lambda x: np.stack(divmod(x, 0.4)),
    "np.divmod": lambda x: np.divmod(x, 0.4)[1],
    "cumsum with a dtype": lambda x: x.cumsum(axis=0, dtype=np.complex128).real,
    "cumprod of a number": lambda x: np.cumprod(x[0, 0]),
    "array like": lambda x: np.array([x[0, 0], x[1, 1] * 2], like=x),
    "median over axes": lambda x: np.median(np.stack([x, x * x]), axis=(0, 2), keepdims=True),
    "median of rows": lambda x: np.median(x, axis=1),
    "average over axes": lambda x: np.average(np.stack([x, x]), axis=(2, 0), weights=x[:, :2]),
    "gradient": lambda x: sum(np.gradient(x, 0.3)),
    "round": lambda x: round(x[0, 0], 1) * x,
    "vecdot": lambda x: np.vecdot(x, x[::-1] ** 2),
    "matrix_power": lambda x: np.linalg.matrix_power(x, 5),
    "kron": lambda x: np.kron(x, x[:2]),
    "out, wider": lambda x: np.multiply(x[0], 2.0, out=x * 1.0),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_autograd_does_not_follow(name: str) -> None:
    def f(x: Any) -> Any:
        return np.sum(np.sin(FOLLOWED[name](x)))

    def slope(x: Any) -> Any:
        return np.sum(remat.grad(f)(x) * A.T)

    np.testing.assert_allclose(remat.grad(f)(A), difference_quotient(f, A), rtol=1e-6, atol=1e-7)
    second = difference_quotient(slope, A)
    np.testing.assert_allclose(remat.grad(slope)(A), second, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_parts_of_complex_numbers_are_assigned_to() -> None:
    def f(x: Any) -> Any:
        z = x * (1 + 2j)
        z.real = x**2
        z.imag = x**3
        z[0].real = x[0, 0] * 1j + x[0, 1]
        return np.sum(np.abs(z))

    np.testing.assert_allclose(remat.grad(f)(A), difference_quotient(f, A), rtol=1e-6)


class Subclass(np.ndarray):
    pass


REFUSED = {
    "a subclass": lambda x: np.minimum(x, A.view(Subclass)),
    "an operator with one": lambda x: x * A.view(Subclass),
    "one on the left": lambda x: A.view(Subclass) @ x,
    "shape": lambda x: setattr(x, "shape", (9,)),
    "dtype": lambda x: setattr(x, "dtype", np.complex128),
    "out of conj": lambda x: x.conj(np.zeros((3, 3))),
    "several of two results": lambda x: np.frexp(x),
    "a list": lambda x: np.dot(x, [0.1, 0.2, 0.3]),
    "without like": lambda x: np.array([x[0, 0], x[1, 1] * 2]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_followed_is_an_error_of_ours(name: str) -> None:
    with pytest.raises(remat.UnsupportedError):
        remat.grad(lambda x: np.sum(REFUSED[name](x)))(A)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: np.transpose(x, (0, 0)),
        lambda x: np.repeat(x, [1, 2], axis=0),
        lambda x: np.cumsum(x, axis=5),
        lambda x: np.linalg.inv(x[:2]),
        lambda x: x + np.ones(2),
        lambda x: np.matmul(x, np.ones(2)),
    ],
)
def test_what_numpy_refuses_is_its_own_error(call: Any) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011
        call(A)
    with pytest.raises(expected.type):
        remat.grad(lambda x: np.sum(call(x)))(A)


SPECTRA = {
    "eigh": lambda x: (lambda e: (e[1] * np.exp(e[0])) @ e[1].T)(np.linalg.eigh(x + x.T)),
    "svd": lambda x: (lambda u, s, v: (u * np.exp(s)) @ v)(*np.linalg.svd(x, full_matrices=False)),
    "full svd": lambda x: (lambda u, s, v: (u * np.exp(s)) @ v)(*np.linalg.svd(x)),
    "wide svd": lambda x: (lambda u, s, v: (u * s**3) @ v)(
        *np.linalg.svd(x[:2], full_matrices=False)
    ),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_second_derivatives_of_values_and_vectors(name: str) -> None:
    def f(x: Any) -> Any:
        return np.sum(np.sin(SPECTRA[name](x)))

    def slope(x: Any) -> Any:
        return np.sum(remat.grad(f)(x) * A.T)

    expected = difference_quotient(slope, A)
    np.testing.assert_allclose(remat.grad(slope)(A), expected, rtol=1e-4, atol=1e-4)


def test_a_function_of_others_is_dropped_in_a_scope() -> None:
    def f(x: Any, *, enabled: bool) -> Any:
        with remat.CheckpointScope("call", enabled=enabled):
            y = np.median(np.cumprod(np.linalg.matrix_power(x * 1.0, 3), axis=0), axis=1)
        return np.sum(np.sin(y))

    found = remat.grad(lambda x: f(x, enabled=True))(A)
    assert same_bits(found, remat.grad(lambda x: f(x, enabled=False))(A))
    np.testing.assert_allclose(
        found, difference_quotient(lambda x: f(x, enabled=False), A), rtol=1e-6, atol=1e-8
    )


def test_products_of_nothing() -> None:
    def f(x):
        return np.sum(np.cumprod(x[:0], axis=0)) + np.sum(np.cumprod(x[:, :0])) + np.sum(x)

    value, gradient = remat.value_and_grad(f)(A)
    assert value == f(A)
    np.testing.assert_array_equal(gradient, np.ones_like(A))


@pytest.mark.parametrize("dtype", [np.complex128, np.complex64])
@pytest.mark.parametrize("form", ["both", "left", "right", "in place"])
def test_products_of_complex_numbers_have_the_bits_of_the_operator(dtype: Any, form: str) -> None:
    """NumPy multiplies complex numbers that are no arrays without fused operations."""
    rng = np.random.default_rng(3)

    def product(a: Any, b: Any) -> Any:
        if form == "in place":
            a = a * 1
            a *= b
            return a
        return {"both": a * b, "left": a * complex(0.3, -0.7), "right": complex(0.3, 0.7) * a}[form]

    for _ in range(50):
        a, b = (dtype(complex(*rng.normal(size=2))) for _ in range(2))
        seen: list[Any] = []

        def loss(a: Any, b: Any, seen: list[Any] = seen) -> Any:
            seen.append(product(a, b))
            return np.real(seen[-1] * (0.4 + 1.3j))

        value, (da, _) = remat.value_and_grad(loss, wrt=(0, 1))(a, b)
        assert same_bits(value, loss(a, b))
        slope = (loss(a + dtype(1), b) - loss(a - dtype(1), b)) / 2  # exact: it is linear
        assert np.isclose(np.real(da), slope, rtol=1e-5, atol=1e-5)
