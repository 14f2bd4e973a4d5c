"""`checkpointed_scan` and `checkpointed_while` on NumPy arrays."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import remat
from remat.schedules import Revolve

from .oracles import same_bits

SCHEDULES = ["auto", "revolve", "uniform", "all"]
rng = np.random.default_rng(1)
W = rng.normal(size=(3, 3)) * 0.5
S = rng.normal(size=3)
XS = rng.normal(size=(14, 3))


def plain_scan(func, state, xs):
    ys = []
    for x in xs:
        state, y = func(state, x)
        ys.append(y)
    return state, ys


def cell(np, W):
    def func(state, x):
        state = np.tanh(state @ W + x)
        return state, np.sin(state) * x

    return func


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoints", [0, 2, None])
def test_a_scan_has_the_gradient_of_a_plain_loop(schedule, checkpoints) -> None:
    weights = rng.normal(size=(14, 3))

    def loss(W, s, xs):
        final, ys = remat.checkpointed_scan(cell(np, W), s, xs, checkpoints, schedule=schedule)
        return np.sum(final**2) + np.sum(ys * weights)

    def plain(W, s, xs):
        final, ys = plain_scan(cell(anp, W), s, xs)
        return anp.sum(final**2) + anp.sum(anp.stack(ys) * weights)

    value, found = remat.value_and_grad(loss, wrt=(0, 1, 2))(W, S, XS)
    np.testing.assert_allclose(value, plain(W, S, XS), rtol=1e-14)
    for i in range(3):
        np.testing.assert_allclose(found[i], autograd.grad(plain, i)(W, S, XS), rtol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_the_outputs_or_only_the_final_state_count(schedule) -> None:
    for part in (0, 1):
        found = remat.grad(
            lambda s, part=part: np.sum(
                remat.checkpointed_scan(cell(np, W), s, XS, 2, schedule=schedule)[part]
            )
        )(S)
        expected = autograd.grad(
            lambda s, part=part: sum(anp.sum(r) for r in plain_scan(cell(anp, W), s, XS)[part])
        )(S)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inputs_and_outputs_may_be_trees(schedule, traced) -> None:
    xs = {"a": XS, "k": np.arange(14), "flag": np.arange(14) % 2 == 0}

    def func(np):
        def step(s, x):
            s = s * 0.9 + x["a"] * x["k"] * x["flag"]
            return s, (np.sum(s), {"k": x["k"], "s": s})

        return step

    def loss(a):
        final, ys = remat.checkpointed_scan(func(np), S, {**xs, "a": a}, 3, schedule=schedule)
        assert ys[1]["k"].tolist() == list(range(14))
        return np.sum(final) + np.sum(ys[0] ** 2) + np.sum(ys[1]["s"])

    def plain(a):
        s, total = S, 0.0
        for i in range(14):
            s, y = func(anp)(s, {"a": a[i], "k": i, "flag": i % 2 == 0})
            total = total + y[0] ** 2 + anp.sum(y[1]["s"])
        return anp.sum(s) + total

    if traced:
        np.testing.assert_allclose(remat.grad(loss)(XS), autograd.grad(plain)(XS), rtol=1e-12)
    else:
        np.testing.assert_allclose(loss(XS), plain(XS), rtol=1e-13)


def test_a_scan_over_nothing() -> None:
    final, ys = remat.checkpointed_scan(cell(np, W), S, np.zeros((0, 3)))
    assert same_bits(final, S)
    one = remat.checkpointed_scan(cell(np, W), S, np.zeros((1, 3)))[1]
    assert (ys.shape, ys.dtype) == ((0, *one.shape[1:]), one.dtype)


@pytest.mark.parametrize("steps", [1, 2])
def test_short_scans(steps) -> None:
    final, ys = remat.checkpointed_scan(cell(np, W), S, XS[:steps])
    expected_final, expected = plain_scan(cell(np, W), S, XS[:steps])
    assert same_bits(final, expected_final)
    assert same_bits(ys, np.stack(expected))


@pytest.mark.parametrize(
    "xs", [3.0, np.array(3.0), (np.ones(3), np.ones(4)), (np.ones(3), 2.0), (), None]
)
def test_inputs_without_a_common_first_axis(xs) -> None:
    with pytest.raises(ValueError, match="xs"):
        remat.checkpointed_scan(lambda s, x: (s, x), S, xs)


def test_lists_of_numbers_are_not_taken_for_steps() -> None:
    with pytest.raises(ValueError, match="xs"):
        remat.checkpointed_scan(lambda s, x: (s, x), S, [1.0, 2.0])


def test_outputs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="step 2 has shape"):
        remat.checkpointed_scan(lambda s, x: (s, s[: 3 - int(x)] if x > 1 else s), S, np.arange(4))


def test_outputs_of_another_structure_are_refused() -> None:
    with pytest.raises(TypeError, match="structure"):
        remat.checkpointed_scan(lambda s, x: (s, (s, s) if x > 1 else s), S, np.arange(4))


@pytest.mark.parametrize("returned", [lambda s: s, lambda s: (s,), lambda s: (s, s, s)])
def test_a_step_that_returns_no_pair(returned) -> None:
    with pytest.raises((TypeError, ValueError)):
        remat.checkpointed_scan(lambda s, x: returned(s), np.ones(5), XS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scan_runs_as_often_as_predicted(schedule) -> None:
    calls = []

    def func(s, x):
        calls.append(1)
        return s * 0.9 + x, s

    remat.grad(lambda s: np.sum(remat.checkpointed_scan(func, s, XS, 2, schedule="revolve")[1]))(S)
    assert len(calls) == Revolve(14, 2).evaluations


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_jacobians_of_outputs(schedule) -> None:
    found = autograd.jacobian(
        lambda s: remat.checkpointed_scan(cell(np, W), s, XS, 2, schedule=schedule)[1]
    )(S)
    expected = autograd.jacobian(lambda s: anp.stack(plain_scan(cell(anp, W), s, XS)[1]))(S)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


# -- what went wrong once --------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", [float, int])
def test_a_step_that_works_in_place_on_its_input(traced, dtype) -> None:
    xs = (XS * 5).astype(dtype)
    before = xs.copy()

    def func(s, x):
        x += 1
        return s * 0.9 + x * s, s

    def loss(s):
        return np.sum(remat.checkpointed_scan(func, s, xs, 2)[0])

    (remat.grad(loss) if traced else loss)(S)
    assert same_bits(xs, before)


def test_outputs_that_begin_as_whole_numbers() -> None:
    _, ys = remat.checkpointed_scan(
        lambda s, x: (s * 0.5, 0 if x == 0 else s), np.array(1.0), np.arange(4)
    )
    np.testing.assert_array_equal(ys, [0, 0.5, 0.25, 0.125])


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])
def test_an_output_that_does_not_repeat_itself_is_caught(schedule) -> None:
    count = [0]

    def func(s, x):
        count[0] += 1
        return s * 0.9, s * count[0]

    def loss(s):
        return np.sum(remat.checkpointed_scan(func, s, np.ones(6), 1, schedule=schedule)[1])

    with pytest.raises(remat.RecomputeMismatchError):
        remat.grad(loss)(S)


@pytest.mark.parametrize("traced", [False, True])
def test_outputs_that_are_none(traced) -> None:
    seen = []

    def loss(s):
        final, ys = remat.checkpointed_scan(lambda s, x: (s * x, None), s, XS, 2)
        seen.append(ys)
        return np.sum(final)

    (remat.grad(loss) if traced else loss)(S)
    assert seen == [None]


# -- while -----------------------------------------------------------------------------------------


def newton(np, a):
    return lambda x: x - (x**2 - a) / (2 * x) * 0.3


def far(np, a):
    return lambda x: np.max(np.abs(x**2 - a)) > 1e-6


def plain_while(cond, func, x):
    steps = 0
    while cond(x):
        x = func(x)
        steps += 1
    return x, steps


A = np.array([2.0, 3.0, 0.5])


@pytest.mark.parametrize("checkpoints", [1, 2, 5, 100])
def test_a_while_loop_has_the_gradient_of_a_plain_one(checkpoints) -> None:
    def loss(a, x):
        return np.sum(remat.checkpointed_while(far(np, a), newton(np, a), x, checkpoints)[0] * A)

    def plain(a, x):
        cond = far(anp, a)
        return anp.sum(plain_while(cond, newton(anp, a), x)[0] * A)

    value, found = remat.value_and_grad(loss, wrt=(0, 1))(A, A + 1)
    np.testing.assert_allclose(value, plain(A, A + 1), rtol=1e-15)
    for i in range(2):
        np.testing.assert_allclose(found[i], autograd.grad(plain, i)(A, A + 1), rtol=1e-11)


@pytest.mark.parametrize("budget", ["100KB", 10**6])
def test_a_while_loop_within_a_budget(budget) -> None:
    def loss(a):
        return np.sum(
            remat.checkpointed_while(far(np, a), newton(np, a), A + 1, memory_budget=budget)[0]
        )

    def plain(a):
        return anp.sum(plain_while(far(anp, a), newton(anp, a), A + 1)[0])

    np.testing.assert_allclose(remat.grad(loss)(A), autograd.grad(plain)(A), rtol=1e-11)


def test_checkpoints_of_a_while_loop() -> None:
    final, checkpoints = remat.checkpointed_while(far(np, A), newton(np, A), A + 1, 4)
    expected, steps = plain_while(far(np, A), newton(np, A), A + 1)
    assert same_bits(final, expected)
    assert len(checkpoints) == 4
    for position, state in checkpoints.items():
        assert 0 < position < steps
        x = A + 1
        for _ in range(position):
            x = newton(np, A)(x)
        assert same_bits(state, x)


@pytest.mark.parametrize("traced", [False, True])
def test_a_while_loop_that_never_starts(traced) -> None:
    def run(x):
        return np.sum(remat.checkpointed_while(lambda x: False, np.sin, x, 3)[0] ** 2)

    if traced:
        np.testing.assert_allclose(remat.grad(run)(S), 2 * S)
    else:
        assert run(S) == np.sum(S**2)


def test_the_condition_is_asked_once_for_each_step() -> None:
    asked = []

    def cond(x):
        asked.append(type(x))
        return len(asked) < 10

    remat.grad(lambda x: np.sum(remat.checkpointed_while(cond, np.sin, x, 2)[0]))(S)
    assert asked == [np.ndarray] * 10


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ValueError, "num_checkpoints or memory_budget"),
        ({"num_checkpoints": -1}, ValueError, "num_checkpoints"),
        ({"num_checkpoints": 2.5}, TypeError, "num_checkpoints"),
        ({"memory_budget": 0.5}, ValueError, "fraction"),
        ({"num_checkpoints": 2, "memory_budget": 100}, ValueError, "either"),
    ],
)
def test_bad_arguments_of_a_while_loop(arguments, error, match) -> None:
    with pytest.raises((error, ValueError), match=match):
        remat.checkpointed_while(lambda x: False, np.sin, S, **arguments)


@pytest.mark.parametrize("which", ["cond", "func"])
def test_a_while_loop_wants_functions(which) -> None:
    functions = {"cond": lambda x: False, "func": np.sin, which: 3}
    with pytest.raises(TypeError, match=f"{which} must be a function"):
        remat.checkpointed_while(functions["cond"], functions["func"], S, 3)


def test_a_while_loop_shows_progress(capfd) -> None:
    remat.checkpointed_while(far(np, A), newton(np, A), A + 1, 4, progress=True)
    _, steps = plain_while(far(np, A), newton(np, A), A + 1)
    assert f"{steps}/" in capfd.readouterr().err


def test_a_condition_that_draws_random_numbers() -> None:
    def cond(x):
        return np.random.rand() < 0.9

    def step(x):
        return x * np.random.randn(3)

    np.random.seed(0)
    expected = remat.grad(lambda x: np.sum(plain_while(cond, step, x)[0]))(S)
    np.random.seed(0)
    found = remat.grad(lambda x: np.sum(remat.checkpointed_while(cond, step, x, 1)[0]))(S)
    assert same_bits(found, expected)


def test_a_scan_over_nothing_returns_empty_outputs() -> None:
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state
    calls = [0]

    def step(state, x):
        calls[0] += 1
        generator.normal()
        state *= 2
        return state, (state + x["a"], {"sum": np.sum(x["a"]) * 1j})

    def f(start):
        final, (ys, sums) = remat.checkpointed_scan(step, start, {"a": np.zeros((0, 2), "f4")})
        assert (ys.shape, ys.dtype) == ((0, 2), np.float64)
        assert (sums["sum"].shape, sums["sum"].dtype.kind) == ((0,), "c")
        return np.sum(final) + np.sum(ys)

    start = np.ones(2)
    assert remat.grad(f)(start).tolist() == [1.0, 1.0]
    assert f(start) == 2.0
    assert calls == [0]
    assert generator.bit_generator.state == before


def test_an_error_of_the_step_on_zeros_says_so() -> None:
    def step(state, x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error:
        remat.checkpointed_scan(step, np.ones(2), np.zeros((0, 2)))
    assert "zeros" in error.value.__notes__[0]
