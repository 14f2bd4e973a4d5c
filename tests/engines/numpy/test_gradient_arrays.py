"""Gradients as arrays: memory of their own, the type of their argument, and of what they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import remat

from .oracles import difference_quotient

X = np.array([1.0, 2.0, 3.0, 4.0])


# -- memory ----------------------------------------------------------------------------------------

TWO = {
    "sum": lambda a, b: np.sum((a + b) ** 2),
    "add": lambda a, b: a + b,
    "first": lambda a, b: a,
    "both": lambda a, b: (a, b),
    "both in one": lambda a, b: [a, a, b],
    "views": lambda a, b: (a.reshape(2, 2), b[::-1]),
    "stack": lambda a, b: np.stack([a, b]),
    "loop": lambda a, b: remat.checkpointed_loop(lambda s: (s[0] + s[1], s[1]), (a, b), 3)[0],
    "segment": lambda a, b: remat.checkpoint(lambda a, b: a + b, a, b),
    "copies": lambda a, b: (a.copy(), np.copy(b)),
    "where": lambda a, b: np.where(X > 2, a, b),
}


def arrays(tree) -> list[np.ndarray]:
    if isinstance(tree, list | tuple):
        return [array for part in tree for array in arrays(part)]
    if isinstance(tree, dict):
        return arrays(list(tree.values()))
    return [tree] if isinstance(tree, np.ndarray) else []


def assert_apart(gradients, others) -> None:
    found = arrays(gradients)
    for one, other in itertools.combinations(found, 2):
        assert not np.shares_memory(one, other)
    for one, other in itertools.product(found, arrays(others)):
        assert not np.shares_memory(one, other)
    assert all(array.flags.writeable for array in found)


@pytest.mark.parametrize("name", TWO)
def test_gradients_of_two_arguments(name: str) -> None:
    a, b = X.copy(), X[::-1].copy()
    value, gradients = remat.value_and_grad(TWO[name], wrt=(0, 1))(a, b)
    assert_apart(gradients, [a, b, value])


@pytest.mark.parametrize("name", TWO)
def test_gradients_in_a_tree_and_init_grad(name: str) -> None:
    tree = {"a": X.copy(), "rest": [X[::-1].copy()]}

    def f(tree):
        return TWO[name](tree["a"], tree["rest"][0])

    def like(output):
        if isinstance(output, list | tuple):
            return type(output)(map(like, output))
        return np.ones(np.shape(output))

    init = like(f(tree))
    value, gradients = remat.value_and_grad(f)(tree, init_grad=init)
    assert_apart(gradients, [tree, value, init])


def test_the_example() -> None:
    ga, gb = remat.grad(lambda a, b: np.sum((a + b) ** 2), wrt=(0, 1))(X.copy(), X.copy())
    before = gb.copy()
    ga *= 0.1
    assert gb.tolist() == before.tolist()


@pytest.mark.parametrize("other", [lambda y: y, lambda y: y[1:], lambda y: y[::-1]])
def test_arguments_that_overlap(other) -> None:
    y = X.copy()

    def reads(a, b):
        return np.sum(a * 2.0) + np.sum(b * b)

    def writes(a, b):
        a *= 2.0
        return np.sum(b)

    ga, gb = remat.grad(reads, wrt=(0, 1))(y, other(y))
    assert (ga.tolist(), gb.tolist()) == ([2.0] * 4, (2.0 * other(X)).tolist())
    with pytest.raises(remat.UnsupportedError, match="read-only"):
        remat.grad(writes, wrt=(0, 1))(y, other(y))


# -- types -----------------------------------------------------------------------------------------

DTYPES = ["float16", "float32", "float64", ">f4", ">f8", "complex64", "complex128", ">c8"]
WIDER = {
    "itself": lambda x: x,
    "float64 factor": lambda x: np.sum(x * np.arange(4.0)),
    "float64 added": lambda x: np.sum((x + np.ones(4)) ** 2),
    "cast": lambda x: np.sum(x.astype(complex).real),
    "matmul": lambda x: np.eye(4) @ x,
    "where": lambda x: np.where(X > 2, x, np.zeros(4)),
    "index": lambda x: x[1:] * np.ones(3),
    "in place": lambda x: np.multiply(x, 2.0, out=x),
    "loop": lambda x: remat.checkpointed_loop(lambda h: h * np.float32(0.5), x, 5, 2)[0],
    "segment": lambda x: remat.checkpoint(lambda x: x * np.arange(4.0), x),
}


@pytest.mark.parametrize("name", WIDER)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_has_the_type_of_its_argument(dtype: str, name: str) -> None:
    x = X.astype(dtype)
    assert remat.grad(WIDER[name])(x).dtype == x.dtype
    tree = remat.grad(lambda t: WIDER[name](t["x"]))({"x": x})
    assert tree["x"].dtype == x.dtype


@pytest.mark.parametrize("name", ["itself", "index", "where"])
@pytest.mark.parametrize("dtype", ["float32", ">f8"])
def test_also_where_init_grad_has_another_one(dtype: str, name: str) -> None:
    x = X.astype(dtype)
    init = np.ones(np.shape(WIDER[name](x)))
    assert remat.grad(WIDER[name])(x, init_grad=init).dtype == x.dtype


def halve(x):
    x *= 0.5
    return x


def shift(x):
    x[1:] += x[:-1]
    return x


def into(x):
    return np.sin(x, out=x)


def fill(x):
    x[...] = np.sin(x)
    return x


@pytest.mark.parametrize("dtype", [">f8", ">f4", "float32", "float16"])
@pytest.mark.parametrize("step", [halve, shift, into, fill])
def test_in_place_steps_on_any_type(step, dtype: str) -> None:
    x = X.astype(dtype)
    expected = x.copy()
    for _ in range(6):
        expected = step(expected)

    def loss(x):
        return np.sum(remat.checkpointed_loop(step, x, 6, 2)[0].astype(float))

    def plain(x):
        for _ in range(6):
            x = step(x)
        return np.sum(x)

    final = remat.value_and_grad(lambda x: remat.checkpointed_loop(step, x, 6, 2)[0])(x)[0]
    assert (final.dtype, final.tobytes()) == (expected.dtype, expected.tobytes())
    gradient = remat.grad(loss)(x)
    assert gradient.dtype == x.dtype
    slope = difference_quotient(lambda x: plain(x.copy()), X)
    np.testing.assert_allclose(gradient.astype(float), slope, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_box_has_the_dtype_of_its_array(dtype: str) -> None:
    x = X.astype(dtype)
    seen = []

    def f(x):
        seen.extend([x.dtype, x.copy().dtype, x[1:].dtype, np.copy(x).dtype])
        return x

    remat.grad(f)(x)
    assert [str(found) for found in seen] == [str(x.dtype)] * 4


# -- what is no number -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "output", [None, "text", (), {}, [None], object(), np.array(["a"]), np.array([None])], ids=str
)
def test_an_output_without_numbers_is_refused(output) -> None:
    for differentiate in (remat.grad, remat.value_and_grad):
        with pytest.raises(TypeError, match=r"loss returned .*differentiate"):
            differentiate(loss_that_returns(output))(X)


def loss_that_returns(output):
    def loss(x):
        return output

    return loss


def test_none_is_named() -> None:
    with pytest.raises(TypeError, match="loss returned None"):
        remat.grad(loss_that_returns(None))(X)


def test_text_beside_numbers_passes_through() -> None:
    value, gradient = remat.value_and_grad(lambda x: (np.sum(x), "note", None))(X)
    assert value == (10.0, "note", None)
    assert gradient.tolist() == [1.0] * 4
