"""Functions that return several arrays return a real list or tuple of traced arrays."""

from __future__ import annotations

import autograd.extend
import numpy as np
import pytest

import remat

from .oracles import difference_quotient

X = np.array([1.0, 2.0, 3.0, 4.0])
CUBE = np.sin(np.arange(64.0)).reshape(4, 4, 4)

SPLITS = {
    "split": lambda x: np.split(x, 2),
    "split along 1": lambda x: np.split(x, 2, axis=1),
    "split along -1": lambda x: np.split(x, [1, 3], -1),
    "split at negative places": lambda x: np.split(x, [-3, -1]),
    "split out of order": lambda x: np.split(x, [3, 1]),
    "array_split": lambda x: np.array_split(x, 3),
    "array_split at places": lambda x: np.array_split(x, np.array([1, 7]), axis=2),
    "hsplit": lambda x: np.hsplit(x, 2),
    "hsplit of a vector": lambda x: np.hsplit(x[0, 0], [1]),
    "vsplit": lambda x: np.vsplit(x, 4),
    "dsplit": lambda x: np.dsplit(x, [2]),
    "meshgrid": lambda x: np.meshgrid(x[0, 0], x[1, 1]),
    "broadcast_arrays": lambda x: np.broadcast_arrays(x[0], x),
    "gradient": lambda x: np.gradient(x[0]),
    "slogdet": lambda x: np.linalg.slogdet(x[0] + 2.0 * np.eye(4)),
    "eigh": lambda x: np.linalg.eigh(x[0] + x[0].T),
}


@pytest.mark.parametrize("name", SPLITS)
def test_returned_as_it_is(name: str) -> None:
    split = SPLITS[name]
    plain = split(CUBE)

    def total(x):
        return sum(np.sum(part) for part in split(x))

    value, gradient = remat.value_and_grad(split)(CUBE)
    assert type(value) is type(plain)
    for one, other in zip(value, plain, strict=True):
        np.testing.assert_array_equal(one, other)
    expected = difference_quotient(total, CUBE)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPLITS)
def test_init_grad_in_the_natural_structure(name: str) -> None:
    split = SPLITS[name]
    seeds = type(plain := split(CUBE))
    weights = [np.cos(np.arange(np.size(p))).reshape(np.shape(p)) for p in plain]
    init = seeds(*weights) if hasattr(seeds, "_fields") else seeds(weights)

    def total(x):
        return sum(np.sum(p * w) for p, w in zip(split(x), weights, strict=True))

    found = remat.grad(split)(CUBE, init_grad=init)
    np.testing.assert_allclose(found, difference_quotient(total, CUBE), rtol=1e-5, atol=1e-6)


def pieces(y):
    return np.split(np.sin(y), 2), y[:2] * y[:2]


RUNS = {
    "checkpoint": lambda x: remat.checkpoint(pieces, x),
    "adaptive, kept": lambda x: remat.adaptive_checkpoint(pieces, x, threshold="1MB"),
    "adaptive, dropped": lambda x: remat.adaptive_checkpoint(pieces, x, threshold=0),
}


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_returned_from_a_segment(name: str, profiled: bool) -> None:
    def total(parts):
        (a, b), c = parts
        return np.sum(a) * np.sum(b) + np.sum(c)

    def f(x):
        return total(RUNS[name](x))

    expected = difference_quotient(lambda x: total(pieces(x)), X)
    if profiled:
        with remat.CheckpointProfiler():
            found = remat.grad(f)(X)
    else:
        found = remat.grad(f)(X)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_carried_through_a_loop() -> None:
    def step(state):
        a, b = state
        return np.split(np.sin(np.concatenate([b, a * b])), 2)

    def f(x):
        a, b = remat.checkpointed_loop(step, np.split(x, 2), 5, 2)[0]
        return np.sum(a) * np.sum(b)

    np.testing.assert_allclose(remat.grad(f)(X), difference_quotient(f, X), rtol=1e-6)


def test_outputs_of_a_scan() -> None:
    def step(h, x):
        h = np.sin(h + x)
        return h, np.split(h, 2)

    def f(x):
        _, (a, b) = remat.checkpointed_scan(step, x, np.ones(3))
        return np.sum(a * b)

    np.testing.assert_allclose(remat.grad(f)(X), difference_quotient(f, X), rtol=1e-6)


def test_what_numpy_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="equal division"):
        remat.grad(lambda x: np.split(x, 3))(X)
    with pytest.raises(ValueError, match="2 or more dimensions"):
        remat.grad(lambda x: np.vsplit(x, 2))(X)


@autograd.extend.primitive
def parts_of(x):
    return {"twice": 2.0 * x, "both": (x, 3.0 * x)}


autograd.extend.defvjp(
    parts_of, lambda ans, x: lambda g: 2.0 * g["twice"] + g["both"][0] + 3.0 * g["both"][1]
)


def test_dicts_and_tuples_of_a_primitive_of_ones_own() -> None:
    value, gradient = remat.value_and_grad(parts_of)(X)
    assert type(value) is dict
    assert type(value["both"]) is tuple
    np.testing.assert_array_equal(gradient, 6.0 * np.ones(4))


def test_second_derivatives() -> None:
    def f(x):
        a, b = np.split(x, 2)
        return np.sum(a**2 * b**3)

    def slope(x):
        return np.sum(remat.grad(f)(x) * np.arange(4.0))

    np.testing.assert_allclose(remat.grad(slope)(X), difference_quotient(slope, X), rtol=1e-6)
