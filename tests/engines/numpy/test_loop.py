"""`checkpointed_loop` on NumPy arrays, against plain autograd over an ordinary loop."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import remat
from remat.loops import LoopOptions
from remat.schedules import Revolve, StoreAll, Uniform

from .oracles import difference_quotient, plain_loop, plain_states, same_bits

SCHEDULES = ["auto", "revolve", "uniform", "all"]
rng = np.random.default_rng(0)
W = rng.normal(size=(4, 4)) * 0.4
b = rng.normal(size=4) * 0.1
X = rng.normal(size=4)


def tanh_step(np, W, b):
    return lambda state: np.tanh(state @ W + b)


def rnn_model(x, W, b, seq_length=50, **options):
    def rnn_step(state):
        return np.tanh(state @ W + b)

    final_state, _ = remat.checkpointed_loop(rnn_step, x, seq_length, **options)
    return final_state


def plain_rnn(x, W, b, seq_length=50):
    return plain_loop(tanh_step(anp, W, b), x, seq_length)


# -- the example of the document -------------------------------------------------------------------


def test_the_example_of_the_document() -> None:
    def rnn_model(x, W, b, seq_length=1000):
        def rnn_step(state):
            return np.tanh(state @ W + b)

        final_state, _checkpoints = remat.checkpointed_loop(
            rnn_step, x, seq_length, num_checkpoints=31
        )
        return final_state

    df = remat.grad(rnn_model, wrt=(0, 1, 2))
    found = df(X, W, b)
    for i in range(3):
        expected = autograd.elementwise_grad(plain_rnn, i)(X, W, b, 1000)
        assert same_bits(found[i], expected)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 37])
@pytest.mark.parametrize("checkpoints", [None, 0, 1, 3, 50])
def test_gradients_have_the_bits_of_autograd(schedule: str, steps: int, checkpoints) -> None:
    found = remat.grad(rnn_model, wrt=(0, 1, 2))(
        X, W, b, steps, num_checkpoints=checkpoints, schedule=schedule
    )
    for i in range(3):
        expected = autograd.elementwise_grad(plain_rnn, i)(X, W, b, steps)
        assert same_bits(found[i], expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_agree_with_difference_quotients(schedule: str) -> None:
    def loss(W):
        return np.sum(rnn_model(X, W, b, 12, num_checkpoints=2, schedule=schedule) ** 2)

    np.testing.assert_allclose(
        remat.grad(loss)(W), difference_quotient(loss, W), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_types_of_floats(dtype) -> None:
    x = X.astype(dtype)

    def loss(np_, run):
        return lambda x: np_.sum(run(lambda s: np_.sin(s) * dtype(1.1), x))

    found = remat.grad(loss(np, lambda f, x: remat.checkpointed_loop(f, x, 20, 3)[0]))(x)
    expected = remat.grad(loss(np, lambda f, x: plain_loop(f, x, 20)))(x)
    assert found.dtype == dtype
    assert same_bits(found, expected)


def test_long_doubles() -> None:
    x = X.astype(np.longdouble)
    gradient = remat.grad(
        lambda x: np.sum(remat.checkpointed_loop(lambda s: np.sin(s) * 1.1, x, 30, 2)[0])
    )(x)
    assert gradient.dtype == np.longdouble


def test_complex_states() -> None:
    z = X + 1j * X[::-1]

    def step(np_):
        return lambda z: np_.sin(z) * (0.9 + 0.2j)

    def loss(np_, run):
        return lambda z: np_.sum(np_.real(run(step(np_), z)))

    found = remat.grad(loss(np, lambda f, z: remat.checkpointed_loop(f, z, 9, 2)[0]))(z)
    expected = autograd.grad(loss(anp, lambda f, z: plain_loop(f, z, 9)))(z)
    assert same_bits(found, expected)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 2), (2, 1, 3)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shapes(shape, schedule) -> None:
    x = np.full(shape, 0.3)
    found = remat.grad(
        lambda x: remat.checkpointed_loop(lambda s: np.sin(s) + s, x, 7, 2, schedule=schedule)[0]
    )(x)
    expected = autograd.elementwise_grad(lambda x: plain_loop(lambda s: anp.sin(s) + s, x, 7))(x)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_python_float_as_state(schedule) -> None:
    found = remat.grad(
        lambda x: remat.checkpointed_loop(lambda s: np.sin(s) + s, x, 7, 2, schedule=schedule)[0]
    )(0.3)
    expected = autograd.grad(lambda x: plain_loop(lambda s: anp.sin(s) + s, x, 7))(0.3)
    assert found == expected


@pytest.mark.parametrize("seed", range(12))
def test_matrix_products_of_any_size_repeat_themselves(seed: int) -> None:
    """Results of BLAS may depend on where an array lies in memory: no false alarm for that."""
    draw = np.random.default_rng(seed)
    n, m = draw.integers(1, 90, size=2)
    M = draw.normal(size=(n, n)) / n
    x = draw.normal(size=(m, n) if seed % 2 else n)
    found = remat.grad(
        lambda x: np.sum(remat.checkpointed_loop(lambda s: np.sin(s @ M), x, 23, 3)[0])
    )(x)
    expected = autograd.grad(lambda x: anp.sum(plain_loop(lambda s: anp.sin(s @ M), x, 23)))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize(
    "step",
    [lambda s: s.T * 1.1, lambda s: s[::-1] * 1.1, lambda s: s[::-1], lambda s: s.T, lambda s: s],
    ids=["transposed", "reversed", "view", "transposed view", "identity"],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layouts(step, schedule) -> None:
    x = rng.normal(size=(3, 3))
    weights = rng.normal(size=(3, 3))
    found = remat.grad(
        lambda x: np.sum(remat.checkpointed_loop(step, x, 7, 2, schedule=schedule)[0] * weights)
    )(x)
    expected = autograd.grad(lambda x: anp.sum(plain_loop(step, x, 7) * weights))(x)
    assert same_bits(np.ascontiguousarray(found), np.ascontiguousarray(expected))


def test_nan_and_infinity_flow_as_in_numpy() -> None:
    def step(np_):
        return lambda s: s * np_.array([1.0, np.nan, np.inf, 2.0])

    with np.errstate(invalid="ignore", over="ignore"):
        x = np.array([1.0, 1.0, 0.0, np.nan])
        final, _ = remat.checkpointed_loop(step(np), x, 9, 2)
        assert same_bits(final, plain_loop(step(np), x, 9))
        found = remat.grad(lambda x: remat.checkpointed_loop(step(np), x, 9, 2)[0])(x)
        expected = autograd.elementwise_grad(lambda x: plain_loop(step(anp), x, 9))(x)
    np.testing.assert_array_equal(found, expected)


# -- states ----------------------------------------------------------------------------------------


def sigmoid(np, x):
    return 1.0 / (1.0 + np.exp(-x))


def lstm_step(np, W_i, W_f, W_o, W_g):
    def step(state):
        h, c = state
        i, f, o = (sigmoid(np, h @ M) for M in (W_i, W_f, W_o))
        g = np.tanh(h @ W_g)
        c_new = f * c + i * g
        return o * np.tanh(c_new), c_new

    return step


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_lstm(schedule: str) -> None:
    gates = [rng.normal(size=(4, 4)) for _ in range(4)]

    def loss(np, run):
        def f(h, c, *gates):
            h, c = run(lstm_step(np, *gates), (h, c))
            return np.sum(h * c)

        return f

    wrt = tuple(range(6))
    found = remat.grad(
        loss(np, lambda s, x: remat.checkpointed_loop(s, x, 31, 4, schedule=schedule)[0]), wrt
    )(X, X * 0.1, *gates)
    for i in wrt:
        expected = autograd.grad(loss(anp, lambda s, x: plain_loop(s, x, 31)), i)(
            X, X * 0.1, *gates
        )
        np.testing.assert_allclose(found[i], expected, rtol=1e-12)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Point:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenPoint:
    x: Any
    y: Any


TREES = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"y": y, "x": x},
    "named": Pair,
    "dataclass": Point,
    "frozen": FrozenPoint,
    "nested": lambda x, y: {"a": [Point(x, (y, None))]},
}


def parts(tree):
    match tree:
        case {"a": [Point(x=x, y=(y, None))]}:
            return x, y
        case {"x": x, "y": y}:
            return x, y
        case Point() | FrozenPoint():
            return tree.x, tree.y
    return tuple(tree)


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_tree_is_a_state(make, schedule) -> None:
    def step(np):
        def rotate(tree):
            x, y = parts(tree)
            return make(np.cos(x) * y, np.sin(y) + x)

        return rotate

    def loss(np, run):
        def f(x, y):
            x, y = parts(run(step(np), make(x, y)))
            return np.sum(x * y)

        return f

    def remat_run(step, state):
        final, checkpoints = remat.checkpointed_loop(step, state, 11, 2, schedule=schedule)
        assert type(final) is type(state)
        assert all(type(value) is type(state) for value in checkpoints.values())
        return final

    found = remat.grad(loss(np, remat_run), wrt=(0, 1))(X, X + 1)
    for i in range(2):
        expected = autograd.grad(loss(anp, lambda s, x: plain_loop(s, x, 11)), i)(X, X + 1)
        np.testing.assert_allclose(found[i], expected, rtol=1e-13)


EXTRAS = {
    "int": (0, lambda k: k + 1),
    "bool": (True, lambda k: not k),
    "int array": (np.arange(4), lambda k: k + 1),
    "bool array": (np.array([True, False, True, True]), lambda k: ~k),
    "np.int64": (np.int64(3), lambda k: k - 1),
    "text": ("a", lambda k: k),
}


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_no_float_passes_through_a_plain_loop(name, schedule) -> None:
    start, change = EXTRAS[name]
    (final, k), checkpoints = remat.checkpointed_loop(
        lambda s: (s[0] * 0.9, change(s[1])), (X, start), 9, 2, schedule=schedule
    )
    states = plain_states(lambda s: (s[0] * 0.9, change(s[1])), (X, start), 9)
    assert same_bits(final, states[9][0])
    np.testing.assert_array_equal(k, states[9][1])
    for position, state in checkpoints.items():
        np.testing.assert_array_equal(state[1], states[position][1])


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_no_float_passes_through_a_traced_loop(name, schedule) -> None:
    start, change = EXTRAS[name]
    factor = (lambda k: 0.9) if name == "text" else (lambda k: 0.9 + 0.01 * k)
    expected_k = plain_loop(change, start, 9)
    seen = []

    def loss(np, run):
        def f(x):
            x, k = run(lambda s: (s[0] * factor(s[1]), change(s[1])), (x, start))
            seen.append(k)
            return np.sum(x)

        return f

    found = remat.grad(
        loss(np, lambda s, x: remat.checkpointed_loop(s, x, 9, 2, schedule=schedule)[0])
    )(X)
    expected = autograd.grad(loss(anp, lambda s, x: plain_loop(s, x, 9)))(X)
    assert same_bits(found, expected)
    np.testing.assert_array_equal(seen[0], expected_k)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sum_that_starts_as_an_int(schedule) -> None:
    def loss(np, run):
        def f(x):
            _, total = run(lambda s: (np.sin(s[0]), s[1] + np.sum(s[0])), (x, 0))
            return total

        return f

    found = remat.grad(
        loss(np, lambda s, x: remat.checkpointed_loop(s, x, 9, 2, schedule=schedule)[0])
    )(X)
    expected = autograd.grad(loss(anp, lambda s, x: plain_loop(s, x, 9)))(X)
    assert same_bits(found, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_states_may_change_their_shape(schedule) -> None:
    def step(np):
        return lambda s: np.concatenate([s * 0.9, np.sin(s[-1:])])

    found = remat.grad(
        lambda x: np.sum(remat.checkpointed_loop(step(np), x, 13, 3, schedule=schedule)[0] ** 2)
    )(X)
    expected = autograd.grad(lambda x: anp.sum(plain_loop(step(anp), x, 13) ** 2))(X)
    assert same_bits(found, expected)


# -- in place --------------------------------------------------------------------------------------


def in_place_whole(u):
    u *= 0.9
    u += 0.1
    return u


def in_place_slices(u):
    u[1:-1] += 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2])
    return u


def in_place_view(u):
    v = u[1:]
    v *= 0.5
    return u


def in_place_copy(u):
    u = u.copy()
    u[0] = u[-1] * 0.5
    return u


def returns_a_view(u):
    u += 0.1
    return u[::-1]


IN_PLACE = [in_place_whole, in_place_slices, in_place_view, in_place_copy, returns_a_view]


@pytest.mark.parametrize("step", IN_PLACE)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_may_work_in_place(step, schedule) -> None:
    x = X.copy()

    def loss(x):
        return np.sum(remat.checkpointed_loop(step, x, 11, 2, schedule=schedule)[0] ** 2)

    value, gradient = remat.value_and_grad(loss)(x)
    assert same_bits(x, X)
    assert value == np.sum(plain_loop(step, X.copy(), 11) ** 2)
    expected = difference_quotient(lambda x: np.sum(plain_loop(step, x.copy(), 11) ** 2), X)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("step", IN_PLACE)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_differentiation_the_callers_state_stays_as_it_is(step, schedule) -> None:
    x = X.copy()
    final, checkpoints = remat.checkpointed_loop(step, x, 11, 3, schedule=schedule)
    assert same_bits(x, X)
    assert same_bits(final, plain_loop(step, X.copy(), 11))
    for position, state in checkpoints.items():
        np.testing.assert_array_equal(state, plain_loop(step, X.copy(), position))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_leaves_that_share_memory_go_on_sharing_it(schedule) -> None:
    def step(s):
        h, c = s
        h += 1.0
        return h * 1.0, c * h

    def loss(x):
        a = x * 1.0
        h, c = remat.checkpointed_loop(step, (a, a), 3, 1, schedule=schedule)[0]
        return np.sum(h * c)

    a = X.copy()
    h, c = plain_loop(step, (a, a), 3)
    try:
        value = loss(X)
    except remat.UnsupportedError:
        return
    assert value == np.sum(h * c)


@pytest.mark.parametrize("schedule", ["revolve", "uniform", "auto"])
def test_sweeps_that_only_advance_run_on_raw_arrays(schedule) -> None:
    seen = []

    def loss(W, x):
        def step(state):
            seen.append((type(state), type(W)))
            return np.tanh(state @ W)

        return np.sum(remat.checkpointed_loop(step, x, 20, 2, schedule=schedule)[0])

    remat.grad(loss, wrt=(0, 1))(W, X)
    raw = seen.count((np.ndarray, np.ndarray))
    assert all((state is np.ndarray) == (w is np.ndarray) for state, w in seen)
    # Every step is taped once to go back through it ("auto" tapes step 0 to measure it, and may
    # hold tapes): all the rest is raw.
    assert len(seen) - raw <= 21
    assert raw >= len(seen) - 21 > 0


# -- schedules, budgets, counts --------------------------------------------------------------------


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state):
        self.calls += 1
        return np.sin(state) * 1.01


def count(schedule: str, steps: int, checkpoints: int) -> int:
    step = Counting()
    remat.grad(
        lambda x: np.sum(remat.checkpointed_loop(step, x, steps, checkpoints, schedule=schedule)[0])
    )(X)
    return step.calls


@pytest.mark.parametrize("steps", [1, 2, 7, 20, 61])
@pytest.mark.parametrize("checkpoints", [0, 1, 2, 5, 100])
@pytest.mark.parametrize(
    ("schedule", "predict"),
    [
        ("revolve", lambda n, s: Revolve(n, s).evaluations),
        ("uniform", lambda n, s: Uniform(n, s).evaluations),
        ("all", lambda n, s: StoreAll(n).evaluations),
    ],
)
def test_steps_run_as_often_as_predicted(schedule, predict, steps, checkpoints) -> None:
    assert count(schedule, steps, checkpoints) == predict(steps, checkpoints)


@pytest.mark.parametrize("steps", [1, 7, 61, 200])
@pytest.mark.parametrize("checkpoints", [0, 1, 5, 14])
def test_auto_runs_as_often_as_its_schedule_says(monkeypatch, steps, checkpoints) -> None:
    chosen = []
    choose = LoopOptions.choose

    def watched(self, measured, disk=None):
        chosen.append(choose(self, measured, disk))
        return chosen[-1]

    monkeypatch.setattr(LoopOptions, "choose", watched)
    calls = count("auto", steps, checkpoints)
    assert calls == chosen[0].evaluations
    assert len(chosen) == 1


def test_everything_can_be_recomputed_from_the_start() -> None:
    assert count("revolve", 10, 0) == 55  # 10 + 9 + … + 1


@pytest.mark.parametrize(
    ("budget", "schedule"),
    [
        *((budget, schedule) for budget in (10**6, "1MB", 1.0) for schedule in SCHEDULES),
        *((0.5, schedule) for schedule in ("auto", "revolve", "uniform")),
    ],
)
def test_a_budget_in_place_of_a_number(budget, schedule) -> None:
    found = remat.grad(rnn_model)(X, W, b, 30, memory_budget=budget, schedule=schedule)
    expected = autograd.elementwise_grad(plain_rnn)(X, W, b, 30)
    assert same_bits(found, expected)


def calls_within(budget) -> int:
    step = Counting()
    remat.grad(lambda x: np.sum(remat.checkpointed_loop(step, x, 200, memory_budget=budget)[0]))(
        np.ones(2000)
    )
    return step.calls


def test_a_larger_budget_means_less_work() -> None:
    assert calls_within("200KB") > calls_within("1MB") > calls_within("20MB") == 200


def test_the_whole_of_what_a_pass_would_hold_is_enough_to_hold_it() -> None:
    assert calls_within(1.0) == 200


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_budget_that_is_too_small_is_refused(schedule) -> None:
    with pytest.raises(remat.BudgetTooSmallError, match=r"needs|holds"):
        remat.grad(rnn_model)(X, W, b, 30, memory_budget=10, schedule=schedule)


# -- checkpoints -----------------------------------------------------------------------------------


def test_no_steps() -> None:
    final, checkpoints = remat.checkpointed_loop(Counting(), X, 0)
    assert same_bits(final, X)
    assert checkpoints == {}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_steps_have_the_gradient_of_the_identity(schedule) -> None:
    found = remat.grad(
        lambda x: np.sum(remat.checkpointed_loop(Counting(), x, 0, schedule=schedule)[0] ** 2)
    )(X)
    np.testing.assert_allclose(found, 2 * X)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 24, 25, 26, 1000])
def test_the_default_is_the_root_of_the_length(steps) -> None:
    _, checkpoints = remat.checkpointed_loop(np.sin, X, steps)
    assert len(checkpoints) == min(math.isqrt(steps), max(0, steps - 1))


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])
@pytest.mark.parametrize(("steps", "wanted"), [(20, 0), (20, 1), (20, 7), (20, 19), (1000, 31)])
def test_checkpoints_are_the_states_before_their_positions(schedule, steps, wanted) -> None:
    step = tanh_step(np, W, b)
    final, checkpoints = remat.checkpointed_loop(step, X, steps, wanted, schedule=schedule)
    states = plain_states(step, X, steps)
    assert same_bits(final, states[steps])
    assert len(checkpoints) == wanted
    assert 0 not in checkpoints
    for position, state in checkpoints.items():
        assert same_bits(state, states[position])


@pytest.mark.parametrize("schedule", ["revolve", "uniform"])
def test_checkpoints_inside_of_differentiation(schedule) -> None:
    seen = {}

    def loss(x):
        final, checkpoints = remat.checkpointed_loop(
            tanh_step(np, W, b), x, 30, 5, schedule=schedule
        )
        seen.update({p: np.array(s._value) for p, s in checkpoints.items()})
        return np.sum(final)

    remat.grad(loss)(X)
    assert len(seen) == 5
    states = plain_states(tanh_step(np, W, b), X, 30)
    for position, state in seen.items():
        assert same_bits(state, states[position])


@pytest.mark.parametrize("schedule", ["revolve", "uniform"])
def test_gradients_do_not_flow_through_checkpoints(schedule) -> None:
    def loss(x):
        final, checkpoints = remat.checkpointed_loop(np.sin, x, 30, 5, schedule=schedule)
        return np.sum(final) + np.sum(checkpoints[min(checkpoints)])

    with pytest.raises(remat.UnsupportedError, match="checkpointed_scan"):
        remat.grad(loss)(X)


def test_changing_a_checkpoint_does_not_change_the_gradient() -> None:
    def loss(x, spoil):
        final, checkpoints = remat.checkpointed_loop(np.sin, x, 30, 5, schedule="revolve")
        if spoil:
            for state in checkpoints.values():
                state *= 0.0  # noqa: PLW2901
        return np.sum(final)

    assert same_bits(remat.grad(loss)(X, spoil=True), remat.grad(loss)(X, spoil=False))


# -- nesting, several ways back --------------------------------------------------------------------


def nested(np_, inner_run, outer_run, W):
    def inner(x):
        return np_.tanh(x @ W)

    def outer(x):
        return inner_run(inner, x) * 1.1 + 0.1

    return lambda x: np_.sum(outer_run(outer, x))


def loop(steps, slots, **options):
    return lambda f, x: remat.checkpointed_loop(f, x, steps, slots, **options)[0]


def again(steps):
    return lambda f, x: plain_loop(f, x, steps)


@pytest.mark.parametrize("inner", SCHEDULES)
@pytest.mark.parametrize("outer", SCHEDULES)
def test_a_loop_inside_a_loop(inner, outer) -> None:
    def f(W, x):
        return nested(np, loop(5, 1, schedule=inner), loop(6, 2, schedule=outer), W)(x)

    def plain(W, x):
        return nested(anp, again(5), again(6), W)(x)

    found = remat.grad(f, wrt=(0, 1))(W, X)
    for i in range(2):
        np.testing.assert_allclose(found[i], autograd.grad(plain, i)(W, X), rtol=1e-12)


def test_a_segment_inside_a_loop_and_a_loop_inside_a_segment() -> None:
    segment = remat.checkpoint

    def f(W, x):
        return segment(nested(np, segment, loop(6, 2), W), x)

    def plain(W, x):
        return nested(anp, lambda f, x: f(x), again(6), W)(x)

    found = remat.grad(f, wrt=(0, 1))(W, X)
    for i in range(2):
        np.testing.assert_allclose(found[i], autograd.grad(plain, i)(W, X), rtol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_gradient_inside_a_step(schedule) -> None:
    """Its gradient is taken inside, nothing is differentiated twice."""

    def step(x):
        return x * 0.9 + remat.grad(lambda y: np.sum(np.cos(y)))(np.ones(4))

    found = remat.grad(
        lambda x: np.sum(remat.checkpointed_loop(step, x, 6, 2, schedule=schedule)[0])
    )(X)
    np.testing.assert_allclose(found, np.full(4, 0.9**6))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_second_derivatives_inside_a_step(schedule) -> None:
    """Descent whose energy depends on the state: the step itself differentiates twice."""

    def step(grad, np):
        return lambda x: x - 0.1 * grad(lambda y: np.sum(np.cos(y) * y))(x)

    found = remat.grad(
        lambda x: np.sum(
            remat.checkpointed_loop(step(remat.grad, np), x, 6, 2, schedule=schedule)[0]
        )
    )(X)
    expected = autograd.grad(lambda x: anp.sum(plain_loop(step(autograd.grad, anp), x, 6)))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_second_derivatives_through_a_loop_are_refused(schedule) -> None:
    def inner(x):
        return np.sum(remat.checkpointed_loop(np.sin, x, 6, 2, schedule=schedule)[0])

    with pytest.raises(remat.UnsupportedError, match="second derivatives"):
        remat.grad(lambda x: np.sum(remat.grad(inner)(x) ** 2))(X)


def test_second_derivatives_with_respect_to_what_is_closed_over_are_refused() -> None:
    def outer(w):
        def inner(x):
            return np.sum(remat.checkpointed_loop(lambda s: np.sin(s * w), x, 6, 2)[0])

        return np.sum(remat.grad(inner)(X))

    with pytest.raises(remat.UnsupportedError, match="second derivatives"):
        remat.grad(outer)(X + 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_jacobians(schedule) -> None:
    found = autograd.jacobian(
        lambda x: remat.checkpointed_loop(tanh_step(np, W, b), x, 9, 2, schedule=schedule)[0]
    )(X)
    expected = autograd.jacobian(lambda x: plain_rnn(x, W, b, 9))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pullback_may_be_called_again(schedule) -> None:
    pullback, _ = autograd.make_vjp(
        lambda x: remat.checkpointed_loop(np.sin, x, 9, 2, schedule=schedule)[0]
    )(X)
    first, second = pullback(np.ones(4)), pullback(np.ones(4))
    assert same_bits(first, second)
    assert same_bits(pullback(2 * np.ones(4)), 2 * first)


def test_two_loops_in_one_function() -> None:
    def f(np, run):
        return lambda x: np.sum(run(np.cos, run(np.sin, x)) * run(np.sin, x))

    found = remat.grad(f(np, loop(9, 2)))(X)
    assert np.allclose(found, autograd.grad(f(anp, again(9)))(X), rtol=1e-14, atol=0)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [-1, 2.5, "5", None, True, np.float64(3), [3]])
def test_a_length_that_is_no_whole_number(length) -> None:
    with pytest.raises((ValueError, TypeError), match="seq_length") as caught:
        remat.checkpointed_loop(np.sin, X, length)
    assert repr(length) in str(caught.value)


@pytest.mark.parametrize("checkpoints", [-1, 2.5, "5", True])
def test_a_number_of_checkpoints_that_is_no_whole_number(checkpoints) -> None:
    with pytest.raises((ValueError, TypeError), match="num_checkpoints") as caught:
        remat.checkpointed_loop(np.sin, X, 10, checkpoints)
    assert repr(checkpoints) in str(caught.value)


@pytest.mark.parametrize("length", [np.int64(5), np.int32(5), np.uint8(5)])
def test_whole_numbers_of_numpy(length) -> None:
    final, _ = remat.checkpointed_loop(np.sin, X, length, np.int64(2))
    assert same_bits(final, plain_loop(np.sin, X, 5))


def test_both_a_number_and_a_budget() -> None:
    with pytest.raises(ValueError, match="num_checkpoints=3 and memory_budget='1MB'"):
        remat.checkpointed_loop(np.sin, X, 10, 3, memory_budget="1MB")


@pytest.mark.parametrize("budget", [-5, 0.0, 1.5, "much", "-3KB", None.__class__])
def test_budgets_that_are_none(budget) -> None:
    with pytest.raises((ValueError, TypeError), match="budget"):
        remat.checkpointed_loop(np.sin, X, 10, memory_budget=budget)


@pytest.mark.parametrize("schedule", ["best", None, 3, "AUTO"])
def test_an_unknown_schedule(schedule) -> None:
    with pytest.raises((ValueError, TypeError), match="schedule") as caught:
        remat.checkpointed_loop(np.sin, X, 10, schedule=schedule)
    assert repr(schedule) in str(caught.value)


@pytest.mark.parametrize("func", [None, 3, "sin"])
def test_a_step_that_is_no_function(func) -> None:
    with pytest.raises(TypeError, match="func must be a function"):
        remat.checkpointed_loop(func, X, 10)


@pytest.mark.parametrize("state", [3, None, "text", (), {}, (1, True), [None]])
def test_a_state_without_arrays(state) -> None:
    with pytest.raises(TypeError, match="no array"):
        remat.checkpointed_loop(lambda s: s, state, 10)


@pytest.mark.parametrize(
    "state", [np.array([object()]), np.ma.masked_array([1.0]), np.array([1.0, "a"], dtype=object)]
)
def test_a_state_of_another_kind_of_array(state) -> None:
    with pytest.raises(TypeError, match="array of"):
        remat.checkpointed_loop(lambda s: s, state, 10)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "step",
    [lambda s: (s, s), lambda s: [s], lambda s: None, lambda s: {"a": s}],
    ids=["tuple", "list", "None", "dict"],
)
def test_a_step_that_returns_another_structure(step, schedule, traced) -> None:
    def run(x):
        return remat.checkpointed_loop(step, x, 5, 1, schedule=schedule)[0]

    with pytest.raises(TypeError, match="step 0 returned"):
        (remat.grad(run) if traced else run)(X)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_structure_that_changes_on_the_way(schedule) -> None:
    def step(s):
        return (s["x"], s["k"] + 1) if s["k"] == 3 else {"x": s["x"], "k": s["k"] + 1}

    with pytest.raises(TypeError, match="step 3 returned"):
        remat.checkpointed_loop(step, {"x": X, "k": 0}, 6, 2, schedule=schedule)


# -- progress --------------------------------------------------------------------------------------


def test_the_progress_bar_shows_three_counts(capfd, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    remat.grad(
        lambda x: np.sum(
            remat.checkpointed_loop(np.sin, x, 30, 3, schedule="revolve", progress=True)[0]
        )
    )(X)
    shown = capfd.readouterr()
    assert shown.out == ""
    last = {
        name: [line for line in shown.err.splitlines() if name in line][-1]
        for name in ("forward", "recompute", "backward")
    }
    assert "30/30" in last["forward"]
    assert "30/30" in last["backward"]
    assert f"{Revolve(30, 3).evaluations - 30}/" in last["recompute"]


def test_a_progress_bar_without_differentiation(capfd) -> None:
    remat.checkpointed_loop(np.sin, X, 30, 3, progress=True)
    assert "30/30" in capfd.readouterr().err


def test_progress_bars_may_nest(capfd) -> None:
    def outer(x):
        return remat.checkpointed_loop(np.sin, x, 3, 1, progress=True)[0]

    found = remat.grad(lambda x: np.sum(remat.checkpointed_loop(outer, x, 3, 1, progress=True)[0]))(
        X
    )
    expected = autograd.grad(lambda x: anp.sum(plain_loop(anp.sin, x, 9)))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    capfd.readouterr()
