"""Copies of traced arrays: by copy, deepcopy, dataclasses and pickle."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

import remat

from .oracles import difference_quotient

X = np.array([1.0, 2.0, 3.0, 4.0])


@dataclasses.dataclass
class Box:
    inner: Any


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of a list": lambda x: copy.deepcopy([x, {"x": x}])[1]["x"],
    "asdict": lambda x: dataclasses.asdict(Box([x]))["inner"][0],
    "astuple": lambda x: dataclasses.astuple(Box(x))[0],
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle of a temporary": lambda x: pickle.loads(pickle.dumps({"x": x * 2.0}))["x"],
    "copy method": lambda x: x.copy(),
    "np.copy": np.copy,
    "of a view": lambda x: copy.deepcopy(x[::-1]),
}


@pytest.mark.parametrize("name", COPIES)
def test_gradients_flow_through_copies(name: str) -> None:
    def f(x):
        return np.sum(np.sin(COPIES[name](x)) * np.arange(1.0, 5.0))

    value, gradient = remat.value_and_grad(f)(X)
    assert value == f(X)
    np.testing.assert_allclose(gradient, difference_quotient(f, X), rtol=1e-6)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_a_copy(name: str) -> None:
    def f(x):
        y = x * 1.0
        z = COPIES[name](y)
        z *= 3.0
        y += 1.0
        return np.sum(y * z)

    value, gradient = remat.value_and_grad(f)(X)
    assert value == f(X)
    np.testing.assert_allclose(gradient, difference_quotient(f, X), rtol=1e-6)


@pytest.mark.parametrize("name", COPIES)
def test_in_loops_and_segments(name: str) -> None:
    def step(x):
        return np.sin(COPIES[name](x))

    def loop(x):
        return np.sum(remat.checkpointed_loop(step, x, 3, 1)[0])

    def segment(x):
        return np.sum(remat.checkpoint(step, x))

    for f in (loop, segment):
        np.testing.assert_allclose(remat.grad(f)(X), difference_quotient(f, X), rtol=1e-6)


def test_what_was_one_array_is_one_copy() -> None:
    def f(x):
        one, other = copy.deepcopy((x, x))
        one *= 2.0
        return np.sum(other)

    assert remat.grad(f)(X).tolist() == [2.0] * 4


@pytest.mark.parametrize("order", ["C", "F", "K"])
def test_the_layout_is_numpys(order: str) -> None:
    a = np.arange(6.0).reshape(2, 3).T
    found = remat.value_and_grad(lambda a: a.copy(order))(a)[0]
    assert found.strides == a.copy(order).strides


def test_a_pickle_is_of_no_use_outside() -> None:
    kept = []

    def f(x):
        kept.append(pickle.dumps(x))
        return np.sum(x)

    remat.grad(f)(X)
    with pytest.raises(remat.UnsupportedError, match="same process"):
        pickle.loads(kept[0])
    with pytest.raises(remat.UnsupportedError, match="same process"):
        remat.grad(lambda x: np.sum(x * pickle.loads(kept[0])))(X)


def test_an_array_of_another_call_is_refused() -> None:
    kept = []

    def f(x):
        kept.append(x)
        return np.sum(x * kept[0])

    remat.grad(f)(X)
    with pytest.raises(remat.UnsupportedError, match="left over from another call"):
        remat.grad(f)(X)
