"""`verify` on NumPy: what it finds in functions that are wrong on purpose."""

from __future__ import annotations

import functools
import itertools
import random
import time

import numpy as np
import pytest

import remat

X = np.linspace(0.1, 0.9, 5)
W = np.eye(5) * 0.5


def layer(x, scale=1.0):
    return np.tanh(x @ W) * scale


# -- the same --------------------------------------------------------------------------------------


def test_counts_of_what_was_compared() -> None:
    found = remat.verify(layer, X)
    assert found
    assert (found.function, found.outputs, found.gradients, found.ops) == ("layer", 1, 2, 3)
    assert found.random_state
    assert "1 output, 2 gradients" in str(found)


def test_trees_and_keywords() -> None:
    def fn(pair, *, more):
        return {"sum": pair[0] + more, "flag": pair[0] > 0, "name": "n"}, pair[1]

    found = remat.verify(fn, (X, 2.0), more=X)
    assert (found.outputs, found.gradients) == (4, 3)


class Model:
    def __init__(self) -> None:
        self.weights = [np.ones(5), np.arange(5.0)]
        self.calls = 0

    def __call__(self, x):
        return x * self.weights[0] + self.weights[1]

    def counting(self, x):
        self.calls += 1
        return self(x)


@pytest.mark.parametrize(
    ("make", "gradients"),
    [
        (lambda: Model(), 3),  # noqa: PLW0108
        (lambda: Model().__call__, 3),
        (lambda: functools.partial(lambda w, x: w * x, W), 2),
        (lambda: np.sin, 1),
        (lambda: remat.checkpoint(layer), 2),
        (lambda: remat.CheckpointGroup().checkpoint_fn(layer), 2),
    ],
    ids=["object", "method", "partial", "ufunc", "wrapped", "grouped"],
)
def test_any_callable(make, gradients) -> None:
    assert remat.verify(make(), X).gradients == gradients


@pytest.mark.parametrize("wrap", [remat.checkpoint, lambda fn: fn])
def test_it_runs_once_without_and_once_with_checkpointing(wrap) -> None:
    calls = itertools.count()

    @wrap
    def fn(x):
        next(calls)
        return np.sin(x)

    remat.verify(fn, X)
    assert next(calls) == 2


def test_nan_and_complex_numbers_are_compared() -> None:
    assert remat.verify(lambda x: x * x, np.array([np.nan, np.inf, -0.0]))
    assert remat.verify(np.sin, X + 1j * X)


def test_functions_that_work_in_place_leave_the_inputs_alone() -> None:
    whole, floats = np.arange(5), X.copy()

    def fn(x, k):
        x *= 2.0
        k += 1
        return x * k

    assert remat.verify(fn, floats, whole)
    np.testing.assert_array_equal(floats, X)
    np.testing.assert_array_equal(whole, np.arange(5))


def test_without_an_array_going_in() -> None:
    assert remat.verify(lambda: np.sum(W)).gradients == 1
    assert remat.verify(lambda x: x * 2.0, 3.0).gradients == 1


def test_other_regions_inside() -> None:
    def fn(x):
        x = remat.checkpoint(layer, x)
        return remat.checkpointed_loop(np.sin, x, 5)[0]

    assert remat.verify(fn, X)


# -- random numbers --------------------------------------------------------------------------------


def draws_from_numpy(x):
    return x * np.random.normal(size=5)


def draws_from_python(x):
    return x * random.random()


GENERATOR = np.random.default_rng(0)


def draws_from_its_own(x):
    return x * GENERATOR.normal(size=5)


def draws_from_an_argument(x, generator):
    return x * generator.normal(size=5)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (draws_from_numpy, ()),
        (draws_from_python, ()),
        (draws_from_its_own, ()),
        (draws_from_an_argument, (np.random.default_rng(3),)),
    ],
)
def test_random_numbers_are_the_same_and_drawn_once(fn, args) -> None:
    def next_numbers():
        extra = [generator.random() for generator in args]
        return np.random.random(), random.random(), GENERATOR.random(), *extra

    sources = [np.random, random, GENERATOR, *args]
    states = [_state(source) for source in sources]
    fn(X, *args)
    expected = next_numbers()
    for source, state in zip(sources, states, strict=True):
        _set_state(source, state)
    assert remat.verify(fn, X, *args).random_state
    assert next_numbers() == expected


def _state(source):
    if source is np.random:
        return np.random.get_state()
    return random.getstate() if source is random else source.bit_generator.state


def _set_state(source, state) -> None:
    if source is np.random:
        np.random.set_state(state)
    elif source is random:
        random.setstate(state)
    else:
        source.bit_generator.state = state


