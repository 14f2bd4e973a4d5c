"""Objects that are no pytrees, and functions behind other functions: followed, or refused."""

from __future__ import annotations

import argparse
import collections
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import remat

X = np.array([0.3, 0.7])


class Slots:
    __slots__ = ("h",)

    def __init__(self, h: Any) -> None:
        self.h = h


MAKERS = {
    "SimpleNamespace": lambda h: SimpleNamespace(h=h),
    "argparse": lambda h: argparse.Namespace(h=h),
    "slots": Slots,
    "partial": lambda h: functools.partial(np.multiply, h),
    "closure": lambda h: lambda: h,
    "UserDict": lambda h: collections.UserDict(h=h),
    "object array": lambda h: np.array([h, None], dtype=object),
}


def content(value: Any) -> Any:
    if isinstance(value, collections.UserDict):
        return value["h"]
    if isinstance(value, np.ndarray):
        return value[0]
    if isinstance(value, functools.partial):
        return value.args[0]
    return value() if callable(value) else value.h


CALLS = {
    "checkpoint": remat.checkpoint,
    "adaptive": functools.partial(remat.adaptive_checkpoint, threshold="1MB"),
    "adaptive, none": functools.partial(remat.adaptive_checkpoint, threshold=0),
    "policy": functools.partial(remat.checkpoint, policy=remat.policies.save_nothing),
}
EXPECTED = 2 * np.cos(X) + 1


def right_or_refused(function: Any, expected: Any, refusal: Any = ()) -> bool:
    """Return whether it is right; anything but the one or the other fails."""
    try:
        found = remat.grad(function)(X)
    except (remat.UnsupportedError, *refusal):
        return False
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    return True


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_segment_that_returns_an_object_loses_no_gradient(call: Any, make: Any) -> None:
    def f(x: Any) -> Any:
        made = call(lambda y: make(np.sin(y)), x)
        return np.sum(content(made) * 2) + np.sum(x)

    # (NumPy itself cannot put traced numbers into an array of objects.)
    assert right_or_refused(f, EXPECTED) or make is MAKERS["object array"]


@pytest.mark.parametrize("make", list(MAKERS.values())[:-1], ids=list(MAKERS)[:-1])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_segment_follows_arrays_in_an_object_that_it_gets(call: Any, make: Any) -> None:
    def f(x: Any) -> Any:
        return np.sum(call(lambda o: np.sin(content(o)), make(x)) * 2) + np.sum(x)

    assert right_or_refused(f, EXPECTED)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_segment_that_returns_a_generator_loses_no_gradient(call: Any) -> None:
    def f(x: Any) -> Any:
        return np.sum(next(call(lambda y: (np.sin(y) for _ in range(1)), x)) * 2) + np.sum(x)

    assert right_or_refused(f, EXPECTED)


@dataclass
class Data:
    x: Any
    h: Any = 1.0


def store_attribute(owner: Any, value: Any) -> None:
    owner.h = np.sin(value)


def store_entry(owner: Any, value: Any) -> None:
    owner["h"] = np.sin(value)


def store_in_place(owner: Any, value: Any) -> None:
    owner.h[:] = np.sin(value)


STORES = {
    "attribute": (store_attribute, lambda: SimpleNamespace(h=1.0)),
    "argparse": (store_attribute, lambda: argparse.Namespace(h=1.0)),
    "dataclass": (store_attribute, lambda: Data(1.0)),
    "dict": (store_entry, lambda: {"h": 1.0}),
    "in place": (store_in_place, lambda: SimpleNamespace(h=np.zeros(2))),
}


@pytest.mark.parametrize("is_argument", [True, False])
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_a_segment_stores_elsewhere_loses_no_gradient(
    call: Any, store: Any, is_argument: bool
) -> None:
    write, make = store

    def f(x: Any) -> Any:
        owner = make()
        if is_argument:
            call(write, owner, x)
        else:
            call(lambda y: write(owner, y), x)
        h = owner["h"] if isinstance(owner, dict) else owner.h
        return np.sum(h * 2) + np.sum(x)

    right_or_refused(f, EXPECTED)


def test_a_plain_buffer_may_be_filled_with_plain_numbers() -> None:
    buffer = np.zeros(2)

    def segment(x: Any) -> Any:
        buffer[:] = [2.0, 3.0]
        return np.sin(x) * buffer

    found = remat.grad(lambda x: np.sum(remat.checkpoint(segment, x)))(X)
    np.testing.assert_allclose(found, np.cos(X) * [2.0, 3.0], rtol=1e-12)
    assert buffer.flags.writeable


def test_an_object_of_settings_passes_through() -> None:
    settings = SimpleNamespace(scale=0.5)

    def f(x: Any) -> Any:
        y, given = remat.checkpoint(lambda y, s: (np.sin(y) * s.scale, s), x, settings)
        assert given is settings
        return np.sum(y)

    np.testing.assert_allclose(remat.grad(f)(X), np.cos(X) / 2, rtol=1e-12)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("schedule", ["revolve", "all"])
