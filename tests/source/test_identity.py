"""Objects that have several names around a loop: transformed, they are the same objects."""

# Code as users write it, so not as a linter wants it.
# ruff: noqa: B007, B023

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest

import remat

torch = pytest.importorskip("torch")

TABLE = {}


def program(*, plain=False, engines=("numpy", "torch")):
    def add(function):
        TABLE[function.__name__] = function, plain, engines
        return function

    return add


@program()
def exchanged(xp, x, xs):
    a, b = x * 1.0, x * 2.0
    first = a
    for _ in range(5):
        a, b = b, a
    b += x * 3.0
    return first * x, first is b


@program()
def untouched(xp, x, xs):
    a, b = x * 1.0, x * 2.0
    first, turn = b, 0
    while True:
        turn += 1
        if turn > 13:
            break
        a = xp.sin(a)
        if turn > 50:
            b = b * 0.9
    b += a * 0.1
    return first * x, first is b


@program()
def appended(xp, x, xs):
    out = []
    for _ in range(10):
        x = xp.sin(x)
        out.append(x)
    x += 1.0
    return out[-1], out[-1] is x, len(out)


@program()
def appended_twice(xp, x, xs):
    out, best = [], x * 2.0
    for i in range(10):
        x = x * 0.9
        if i == 4:
            best = x
        out.append(best)
    return out[-1] * x, [each is best for each in out]


@program()
def two_names_in_the_body(xp, x, xs):
    b = x * 0.5
    for i in range(10):
        x = x * 0.9
        b = x
    x += 1.0
    return b * b, b is x


@program()
def changed_under_two_names(xp, x, xs):
    a = x * 1.0
    b = x * 0.1
    for i in range(10):
        c = b * 0.5
        b = a
        a += 0.25
        a = a * 0.9 + c * 0.1
    return a + b


@program(engines=("numpy",))
def the_last_row(xp, x, xs):
    table = [xs[i] * 1.0 for i in range(12)]
    for row in table:
        x = x * 0.9 + row
    row += 1.0
    return x + sum(table)


@program()
def what_the_body_reads(xp, x, xs):
    w = x * 0.3
    y = x
    for i in range(10):
        x = x * 0.9 + w
        y = w
    y += 1.0
    return x * w, y is w


@program(plain=True)
def a_view_that_is_written_to(xp, x, xs):
    table = xs * 1.0
    for i in range(12):
        view = table[i]
        x = x * 0.9 + view
    view += 1.0
    return x + table.sum()


@program()
def a_condition_that_binds(xp, x, xs):
    while (error := (x * x).sum()) > 1e-3:
        x = x * 0.7
    return x * error


@program(plain=True)
def a_kept_lambda(xp, x, xs):
    functions = []
    for i in range(10):
        x = xp.sin(x)
        functions.append(lambda v: v * i)
    return sum(f(x) for f in functions)


@program(plain=True)
def a_kept_partial(xp, x, xs):
    functions = []
    for i in range(10):
        x = xp.sin(x)
        functions.append(functools.partial(lambda v: v * i))
    return sum(f(x) for f in functions)


@program(plain=True)
def a_kept_generator(xp, x, xs):
    for i in range(10):
        x = xp.sin(x)
        parts = (x * k for k in range(3))
    return sum(parts)


@program(plain=True)
def an_object_with_an_array(xp, x, xs):
    for i in range(10):
        x = xp.sin(x)
        holder = SimpleNamespace(h=x * 2)
    return holder.h


@program(plain=True)
def objects_in_a_list(xp, x, xs):
    out = []
    for i in range(10):
        x = xp.sin(x)
        out.append(SimpleNamespace(h=x * i))
    return out[-1].h


@program(plain=True)
def an_entry_that_is_changed(xp, x, xs):
    first = x * 1.0
    box = {"k": first}
    for i in range(10):
        x = x * 0.9
        box["k"] += 0.5
    return x + first


@program(plain=True)
def appended_and_changed(xp, x, xs):
    out, y = [], x * 1.0
    for i in range(10):
        y += 0.5
        out.append(y)
    return y, [each is y for each in out]


def outcome(function, engine):
    arrays = np.arange(1.0, 4.0) * 0.3, np.arange(36.0).reshape(12, 3) * 0.01
    if engine == "numpy":
        rest = []

        def total(x, xs):
            value, *others = found if type(found := function(np, x, xs)) is tuple else (found,)
            rest.append(others)
            return value.sum()

        value, gradients = remat.value_and_grad(total, wrt=(0, 1))(*arrays)
        return [value, *gradients], rest[0]
    x, xs = (torch.tensor(each, requires_grad=True) for each in arrays)
    found = function(torch, x * 1, xs * 1)
    value, *others = found if type(found) is tuple else (found,)
    gradients = torch.autograd.grad(value.sum(), (x, xs), allow_unused=True)
    gradients = [np.zeros(1) if g is None else g.numpy() for g in gradients]
    return [value.detach().sum().numpy(), *gradients], others


@program(plain=True)
def written_through_a_view_from_before(xp, x, xs):
    a = x * 1.0
    view = a[1:]
    for _ in range(6):
        view += 0.25
        view *= 1.5
    return a * x


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize(("name", "engine"), [(n, e) for n in TABLE for e in TABLE[n][2]])
def test_a_program_does_the_same(name: str, engine: str) -> None:
    function, is_plain, _ = TABLE[name]
    values, rest = outcome(function, engine)
    with remat.CheckpointProfiler() as profiler:
        found, others = outcome(remat.checkpoint_loops(function, min_steps=2), engine)
    assert others == rest
    for one, other in zip(values, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)
    assert (profiler.checkpoint_count() == 0) == is_plain


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("name", [n for n in TABLE if TABLE[n][1]])
def test_strict_says_why_a_loop_stays_plain(name: str, engine: str) -> None:
    with pytest.raises(remat.LoopTransformError, match="the loop cannot be checkpointed"):
        outcome(remat.checkpoint_loops(TABLE[name][0], min_steps=2, strict=True), engine)


def remember(holder, value):
    holder.h = value


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_a_function_that_stores_into_an_object_is_found(engine: str) -> None:
    def function(xp, x, xs):
        holder = SimpleNamespace(h=None)
        for i in range(10):
            x = xp.sin(x)
            remember(holder, x)
        return holder.h

    words = "changes holder, a list, dict or object|left a traced value"
    with pytest.raises(remat.RematError, match=words):
        outcome(remat.checkpoint_loops(function), engine)


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_strict_refuses_a_generator_of_any_length(engine: str) -> None:
    def function(xp, x, xs):
        for k in iter([0.5, 0.25, 0.125]):
            x = xp.sin(x) * k
        return x

    with pytest.raises(remat.LoopTransformError, match="items cannot be asked for again"):
        outcome(remat.checkpoint_loops(function, strict=True), engine)