def test_without_preserving_the_random_state_it_is_not_compared() -> None:
    assert remat.verify(draws_from_numpy, X, preserve_rng_state=False)
    assert not remat.verify(layer, X, preserve_rng_state=False).random_state


# -- not the same ----------------------------------------------------------------------------------


def test_a_clock_is_found_with_its_op() -> None:
    def clock(x):
        y = np.sin(x)
        z = np.cos(y)
        return z * time.perf_counter_ns()

    with pytest.raises(remat.RecomputeMismatchError, match="op 2, multiply"):
        remat.verify(clock, X)


def test_a_function_that_takes_turns() -> None:
    calls = itertools.count()

    def changes(x):
        return np.sin(x) if next(calls) % 2 == 0 else np.cos(x)

    with pytest.raises(remat.RecomputeMismatchError, match=r"op 0, sin at .*it was cos"):
        remat.verify(changes, X)


def test_another_output_is_named() -> None:
    calls = itertools.count()

    def changes(x):
        return {"a": x * 1.0, "b": [np.sin(x) if next(calls) == 0 else np.cos(x)]}

    with pytest.raises(remat.RecomputeMismatchError, match=r"the output\['b'\]\[0\] differs in 5"):
        remat.verify(changes, X)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([1.0, 2.0], "differs in 1 of 1"),
        ([0.0, -0.0], "sign of a zero"),
        (["a", "b"], "is 'b' instead of 'a'"),
        ([3, 4], "differs in 1 of 1"),
        ([np.ones(2), np.ones(3)], "of shape"),
        ([(1,), (1, 2)], "structure"),
    ],
)
def test_other_kinds_of_outputs(results, words) -> None:
    calls = itertools.count()
    with pytest.raises(remat.RecomputeMismatchError, match=words):
        remat.verify(lambda x: (x, results[next(calls) > 0]), X)


def test_more_ops_in_the_second_run() -> None:
    calls = itertools.count()

    def grows(x):
        for _ in range(1 + next(calls)):
            x = x + 0.0
        return x

    # The results are the same, and so are the gradients: nothing differs that counts.
    assert remat.verify(grows, X)


def test_a_gradient_that_differs_is_named() -> None:
    calls = itertools.count()

    def slopes(x, y):
        return x + (0.0 * y if next(calls) == 0 else 1.0 * (y - 0.5))

    with pytest.raises(remat.RecomputeMismatchError, match=r"gradient with respect to input 1"):
        remat.verify(slopes, X, np.full(5, 0.5))


def test_a_gradient_of_what_is_closed_over_is_named() -> None:
    calls = itertools.count()
    bias = np.full(5, 0.5)

    def slopes(x):
        return x + (0.0 * bias if next(calls) == 0 else 1.0 * (bias - 0.5))

    with pytest.raises(remat.RecomputeMismatchError, match="with respect to bias"):
        remat.verify(slopes, X)


def test_a_counter_is_left_as_after_one_call() -> None:
    model = Model()
    assert remat.verify(model.counting, X)
    assert model.calls == 1


def test_an_array_of_counts_is_left_as_after_one_call() -> None:
    counts = np.zeros(3, int)

    def fn(x):
        counts[1] += 1
        return np.sin(x)

    assert remat.verify(fn, X)
    assert counts.tolist() == [0, 1, 0]


# -- what cannot be verified -----------------------------------------------------------------------


@pytest.mark.parametrize("fn", [3, X, "sin", None])
def test_what_is_no_function_is_refused(fn) -> None:
    with pytest.raises(TypeError, match="fn must be a function"):
        remat.verify(fn, X)


@pytest.mark.parametrize("args", [(), (3,), (np.arange(3),), ("text",)])
def test_without_anything_to_differentiate_by_it_is_refused(args) -> None:
    with pytest.raises(TypeError, match="no gradient to compare"):
        remat.verify(lambda *args: 1.0, *args)


def test_an_error_of_the_function_is_passed_on() -> None:
    def fails(x):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        remat.verify(fails, X)


def test_what_cannot_be_checkpointed_says_so_and_everything_is_left_as_it_was() -> None:
    buffer, before = np.zeros(5), W.copy()

    def into_a_plain_array(x):
        buffer[:] = np.sin(x @ W)
        return np.sum(buffer)

    with pytest.raises(remat.UnsupportedError, match="in place"):
        remat.verify(into_a_plain_array, X)
    assert not buffer.any()
    assert type(W) is np.ndarray
    np.testing.assert_array_equal(W, before)


def test_inside_a_gradient_the_values_are_taken() -> None:
    found = []

    def loss(x):
        found.append(remat.verify(layer, x))
        return np.sum(x)

    remat.grad(loss)(X)
    assert found[0].gradients == 2
