"""Layers in a row, in segments, on NumPy arrays."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import remat
from remat.api.sequential import _edges

X = np.array([0.3, -0.7, 1.1])


def counting_layers(count: int) -> tuple[list, list[int]]:
    calls: list[int] = []

    def make(number):
        def layer(x):
            calls.append(number)
            return np.sin(x) * (number + 1.5)

        return layer

    return [make(number) for number in range(count)], calls


def by_hand(layers, x):
    for layer in layers:
        x = layer(x)
    return x


@given(st.integers(1, 60), st.data())
def test_segments_differ_by_one_layer_at_most(layers, data) -> None:
    segments = data.draw(st.integers(1, layers))
    edges = _edges(layers, segments)
    lengths = [b - a for a, b in pairwise(edges)]
    assert (edges[0], edges[-1], len(lengths)) == (0, layers, segments)
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("segments", [None, 1, 2, 3, 7])
def test_gradients_are_those_of_the_plain_layers(segments) -> None:
    layers, _ = counting_layers(7)

    def f(x):
        return np.sum(remat.checkpoint_sequential(layers, x, segments=segments) ** 2)

    expected = remat.grad(lambda x: np.sum(by_hand(layers, x) ** 2))(X)
    np.testing.assert_array_equal(remat.grad(f)(X), expected)


@pytest.mark.parametrize(
    ("segments", "again"),
    [
        (1, []),
        (2, [5]),
        (4, [3, 3, 2]),
        (None, [3, 3, 2]),
        (10, [1] * 9),
    ],
)
def test_all_but_the_last_segment_are_recomputed(segments, again) -> None:
    """A layer is a sine and a product: backward needs the input of the sine, but not its result."""
    layers, calls = counting_layers(10)
    with remat.CheckpointProfiler() as profiler:
        remat.grad(lambda x: np.sum(remat.checkpoint_sequential(layers, x, segments=segments)))(
            np.tile(X, 100)
        )
    assert calls == [*range(10)]
    assert profiler.recompute_count() == len([n for n in again if n > 1])
    assert sum(region.ops for region in profiler.regions) == sum(2 * (n - 1) for n in again)


@pytest.mark.parametrize(("layers", "segments"), [(1, 1), (2, 2), (4, 2), (5, 3), (9, 3), (10, 4)])
def test_the_number_of_segments_is_about_the_root_of_the_layers(layers, segments) -> None:
    functions, _ = counting_layers(layers)
    with remat.CheckpointProfiler() as profiler:
        remat.grad(lambda x: np.sum(remat.checkpoint_sequential(functions, x)))(X)
    assert profiler.checkpoint_count() == segments - 1


def test_a_tuple_between_layers_is_one_argument() -> None:
    layers = [
        lambda x: (np.sin(x), x),
        lambda pair: (pair[0] * pair[1], pair[0]),
        lambda pair: pair[0] + pair[1],
    ]

    def f(x):
        return np.sum(remat.checkpoint_sequential(layers, x, segments=3))

    expected = remat.grad(lambda x: np.sum(by_hand(layers, x)))(X)
    np.testing.assert_array_equal(remat.grad(f)(X), expected)


def test_gradients_reach_what_layers_refer_to() -> None:
    def f(W):
        layers = [lambda x: np.tanh(x @ W)] * 5
        return np.sum(remat.checkpoint_sequential(layers, X))

    def plain(W):
        x = X
        for _ in range(5):
            x = np.tanh(x @ W)
        return np.sum(x)

    W = np.eye(3) * 0.9
    np.testing.assert_allclose(remat.grad(f)(W), remat.grad(plain)(W), rtol=1e-14)


def test_no_layers_return_the_input() -> None:
    assert remat.checkpoint_sequential([], X) is X
    assert remat.checkpoint_sequential([], X, segments=1) is X


def test_random_numbers_are_drawn_once() -> None:
    rng = np.random.default_rng(0)
    masks = []

    def dropout(x):
        masks.append(rng.random(3) < 0.5)
        return x * masks[-1]

    gradient = remat.grad(
        lambda x: np.sum(remat.checkpoint_sequential([dropout, np.sin, dropout], x, segments=3))
    )(np.ones(3))
    assert len(masks) == 2
    np.testing.assert_array_equal(gradient, np.cos(1.0 * masks[0]) * masks[0] * masks[1])


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda f: f([np.sin] * 3, X, segments=4),
            ValueError,
            "segments must be at most 3, .* got 4",
        ),
        (
            lambda f: f([np.sin] * 3, X, segments=0),
            ValueError,
            "segments must be at least 1, got 0",
        ),
        (
            lambda f: f([np.sin] * 3, X, segments=-1),
            ValueError,
            "segments must be at least 1, got -1",
        ),
        (
            lambda f: f([np.sin] * 3, X, segments=1.5),
            TypeError,
            "segments must be a whole .* got 1.5",
        ),
        (lambda f: f(np.sin, X), TypeError, "functions must be a list or .*, got "),
        (lambda f: f([np.sin, 3], X), TypeError, r"functions\[1\] must be a function, got 3"),
        (lambda f: f([np.sin], X, use_reentrant=True), ValueError, "use_reentrant=True is not"),
        (lambda f: f([np.sin], X, memory_budget=0), ValueError, "memory_budget must be at least 1"),
        (lambda f: f([np.sin], X, memory_budget=-5), ValueError, "memory_budget .*-5"),
        (lambda f: f([np.sin], X, memory_budget="much"), ValueError, "memory_budget .*much"),
        (lambda f: f([np.sin], X, memory_budget=1.5), ValueError, "memory_budget .*1.5"),
        (lambda f: f([np.sin], X, memory_budget=True), TypeError, "memory_budget .*True"),
        (
            lambda f: f([np.sin], X, segments=1, memory_budget="1MB"),
            ValueError,
            "segments or memory_budget, not both; got segments=1",
        ),
        (
            lambda f: f([np.sin], X, preserve_rng_state=False, memory_budget="1MB"),
            ValueError,
            "preserve_rng_state=False goes with segments",
        ),
    ],
)
def test_what_is_wrong_is_said(call, kind, message) -> None:
    with pytest.raises(kind, match=message):
        call(remat.checkpoint_sequential)


# -- within a budget -------------------------------------------------------------------------------

LARGE = np.linspace(0.1, 1.0, 131_072)  # 1 MB


def unlike_layers(W) -> list:
    """Layers of 1 to 8 ops; the second half is on half as many numbers."""
    half = len(LARGE) // 2
    full = [
        lambda x: np.tanh(x * W),
        np.sin,
        lambda x: np.exp(-np.sqrt(x * x + 1.0)) * np.cos(x),
        lambda x: np.tanh(np.sin(x * W) * np.cos(x) + np.exp(-x * x)),
    ]
    halves = [
        np.tanh,
        lambda x: np.sin(x) * np.exp(x) / (1.0 + x * x),
        lambda x: np.cos(x * W[:half]),
    ]
    return [*full, *full, lambda x: x[:half] * x[half:], *halves, *halves]


def plain_gradient():
    return remat.grad(lambda W: np.sum(by_hand(unlike_layers(W), LARGE)))(LARGE)


@pytest.mark.parametrize("budget", ["12MB", 0.6, 14_000_000, 1.0])
def test_the_bits_of_plain_gradients_within_a_budget(budget) -> None:
    def f(W):
        return np.sum(remat.checkpoint_sequential(unlike_layers(W), LARGE, memory_budget=budget))

    expected = plain_gradient()
    for _ in range(3):
        np.testing.assert_array_equal(remat.grad(f)(LARGE), expected)


@pytest.mark.parametrize("budget", [10_000_000, 14_000_000])
def test_memory_stays_within_the_budget(budget) -> None:
    def f(W):
        return np.sum(remat.checkpoint_sequential(unlike_layers(W), LARGE, memory_budget=budget))

    remat.grad(f)(LARGE)
    own = 2 * LARGE.nbytes  # the gradient of W and one part of it, which are no activations
    tracemalloc.start()
    try:
        remat.grad(f)(LARGE)
        within = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        plain_gradient()
        plain = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert within - own <= 1.05 * budget < plain - own


def test_a_budget_that_is_too_small_says_which_is_not() -> None:
    def f(W, budget):
        return np.sum(remat.checkpoint_sequential(unlike_layers(W), LARGE, memory_budget=budget))

    with pytest.raises(
        remat.BudgetTooSmallError, match="chain of 15 layers needs at least"
    ) as info:
        remat.grad(lambda W: f(W, "1MB"))(LARGE)
    smallest = info.value.smallest
    assert str(smallest) in str(info.value)
    np.testing.assert_array_equal(remat.grad(lambda W: f(W, smallest))(LARGE), plain_gradient())
    with pytest.raises(remat.BudgetTooSmallError):
        remat.grad(lambda W: f(W, int(0.9 * smallest)))(LARGE)


def test_a_budget_needs_no_gradient() -> None:
    layers = unlike_layers(LARGE)
    found = remat.checkpoint_sequential(layers, LARGE, memory_budget="1MB")
    np.testing.assert_array_equal(found, by_hand(layers, LARGE))
    assert remat.checkpoint_sequential([], X, memory_budget="1MB") is X


def test_layers_run_once_within_a_budget() -> None:
    layers, calls = counting_layers(6)
    for _ in range(2):
        calls.clear()
        remat.grad(lambda x: np.sum(remat.checkpoint_sequential(layers, x, memory_budget=0.7)))(X)
        assert calls == [0, 1, 2, 3, 4, 5]


def test_a_budget_inside_of_another_one_is_ignored_with_a_warning() -> None:
    def f(x):
        return np.sum(remat.checkpoint_sequential([np.sin, np.exp], x, memory_budget="1MB"))

    with pytest.warns(remat.RematWarning, match="memory_budget of checkpoint_sequential is ignor"):
        found = remat.grad(f, memory_budget="1MB")(X)
    np.testing.assert_array_equal(found, remat.grad(lambda x: np.sum(np.exp(np.sin(x))))(X))