def test_an_object_in_the_state_of_a_loop_loses_no_gradient(schedule: Any, make: Any) -> None:
    def changing(x: Any) -> Any:
        def step(state: Any) -> Any:
            return state[0], make(np.sin(content(state[1])))

        final, _ = remat.checkpointed_loop(step, (x, make(x)), 1, schedule=schedule)
        return np.sum(content(final[1])) * 2 + np.sum(final[0])

    def constant(x: Any) -> Any:
        def step(state: Any) -> Any:
            return state[0] * content(state[1]), state[1]

        start = np.ones(2), make(x)
        return np.sum(remat.checkpointed_loop(step, start, 3, schedule=schedule)[0][0])

    refusal = (TypeError,)  # of an array of objects
    right_or_refused(changing, EXPECTED, refusal)
    right_or_refused(constant, 3 * X**2, refusal)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_output_of_a_scan_loses_no_gradient(make: Any) -> None:
    def f(x: Any) -> Any:
        ys = remat.checkpointed_scan(lambda s, _: (s, make(np.sin(s))), x, np.arange(1.0))[1]
        return np.sum(content(ys[0])) * 2 + np.sum(x)

    right_or_refused(f, EXPECTED)


def test_a_layer_may_not_hand_on_an_object() -> None:
    layers = [lambda v: SimpleNamespace(h=np.sin(v)), lambda v: v.h, np.negative]

    def f(x: Any) -> Any:
        return -2 * np.sum(remat.checkpoint_sequential(layers, x, segments=3)) + np.sum(x)

    def checkpointed(x: Any) -> Any:
        checkpointer = remat.ActivationCheckpointer(remat.CheckpointConfig(1))
        state = {"h": SimpleNamespace(h=x)}
        last = checkpointer.checkpointed_forward(
            state, [0], lambda s, _: {"h": SimpleNamespace(h=np.sin(s["h"].h))}
        )
        return np.sum(last["h"].h) * 2 + np.sum(x)

    right_or_refused(f, EXPECTED)
    right_or_refused(checkpointed, EXPECTED, (TypeError,))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_gradients_of_what_is_in_an_object_are_refused(make: Any) -> None:
    with pytest.raises(remat.UnsupportedError):
        remat.grad(lambda x: (np.sum(x), make(np.sin(x))))(X)


# -- functions behind other functions --------------------------------------------------------------

WRAPPERS = {
    "checkpoint": remat.checkpoint,
    "policy": remat.checkpoint(policy=remat.policies.save_nothing),
    "adaptive": remat.adaptive_checkpoint(threshold="1KB"),
    "twice": lambda f: remat.checkpoint(remat.checkpoint(f)),
    "method": lambda f: remat.checkpoint(SimpleNamespace(f=f).f),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_loop_looks_into_a_checkpointed_step(wrap: Any) -> None:
    def loop(w: Any) -> Any:
        return np.sum(remat.checkpointed_loop(wrap(lambda s: np.tanh(s * w)), np.ones(2), 5)[0])

    def plain(w: Any) -> Any:
        state = np.ones(2)
        for _ in range(5):
            state = np.tanh(state * w)
        return np.sum(state)

    np.testing.assert_allclose(remat.grad(loop)(X), remat.grad(plain)(X), rtol=1e-12)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_generator_in_a_checkpointed_step_repeats_itself(wrap: Any) -> None:
    def run(x: Any, *, checkpointed: bool) -> Any:
        generator = np.random.default_rng(0)

        def step(s: Any) -> Any:
            return np.tanh(s * generator.normal())

        if checkpointed:
            return np.sum(remat.checkpointed_loop(wrap(step), x, 9, 2)[0])
        for _ in range(9):
            x = step(x)
        return np.sum(x)

    found = remat.grad(lambda x: run(x, checkpointed=True))(X)
    expected = remat.grad(lambda x: run(x, checkpointed=False))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_counter_in_a_checkpointed_step_is_found_where_states_are_zero(wrap: Any) -> None:
    def f(x: Any) -> Any:
        calls = [0]

        def step(s: Any) -> Any:
            calls[0] += 1
            return s * calls[0]

        return np.sum(remat.checkpointed_loop(wrap(step), x, 5, 1, schedule="revolve")[0])

    with pytest.raises(remat.RecomputeMismatchError, match=r"calls\[0\]"):
        remat.grad(f)(np.zeros(2))


def test_a_counter_in_an_object_of_the_state_is_found_where_states_are_zero() -> None:
    def step(state: Any) -> Any:
        state[1].calls += 1
        return state[0] * state[1].calls, state[1]

    def f(x: Any) -> Any:
        start = x, SimpleNamespace(calls=0)
        return np.sum(remat.checkpointed_loop(step, start, 5, 1, schedule="revolve")[0][0])

    with pytest.raises(remat.RecomputeMismatchError, match="calls"):
        remat.grad(f)(np.zeros(2))


def test_a_loop_looks_into_a_derivative_of_autograd() -> None:
    def f(w: Any, *, checkpointed: bool) -> Any:
        slope = autograd.grad(lambda s: anp.sum(anp.sin(s * w)))
        if checkpointed:
            return np.sum(remat.checkpointed_loop(lambda s: slope(s), np.ones(2), 3)[0])  # noqa: PLW0108
        return np.sum(slope(slope(slope(np.ones(2)))))

    found = remat.grad(lambda w: f(w, checkpointed=True))(X)
    expected = remat.grad(lambda w: f(w, checkpointed=False))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
