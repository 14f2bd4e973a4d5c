"""Leaves of a state that look at the same memory: as in a plain loop, or an error."""

from __future__ import annotations

import numpy as np
import pytest

import remat

from .oracles import difference_quotient, plain_loop

X = np.array([1.0, 2.0, 3.0, 4.0])

STARTS = {
    "array and slice": lambda y: (y, y[1:]),
    "slice and array": lambda y: (y[1:], y),
    "two slices": lambda y: (y[:-1], y[1:]),
    "reversed": lambda y: (y, y[::-1]),
    "every other": lambda y: (y[::2], y[1::2]),
    "halves": lambda y: tuple(np.split(y, 2)),
    "the same twice": lambda y: (y, y),
}


def writes(state):
    a, b = state
    a *= 1.1
    return a, b


def writes_to_the_second(state):
    a, b = state
    b += 0.5
    return a, b


def reads(state):
    a, b = state
    return a * 1.1, b + 0.5


def makes_an_overlap(state):
    a = np.concatenate([state[0][:1] * 1.1, state[1] * 0.9])
    return a, a[1:]


def makes_an_overlap_and_writes(state):
    a, b = state
    a *= 1.1
    c = a * np.sum(b)
    return c, c[::-1]


STEPS = [writes, writes_to_the_second, reads, makes_an_overlap, makes_an_overlap_and_writes]
FOLLOWED = {"every other", "halves", "the same twice"}


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform", "all"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("start", STARTS)
def test_as_in_a_plain_loop_or_refused(start: str, step, schedule: str) -> None:
    def plain(x):
        a, b = plain_loop(step, STARTS[start](x * 1.0), 4)
        return np.sum(a) + 2.0 * np.sum(b * b)

    def loop(x):
        state = STARTS[start](x * 1.0)
        a, b = remat.checkpointed_loop(step, state, 4, 2, schedule=schedule)[0]
        return np.sum(a) + 2.0 * np.sum(b * b)

    try:
        value = loop(X)
    except remat.UnsupportedError as error:
        assert "memory" in str(error)  # noqa: PT017
        assert step is makes_an_overlap_and_writes or start not in FOLLOWED
        with pytest.raises(remat.UnsupportedError):
            remat.grad(loop)(X)
        return
    assert value == plain(X)
    value, gradient = remat.value_and_grad(loop)(X)
    assert value == plain(X)
    np.testing.assert_allclose(gradient, difference_quotient(plain, X), rtol=1e-6)


def test_whole_numbers() -> None:
    def step(state):
        k, rest, h = state
        k += 1
        return k, rest, h * rest[0]

    k = np.zeros(2, int)
    for schedule in ("auto", "all", "revolve"):

        def loss(h, schedule=schedule):
            return remat.checkpointed_loop(step, (k, k[:1], h), 3, 1, schedule=schedule)[0][2]

        with pytest.raises((remat.UnsupportedError, ValueError), match=r"memory|read-only"):
            remat.grad(loss)(2.0)


def test_what_comes_back_is_not_written_to_in_silence() -> None:
    a, b = remat.checkpointed_loop(makes_an_overlap, (X, X[1:]), 3, 1)[0]
    before = b.copy()
    with pytest.raises(ValueError, match="read-only"):
        a *= 2.0
    np.testing.assert_array_equal(b, before)
