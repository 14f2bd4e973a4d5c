"""Loops that keep an array in an object that is no pytree stay plain, or are refused if strict."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np
import pytest

import remat


def partials(x: Any) -> Any:
    kept = []
    for _ in range(12):
        x = np.sin(x)
        kept.append(functools.partial(np.add, x))
    return x + kept[2](1.0)


def doubled(x: Any) -> Any:
    return lambda: x * 2


def closure_of_a_factory(x: Any) -> Any:
    for _ in range(12):
        x = np.sin(x)
        kept = doubled(x)
    return x + kept()


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x

    def get(self) -> Any:
        return self.x * 3


def bound_method(x: Any) -> Any:
    for _ in range(12):
        x = np.sin(x)
        kept = Holder(x).get
    return x + kept()


def methods_of_arrays(x: Any) -> Any:
    kept = []
    for _ in range(12):
        x = np.sin(x)
        kept.append(x.sum)
    return x + kept[3]()


def exception(x: Any) -> Any:
    for _ in range(12):
        x = np.sin(x)
        kept = ValueError(x)
    return x + kept.args[0]


def piece(x: Any) -> Any:
    for _ in range(12):
        x = np.sin(x)
        kept = slice(x, None)
    return x + kept.start


def proxy(x: Any) -> Any:
    for _ in range(12):
        x = np.sin(x)
        kept = types.MappingProxyType({"x": x})
    return x + kept["x"]


def view_of_a_dict(x: Any) -> Any:
    for _ in range(12):
        x = np.sin(x)
        kept = {"x": x}.values()
    return x + sum(kept)


def default_of_a_lambda(x: Any) -> Any:
    kept = []
    for _ in range(12):
        x = np.sin(x)
        kept.append(lambda v, x=x: v + x)
    return x + kept[2](1.0)


PROGRAMS = [
    partials,
    closure_of_a_factory,
    bound_method,
    methods_of_arrays,
    exception,
    piece,
    proxy,
    view_of_a_dict,
    default_of_a_lambda,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_gradient_is_lost_in_what_a_loop_keeps(program: Any) -> None:
    expected = remat.grad(lambda x: np.sum(program(x)))(np.ones(3))
    loop = remat.checkpoint_loops(program, num_checkpoints=3)
    with pytest.warns(remat.RematWarning, match="holds an object with arrays"):
        found = remat.grad(lambda x: np.sum(loop(x)))(np.ones(3))
    np.testing.assert_array_equal(found, expected)
    strict = remat.checkpoint_loops(program, num_checkpoints=3, strict=True)
    with pytest.raises(remat.LoopTransformError, match="holds an object with arrays"):
        remat.grad(lambda x: np.sum(strict(x)))(np.ones(3))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: slice(s, None),
        ValueError,
        lambda s: types.MappingProxyType({"s": s}),
        lambda s: {"s": s}.values(),
        types.CellType,
    ],
    ids=["slice", "exception", "proxy", "view", "cell"],
)
def test_states_and_outputs_in_objects_are_refused(wrap: Any) -> None:
    def loop(x: Any) -> Any:
        def step(state: Any) -> Any:
            return np.sin(state[0]), wrap(state[0])

        return np.sum(remat.checkpointed_loop(step, (x, wrap(x)), 9, 2)[0][0])

    def scan(x: Any) -> Any:
        return np.sum(remat.checkpointed_scan(lambda s, _: (s, wrap(s)), x, np.ones(4))[0])

    for program in (loop, scan):
        with pytest.raises(remat.UnsupportedError, match="gradient would be lost"):
            remat.grad(program)(np.ones(2))
