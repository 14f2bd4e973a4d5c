"""A checkpointed function that writes to its arguments does what the plain function does."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import remat

from .oracles import difference_quotient

X, W = np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.0, 2.0])


def directly(function, *args):
    return function(*args)


def kept(function, *args):
    return remat.adaptive_checkpoint(function, *args, threshold="1GB")


def dropped(function, *args):
    return remat.adaptive_checkpoint(function, *args, threshold=0)


def scale(a, w):
    a *= w
    return np.sum(a)


def scale_and_return(a, w):
    a *= w
    return a


def scale_part(a, w):
    v = a[1:]
    v *= w[1:]
    return v


def both(a, w):
    a *= w
    w += a
    return a * w


def returned_as_it_is(a, w):
    return a


def a_view(a, w):
    return a[::-1]


FUNCTIONS = [scale, scale_and_return, scale_part, both, returned_as_it_is, a_view]


def programs(run, function):
    def uses_the_argument(x, w):
        a, b = x * 1.0, w * 1.0
        run(function, a, b)
        return np.sum(a * a * b)

    def uses_both(x, w):
        a, b = x * 1.0, w * 1.0
        y = run(function, a, b)
        return np.sum(a * b) * np.sum(y)

    def writes_to_the_result(x, w):
        a, b = x * 1.0, w * 1.0
        y = run(function, a, b)
        y += 1.0
        return np.sum(a * b) * np.sum(y)

    def passes_it_twice(x, w):
        a = x * w
        run(function, a, a)
        return np.sum(a * a)

    def passes_a_slice(x, w):
        a, b = x * 1.0, w * 1.0
        run(function, a[1:], b[:2])
        return np.sum(a * b)

    return [uses_the_argument, uses_both, writes_to_the_result, passes_it_twice, passes_a_slice]


NAMES = [program.__name__ for program in programs(directly, scale)]


@pytest.mark.parametrize("w", [W, np.ones(3)], ids=["changes", "leaves the bits as they are"])
@pytest.mark.parametrize("run", [remat.checkpoint, kept, dropped])
@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_as_the_plain_function(function, number: int, run, w) -> None:
    plain = programs(directly, function)[number]
    found = remat.value_and_grad(programs(run, function)[number], wrt=(0, 1))(X, w)
    value, (dx, dw) = found
    assert value == plain(X, w)
    np.testing.assert_allclose(dx, difference_quotient(lambda x: plain(x, w), X), rtol=1e-6)
    np.testing.assert_allclose(dw, difference_quotient(lambda w: plain(X, w), w), rtol=1e-6)


def test_four_against_three() -> None:
    def add_one(a):
        a += 1.0
        return np.sum(a)

    def program(x):
        a = x * 1.0
        remat.checkpoint(add_one, a)
        return np.sum(a)

    assert remat.value_and_grad(program)(np.array([1.0, 0.0]))[0] == 3.0
    assert program(np.array([1.0, 0.0])) == 3.0


def test_side_effects_happen_once() -> None:
    calls = [0]
    generator = np.random.default_rng(3)

    def noisy(a):
        calls[0] += 1
        noise = generator.normal(size=3)
        a *= noise
        return np.sum(a)

    expected = np.random.default_rng(3).normal(size=3)
    found = remat.grad(lambda x: remat.checkpoint(noisy, x * 1.0))(X)
    np.testing.assert_array_equal(found, expected)
    assert calls == [1]


def test_a_plain_array_is_not_written_to_in_silence() -> None:
    buffer = np.zeros(3)

    def into(a, out):
        out += a
        return np.sum(a)

    with pytest.raises(remat.UnsupportedError, match="a plain array"):
        remat.grad(lambda x: remat.checkpoint(into, x, buffer))(X)
    assert not buffer.any()


def test_whole_numbers_are_counted_once() -> None:
    counts = np.zeros(3, int)

    def count(a, counts):
        counts += 1
        return np.sum(a * counts)

    assert remat.grad(lambda x: remat.checkpoint(count, x, counts))(X).tolist() == [1.0] * 3
    assert counts.tolist() == [1, 1, 1]


@pytest.mark.parametrize("run", [remat.checkpoint, kept, dropped])
def test_arguments_that_overlap(run) -> None:
    def shift(a, b):
        a *= 2.0
        return np.sum(b)

    def program(x):
        a = x * 1.0
        return run(shift, a, a[1:])

    np.testing.assert_allclose(remat.grad(program)(X), [0.0, 2.0, 2.0])


@pytest.mark.parametrize("run", [remat.checkpoint, kept, dropped])
def test_in_a_gradient_of_autograd_they_are_calls(run) -> None:
    def wave(x):
        return anp.sin(x)

    wave.__name__ = f"wave_{run.__name__}"  # a function warns once
    with pytest.warns(remat.RematWarning, match=r"remat\.grad"):
        found = autograd.grad(lambda x: anp.sum(run(wave, x)))(X)
    np.testing.assert_allclose(found, np.cos(X))
