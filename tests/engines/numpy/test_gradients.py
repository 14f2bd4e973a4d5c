"""`grad` and `value_and_grad`."""

from __future__ import annotations

import dataclasses
import warnings
from typing import NamedTuple

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import remat
from remat import trees

from .oracles import same_bits

X = np.array([0.3, -0.8, 1.7])
Y = np.array([1.1, 0.4, -0.6])


def product(x, y, scale=1.0):
    return np.sum(x**2 * y) * scale


def test_one_argument_gives_one_gradient() -> None:
    assert same_bits(remat.grad(product)(X, Y), 2 * X * Y)


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (0, 2 * X * Y),
        (1, X**2),
        (-1, X**2),
        ((0,), (2 * X * Y,)),
        ((0, 1), (2 * X * Y, X**2)),
        ((1, 0), (X**2, 2 * X * Y)),
        ((-1, -2), (X**2, 2 * X * Y)),
    ],
)
def test_wrt_picks_the_arguments(wrt, expected) -> None:
    found = remat.grad(product, wrt=wrt)(X, Y)
    assert isinstance(found, tuple) == isinstance(wrt, tuple)
    np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_keywords_are_passed_on() -> None:
    np.testing.assert_allclose(remat.grad(product)(X, Y, scale=3.0), 6 * X * Y)


def test_value_and_gradient_come_together() -> None:
    value, gradient = remat.value_and_grad(product)(X, Y)
    assert value == product(X, Y)
    assert same_bits(gradient, remat.grad(product)(X, Y))


def test_an_output_that_is_no_scalar_is_seeded_with_ones() -> None:
    np.testing.assert_allclose(remat.grad(np.sin)(X), np.cos(X))


def test_init_grad_seeds_the_output() -> None:
    np.testing.assert_allclose(remat.grad(np.sin)(X, init_grad=Y), np.cos(X) * Y)


def test_init_grad_may_be_a_tree() -> None:
    gradient = remat.grad(lambda x: {"a": x**2, "b": np.sum(x)})(X, init_grad={"a": Y, "b": 3.0})
    np.testing.assert_allclose(gradient, 2 * X * Y + 3.0)


@pytest.mark.parametrize("init_grad", [np.ones(2), np.ones((3, 1)), (np.ones(3),)])
def test_an_init_grad_that_does_not_fit_is_refused(init_grad) -> None:
    with pytest.raises(ValueError, match="init_grad"):
        remat.grad(np.sin)(X, init_grad=init_grad)


class Pair(NamedTuple):
    a: object
    b: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: object
    b: object


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, b],
        lambda a, b: {"a": a, "b": b},
        lambda a, b: {"z": {"y": (a, [b])}},
        Pair,
        Frozen,
    ],
)
def test_arguments_and_gradients_may_be_any_tree(make) -> None:
    def leaves(tree):
        return trees.flatten(tree)[0]

    def f(tree):
        a, b = leaves(tree)
        return np.sum(a * np.sin(b))

    gradient = remat.grad(f)(make(X, Y))
    assert type(gradient) is type(make(X, Y))
    found = leaves(gradient)
    np.testing.assert_allclose(found[0], np.sin(Y))
    np.testing.assert_allclose(found[1], X * np.cos(Y))


def test_what_is_no_float_in_a_tree_gets_no_gradient() -> None:
    gradient = remat.grad(lambda t: np.sum(t["x"] ** t["power"]))({"x": X + 2, "power": 3})
    assert gradient["power"] is None
    np.testing.assert_allclose(gradient["x"], 3 * (X + 2) ** 2)


@pytest.mark.parametrize("argument", [3, True, np.arange(3), "text", (1, 2)])
def test_an_argument_without_floats_is_refused(argument) -> None:
    with pytest.raises(TypeError, match="argument 0"):
        remat.grad(lambda x: 1.0)(argument)


@pytest.mark.parametrize("wrt", [(), "x", 1.0, True, (0, "x"), None])
def test_a_wrt_that_is_no_position_is_refused(wrt) -> None:
    with pytest.raises(TypeError, match="wrt"):
        remat.grad(product, wrt=wrt)


@pytest.mark.parametrize("wrt", [2, -3, (0, 5), (0, 0), (0, -2)])
def test_a_wrt_that_names_no_argument_is_refused(wrt) -> None:
    with pytest.raises(ValueError, match="wrt"):
        remat.grad(product, wrt=wrt)(X, Y)


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="f must be a function"):
        remat.grad(3.0)


def test_an_output_that_does_not_depend_warns() -> None:
    with pytest.warns(UserWarning, match="does not depend"):
        gradient = remat.grad(lambda x: 3.0)(X)
    assert same_bits(gradient, np.zeros(3))


@pytest.mark.parametrize("transform", [remat.grad, remat.value_and_grad])
def test_the_warning_points_at_the_caller(transform) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transform(lambda x: 3.0)(X)
    assert caught[0].filename == __file__


def model(np, x, y):
    z = np.tanh(np.dot(x, y) + x)
    for _ in range(5):
        z = np.sin(z * y) + z / (1.0 + z**2)
    return np.sum(z)


def test_the_bits_are_those_of_autograd() -> None:
    expected = autograd.grad(lambda x: model(anp, x, Y))(X)
    assert same_bits(remat.grad(lambda x: model(np, x, Y))(X), expected)


def test_gradients_of_gradients_of_plain_functions() -> None:
    second = remat.grad(remat.grad(lambda x: np.sum(x**4)))(X)
    np.testing.assert_allclose(second, 12 * X**2, rtol=1e-14)
    third = remat.grad(remat.grad(remat.grad(lambda x: np.sum(np.sin(x)))))(X)
    np.testing.assert_allclose(third, -np.cos(X), rtol=1e-14)


def test_gradients_inside_of_functions() -> None:
    def outer(x):
        return np.sum(remat.grad(lambda y: np.sum(y**3) * x[0])(x) * x)

    expected = autograd.grad(
        lambda x: anp.sum(autograd.grad(lambda y: anp.sum(y**3) * x[0])(x) * x)
    )(X)
    np.testing.assert_allclose(remat.grad(outer)(X), expected, rtol=1e-14)


def test_it_works_inside_of_autograd() -> None:
    found = autograd.grad(lambda x: anp.sum(remat.grad(lambda y: np.sum(y**3))(x)))(X)
    np.testing.assert_allclose(found, 6 * X, rtol=1e-14)


def test_the_gradient_function_has_the_name_of_its_function() -> None:
    assert remat.grad(product).__name__ == "product"
    assert remat.value_and_grad(product).__name__ == "product"
