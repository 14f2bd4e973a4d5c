"""Operands of ops in scopes and budgets that change, are not understood, or lead nowhere."""

from __future__ import annotations

import functools
import threading
from fractions import Fraction
from functools import partial
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import remat
from remat.engines.numpy.adapter import is_pure

from .oracles import same_bits

LARGE = np.linspace(0.1, 1.0, 100_000)


# -- operands that change, and ops that are not understood -----------------------------------------


def product(x: Any, c: Any, how: Any = None) -> Any:
    return x * c


@pytest.mark.parametrize("how", [abs, object(), Fraction(1)])
@pytest.mark.parametrize("size", [3, 20_000])
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("wrap", ["plain", "scope", "budget"])
def test_an_operand_of_any_op_may_change_later_or_that_is_an_error(
    how, size, by_keyword, wrap
) -> None:
    op = autograd.extend.primitive(product)
    autograd.extend.defvjp(op, lambda ans, x, c, how=None: lambda g: g * c, None, None)
    plain_array = np.full(size, 3.0)

    def f(x: Any) -> Any:
        with remat.CheckpointScope("s", enabled=wrap == "scope"):
            y = op(x, c=plain_array, how=how) if by_keyword else op(x, plain_array, how)
        plain_array[:] = 0.0
        return np.sum(y)

    gradient = remat.grad(f, memory_budget="100MB" if wrap == "budget" else None)
    if size > 1000:
        with pytest.raises(remat.ModifiedInputError, match="changed in place"):
            gradient(np.ones(size))
    else:
        assert gradient(np.ones(size)).tolist() == [3.0] * size


@pytest.mark.parametrize("size", [3, 20_000])
@pytest.mark.parametrize("enabled", [False, True])
def test_an_argument_that_is_changed_by_another_name(size: int, enabled: bool) -> None:
    argument = np.ones(size)

    def f(x: Any) -> Any:
        with remat.CheckpointScope("s", enabled=enabled):
            y = x * x
        argument[:] = 5.0
        return np.sum(y)

    if size > 1000:
        with pytest.raises(remat.ModifiedInputError, match="the function has read"):
            remat.grad(f)(argument)
    else:
        assert remat.grad(f)(argument).tolist() == [2.0] * size


def _counting(number: list[int], v: float) -> float:
    number[0] += 1
    return v * number[0]


@pytest.mark.parametrize("kind", ["vectorize", "wraps"])
def test_code_of_the_program_behind_a_name_of_numpy_is_checked(kind: str) -> None:
    count = partial(_counting, [0])

    def called(v: Any) -> Any:
        return v * count(1.0)

    function: Any = {
        "vectorize": np.vectorize(count, otypes=[float]),
        "wraps": functools.wraps(np.sin)(called),
    }[kind]
    op = autograd.extend.primitive(function)
    autograd.extend.defvjp(op, lambda ans, x: lambda g: g * ans / x)

    def f(x: Any) -> Any:
        with remat.CheckpointScope("s"):
            return np.sum(np.sin(op(x) * 1.0))

    with pytest.raises(remat.RecomputeMismatchError, match="another result"):
        remat.grad(f)(np.ones(3))


def test_which_functions_give_the_same_again() -> None:
    pure = [np.sin, np.sum, np.linalg.inv, np.fft.fft, np.dot, anp.sin, anp.sum, np.asarray]
    assert all(map(is_pure, pure))
    not_pure = [np.frompyfunc(abs, 1, 1), np.vectorize(abs), product, partial(np.sin)]
    assert not any(map(is_pure, not_pure))


LAYOUTS = {
    "broadcast": lambda c: np.broadcast_to(c[0], c.shape),
    "reversed": lambda c: c[::-1, ::-1],
    "steps": lambda c: np.repeat(c, 2, axis=1)[:, ::2],
    "transposed": lambda c: c.T,
    "wide": lambda c: np.repeat(c, 40, axis=1)[:, ::40],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrap", ["scope", "budget"])
def test_plain_operands_keep_their_layout(layout: str, wrap: str) -> None:
    random = np.random.default_rng(0)
    x, c = random.normal(size=64), LAYOUTS[layout](random.normal(size=(64, 64)))

    def f(x: Any, wrap: str = "plain") -> Any:
        with remat.CheckpointScope("s", enabled=wrap == "scope"):
            y = anp.exp(x * c)
            return anp.sum(anp.sum(y, axis=0) ** 3) + anp.sum(anp.sin(anp.dot(y, c)))

    plain = autograd.grad(f)(x)
    found = remat.grad(f, memory_budget="1MB" if wrap == "budget" else None)(x, wrap)
    assert same_bits(found, plain)


# -- traced arrays that the result does not depend on ----------------------------------------------


@pytest.mark.parametrize("wrap", ["scope", "nested", "budget"])
def test_a_traced_array_that_the_program_holds_for_itself(wrap: str) -> None:
    log: list[Any] = []

    def f(x: Any) -> Any:
        for i in range(3):
            with (
                remat.CheckpointScope(f"outer {i}", enabled=wrap == "nested"),
                remat.CheckpointScope(f"s {i}", enabled=wrap != "budget"),
            ):
                x = remat.mark_checkpoint(x + np.tanh(np.sin(x) * 2))
                log.append(np.mean(np.cos(np.sin(x)) * x))
        return np.sum(x * x)

    def without_log(x: Any) -> Any:
        for _ in range(3):
            x = x + np.tanh(np.sin(x) * 2)
        return np.sum(x * x)

    plain = remat.grad(without_log)(LARGE)
    gradient = remat.grad(f, memory_budget=0.9 if wrap == "budget" else None)
    for _ in range(3):
        assert same_bits(gradient(LARGE), plain)


def test_a_dead_branch_is_not_saved_for_backward() -> None:
    def f(x: Any, count: int) -> Any:
        for _ in range(count):
            np.exp(x * 0.5)
        return np.sum(x * x)

    with_branches, without = (remat.memory_report(f, LARGE, n).trace.saved_bytes for n in (20, 0))
    assert with_branches == without


def test_an_array_of_another_library_call_is_named() -> None:
    left: list[Any] = []

    def keep(x: Any) -> Any:
        left.append(x * 2.0)
        return anp.sum(x)

    autograd.grad(keep)(np.ones(3))
    with pytest.raises(remat.UnsupportedError, match="left over from another call"):
        remat.grad(lambda x: np.sum(x * left[0]))(np.ones(3))


def test_traces_of_threads_do_not_get_the_same_number() -> None:
    begun, go_on, found = threading.Event(), threading.Event(), []

    def other() -> None:
        def f(x: Any) -> Any:
            begun.set()
            go_on.wait(600)
            return np.sum(x)

        remat.grad(f)(np.ones(2))

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(600)

    def outer(x: Any) -> Any:
        go_on.set()
        thread.join()  # its trace ends inside of this one
        return np.sum(remat.grad(lambda y: np.sum(y * y * x))(x * 1.0))

    found = remat.grad(outer)(np.array([1.0, 2.0]))
    assert found.tolist() == [4.0, 8.0]
