"""`checkpoint` on NumPy arrays."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any, NamedTuple

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import remat

from .oracles import difference_quotient, same_bits

rng = np.random.default_rng(2)
W = rng.normal(size=(3, 3))
X = rng.normal(size=3)


def layer(np):
    def f(x, W, *, scale=1.0):
        return np.tanh(x @ W) * scale

    return f


def loss_of(call):
    return lambda x, W: np.sum(call(x, W) ** 2)


EXPECTED = [autograd.grad(lambda x, W: anp.sum(layer(anp)(x, W) ** 2), i)(X, W) for i in range(2)]


def as_call(x, W):
    return remat.checkpoint(layer(np), x, W)


def as_call_with_keywords(x, W):
    return remat.checkpoint(layer(np), x, W=W)


def as_wrapper(x, W):
    return remat.checkpoint(layer(np))(x, W)


@remat.checkpoint
def as_decorator(x, W):
    return layer(np)(x, W)


@remat.checkpoint()
def as_called_decorator(x, W):
    return layer(np)(x, W)


@remat.checkpoint(preserve_rng_state=False)
def as_decorator_with_options(x, W):
    return layer(np)(x, W)


@remat.checkpoint(use_reentrant=False)
def as_decorator_as_in_torch(x, W):
    return layer(np)(x, W)


def as_call_as_in_torch(x, W):
    return remat.checkpoint(layer(np), x, W, use_reentrant=False)


FORMS = [
    as_call,
    as_call_with_keywords,
    as_wrapper,
    as_decorator,
    as_called_decorator,
    as_decorator_with_options,
    as_decorator_as_in_torch,
    as_call_as_in_torch,
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_gradient_of_the_function(form) -> None:
    value, found = remat.value_and_grad(loss_of(form), wrt=(0, 1))(X, W)
    assert value == np.sum(layer(np)(X, W) ** 2)
    for one, other in zip(found, EXPECTED, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_without_differentiation_it_is_a_call(form) -> None:
    assert same_bits(form(X, W), layer(np)(X, W))


def test_keywords_reach_the_function() -> None:
    assert same_bits(remat.checkpoint(layer(np), X, W, scale=3.0), layer(np)(X, W, scale=3.0))
    found = remat.grad(lambda x, s: np.sum(remat.checkpoint(layer(np), x, W, scale=s)), wrt=1)(
        X, 3.0
    )
    np.testing.assert_allclose(found, np.sum(np.tanh(X @ W)))


def test_a_decorated_function_keeps_its_name_and_words() -> None:
    @remat.checkpoint
    def named(x):
        """Say something."""
        return x

    assert named.__name__ == "named"
    assert named.__doc__ == "Say something."


@pytest.mark.parametrize("how", ["call", "decorator"])
def test_reentrant_is_refused(how) -> None:
    inputs = (np.sin, X) if how == "call" else ()
    with pytest.raises(ValueError, match="use_reentrant"):
        remat.checkpoint(*inputs, use_reentrant=True)


@pytest.mark.parametrize("fn", [3, "sin", X])
def test_what_is_no_function_is_refused(fn) -> None:
    with pytest.raises(TypeError, match="fn must be a function"):
        remat.checkpoint(fn, X)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Data:
    a: Any
    b: Any


@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda a, b: (a, [b]), lambda t: (t[0], t[1][0])),
        (lambda a, b: {"b": b, "a": a}, lambda t: (t["a"], t["b"])),
        (Pair, lambda t: (t.a, t.b)),
        (Data, lambda t: (t.a, t.b)),
        (lambda a, b: [a, None, b, 3, "text", True], lambda t: (t[0], t[2])),
    ],
    ids=["nested", "dict", "named", "dataclass", "mixed"],
)
def test_trees_go_in_and_come_out(make, take) -> None:
    def fn(np):
        def f(tree):
            a, b = take(tree)
            return make(np.sin(a) * b, np.cos(b))

        return f

    def loss(np, run):
        def f(a, b):
            out = run(fn(np), make(a, b))
            assert type(out) is type(make(a, b))
            a, b = take(out)
            return np.sum(a * b)

        return f

    found = remat.grad(loss(np, remat.checkpoint), wrt=(0, 1))(X, X + 1)
    for i in range(2):
        expected = autograd.grad(loss(anp, lambda f, t: f(t)), i)(X, X + 1)
        np.testing.assert_allclose(found[i], expected, rtol=1e-14)


def test_results_that_are_no_floats_pass_through() -> None:
    seen = []

    def fn(x):
        return np.sum(x), {"k": 3, "flags": x > 0, "order": np.argsort(x), "name": "n", "no": None}

    def loss(x):
        total, rest = remat.checkpoint(fn, x)
        seen.append(rest)
        return total * rest["k"]

    np.testing.assert_allclose(remat.grad(loss)(X), np.full(3, 3.0))
    np.testing.assert_array_equal(seen[0]["flags"], X > 0)
    assert seen[0]["name"] == "n"
    assert seen[0]["no"] is None


def test_the_same_result_twice() -> None:
    def fn(x):
        y = np.sin(x)
        return y, y

    found = remat.grad(lambda x: sum(map(np.sum, remat.checkpoint(fn, x))))(X)
    np.testing.assert_allclose(found, 2 * np.cos(X))


def test_an_input_that_is_returned() -> None:
    found = remat.grad(lambda x: np.sum(remat.checkpoint(lambda x: (x, x * 2), x)[0] ** 2))(X)
    np.testing.assert_allclose(found, 2 * X)


def test_an_input_given_twice() -> None:
    found = remat.grad(lambda x: np.sum(remat.checkpoint(lambda a, b: a * np.sin(b), x, x)))(X)
    np.testing.assert_allclose(found, np.sin(X) + X * np.cos(X))


def test_results_that_do_not_depend_on_the_inputs() -> None:
    found = remat.grad(lambda x: np.sum(x) + remat.checkpoint(lambda x: 3.0, x))(X)
    np.testing.assert_allclose(found, np.ones(3))


def test_nested_segments() -> None:
    def deep(np, run, depth):
        if depth == 0:
            return np.sin
        return lambda x: run(deep(np, run, depth - 1), x) * 1.1 + 0.1

    found = remat.grad(lambda x: np.sum(remat.checkpoint(deep(np, remat.checkpoint, 5), x)))(X)
    expected = autograd.grad(lambda x: anp.sum(deep(anp, lambda f, x: f(x), 5)(x)))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_nested_segments_that_close_over_weights() -> None:
    def f(run):
        def outer(W, x):
            def inner(x):
                return np.tanh(x @ W)

            def twice(x):
                return run(inner, run(inner, x)) @ W

            return np.sum(run(twice, run(twice, x)))

        return outer

    found = remat.grad(f(remat.checkpoint), wrt=(0, 1))(W, X)
    expected = remat.grad(f(lambda f, x: f(x)), wrt=(0, 1))(W, X)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_a_function_that_works_in_place() -> None:
    def fn(x):
        x *= 2.0
        x[0] += x[1] ** 2
        return x

    x = X.copy()
    found = remat.grad(lambda x: np.sum(remat.checkpoint(fn, x) ** 2))(x)
    assert same_bits(x, X)
    expected = difference_quotient(lambda x: np.sum(fn(x.copy()) ** 2), X)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_its_code_runs_once() -> None:
    seen = []

    def fn(x):
        seen.append(x.shape)
        return np.sin(x)

    remat.grad(lambda x: np.sum(remat.checkpoint(fn, x)))(X)
    assert seen == [(3,)]


@pytest.mark.parametrize("inside", [True, False])
def test_what_lies_between_is_dropped(inside) -> None:
    """Intermediate arrays die with the call; plain tracing holds them."""
    x, alive = np.ones(100_000), []

    def fn(x):
        return np.sin(np.cos(np.sin(x))) * 2.0

    def loss(x):
        before = tracemalloc.get_traced_memory()[0]
        y = remat.checkpoint(fn, x) if inside else fn(x)
        alive.append((tracemalloc.get_traced_memory()[0] - before) / x.nbytes)
        return np.sum(y)

    tracemalloc.start()
    try:
        found = remat.grad(loss)(x)
    finally:
        tracemalloc.stop()
    expected = -np.cos(np.cos(np.sin(x))) * np.sin(np.sin(x)) * np.cos(x) * 2
    np.testing.assert_allclose(found, expected)
    if inside:
        assert alive[0] < 1.1  # the result
    else:
        assert alive[0] > 2.9


@pytest.mark.parametrize("size", [3, 100])
def test_second_derivatives(size) -> None:
    x, w = np.linspace(0.1, 1.0, size), np.linspace(-1.0, 1.0, size)

    def slope_along_w(run):
        def along(x):
            gradient = remat.grad(lambda x: np.sum(run(lambda x: np.tanh(np.sin(x) * x), x) ** 2))
            return np.sum(gradient(x) * w)

        return along

    along = slope_along_w(remat.checkpoint)
    plain = slope_along_w(lambda f, x: f(x))
    assert same_bits(remat.grad(along)(x), remat.grad(plain)(x))
    np.testing.assert_allclose(
        remat.grad(along)(x), difference_quotient(plain, x), rtol=1e-6, atol=1e-8
    )


def test_in_a_gradient_of_autograd_it_is_a_call_and_says_so() -> None:
    expected = autograd.jacobian(lambda x: layer(anp)(x, W))(X)
    with pytest.warns(remat.RematWarning, match=r"remat\.grad"):
        found = autograd.jacobian(lambda x: remat.checkpoint(layer(anp), x, W))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_python_numbers_may_become_those_of_numpy() -> None:
    assert remat.grad(lambda x: remat.checkpoint(lambda x: x * 2.0, x))(3.0) == 2.0


def test_a_generator_that_goes_in_is_replayed() -> None:
    def noisy(x, generator):
        return x * generator.normal(size=3)

    found = remat.grad(lambda x, g: np.sum(remat.checkpoint(noisy, x, g)))(
        X, np.random.default_rng(4)
    )
    np.testing.assert_array_equal(found, np.random.default_rng(4).normal(size=3))


def test_backward_leaves_random_numbers_alone() -> None:
    def loss(x):
        return np.sum(remat.checkpoint(lambda x: np.sin(x) * np.random.random(), x))

    np.random.seed(0)
    remat.grad(loss)(np.ones(100))
    after = np.random.random()
    np.random.seed(0)
    np.random.random()
    assert after == np.random.random()


def test_nan_is_no_mismatch() -> None:
    x = np.array([np.nan, 1.0, np.inf])
    found = remat.grad(lambda x: np.sum(remat.checkpoint(lambda x: x * x, x)))(x)
    np.testing.assert_array_equal(found, 2 * x)


@pytest.mark.parametrize("size", [8_193, 20_000])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_a_change_of_any_entry_of_a_large_plain_array_is_caught(size, dtype, part) -> None:
    factor = np.ones(size, dtype)
    place = int(part * (size - 1))

    def loss(x):
        y = remat.checkpoint(lambda x: np.sin(x * factor), x)
        factor[place] += 0.125
        return np.sum(np.real(y))

    with pytest.raises(remat.ModifiedInputError):
        remat.grad(loss)(np.ones(size, dtype))
