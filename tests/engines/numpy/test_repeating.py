"""A step that does not repeat itself is caught; ordinary randomness is replayed."""

# ruff: noqa: PLW0603  (globals are what is tested)

from __future__ import annotations

import collections
import itertools
import random
import sys
import time
import types

import numpy as np
import pytest
from autograd.core import make_vjp

import remat
from remat import schedules

from .oracles import plain_loop, same_bits

SCHEDULES = ["auto", "revolve", "uniform", "all"]
RERUN = ["auto", "revolve", "uniform"]
X = np.array([1.0, -0.4, 0.7])

# -- caught ----------------------------------------------------------------------------------------

_global_count = 0


def restart_global_count():
    global _global_count
    _global_count = 0


def counter_in_a_list():
    count = [0]

    def step(x):
        count[0] += 1
        return x * (1.0 + 0.1 * count[0])

    return step


def counter_by_nonlocal():
    count = 0

    def step(x):
        nonlocal count
        count += 1
        return x * (1.0 + 0.1 * count)

    return step


def counter_by_global():
    def step(x):
        global _global_count
        _global_count += 1
        return x * (1.0 + 0.1 * _global_count)

    return step


def counter_by_itertools():
    count = itertools.count()
    return lambda x: x * (1.0 + 0.1 * next(count))


def counter_by_attribute():
    class Step:
        count = 0

        def __call__(self, x):
            self.count += 1
            return x + self.count

    return Step()


def clock():
    return lambda x: x * (1.0 + 1e-9 * time.perf_counter_ns())


def changed_closure():
    factor = np.ones(3)

    def step(x):
        factor[:] *= 1.1
        return x * factor

    return step


def hidden_generator():
    def draws():
        rng = np.random.default_rng(0)
        while True:
            yield rng.normal()

    numbers = draws()
    return lambda x: x * next(numbers)


def operating_system():
    source = random.SystemRandom()
    draw = source.random
    return lambda x: x * draw()


CHANGING = [
    counter_in_a_list,
    counter_by_nonlocal,
    counter_by_global,
    counter_by_itertools,
    counter_by_attribute,
    clock,
    changed_closure,
    hidden_generator,
    operating_system,
]


@pytest.mark.parametrize("build", CHANGING)
@pytest.mark.parametrize("schedule", RERUN)
def test_a_step_that_changes_is_caught(build, schedule) -> None:
    step = build()
    with pytest.raises(remat.RecomputeMismatchError) as caught:
        remat.grad(lambda x: np.sum(remat.checkpointed_loop(step, x, 10, 2, schedule=schedule)[0]))(
            X
        )
    text = str(caught.value)
    assert "steps" in text
    assert "Likely causes" in text
    assert "counter" in text
    assert "random" in text


@pytest.mark.parametrize("build", CHANGING)
def test_a_while_loop_whose_step_changes_is_caught(build) -> None:
    step = build()
    asked = itertools.count()
    with pytest.raises(remat.RecomputeMismatchError):
        remat.grad(
            lambda x: np.sum(remat.checkpointed_while(lambda x: next(asked) < 10, step, x, 2)[0])
        )(X)


@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("build", CHANGING)
def test_a_segment_that_changes_runs_once(build, rows) -> None:
    """Each function is x * factor or x + count: the gradient belongs to the call that was made."""
    changing = build()
    changing(X)
    function, calls = counted(changing)
    x = np.tile(X, (rows, 1))
    value, gradient = remat.value_and_grad(lambda x: np.sum(remat.checkpoint(function, x)))(x)
    assert calls == [1]
    if build is counter_by_attribute:
        np.testing.assert_array_equal(gradient, 1.0)
        np.testing.assert_allclose(value, np.sum(x + 2))
    else:
        assert np.all(gradient != 1.0)
        np.testing.assert_allclose(value, np.sum(x * gradient), rtol=1e-13)


@pytest.mark.parametrize("build", [counter_in_a_list, counter_by_nonlocal, counter_by_attribute])
def test_a_step_that_is_run_once_may_change(build) -> None:
    found = remat.grad(lambda x: np.sum(remat.checkpointed_loop(build(), x, 6, schedule="all")[0]))(
        X
    )
    expected = remat.grad(lambda x: np.sum(plain_loop(build(), x, 6)))(X)
    assert same_bits(found, expected)


def test_the_mismatch_names_steps_leaves_and_sizes() -> None:
    step = counter_in_a_list()

    def both(state):
        return {"still": state["still"], "moves": step(state["moves"])}

    with pytest.raises(
        remat.RecomputeMismatchError, match=r"steps \d+ to \d+ .*\['moves'\].*3 of 3"
    ):
        remat.grad(
            lambda x: np.sum(
                remat.checkpointed_loop(both, {"still": x, "moves": x}, 10, 2)[0]["moves"]
            )
        )(X)


def test_a_change_of_one_bit_is_caught() -> None:
    count = [0]

    def step(x):
        count[0] += 1
        return np.nextafter(x, 2.0) if count[0] == 7 else x * 1.0

    def traceable(x):
        count[0] += 1
        return x * (1.0 + np.finfo(float).eps * (count[0] == 12))

    with pytest.raises(remat.RecomputeMismatchError):
        remat.grad(
            lambda x: np.sum(remat.checkpointed_loop(traceable, x, 10, 1, schedule="revolve")[0])
        )(X)


def test_a_segment_whose_result_is_permuted_from_call_to_call_runs_once() -> None:
    count = [0]
    weights = np.random.default_rng(0).normal(size=(64, 64))

    def shuffled(x):
        count[0] += 1
        return x * np.roll(np.eye(64), count[0], axis=0)

    found = remat.grad(lambda x: np.sum(remat.checkpoint(shuffled, x) * weights))(2.0)
    np.testing.assert_allclose(found, np.sum(np.roll(np.eye(64), 1, axis=0) * weights))


@pytest.mark.parametrize("size", [3, 3000, 30_000])
def test_a_plain_input_of_a_segment_that_changes_is_a_copy_or_caught(size) -> None:
    mask, x = np.ones(size), np.resize(X, size)

    def loss(x):
        y = remat.checkpoint(lambda x, mask: np.sin(x) * mask, x, mask)
        mask[:] = 2.0
        return np.sum(y)

    if mask.nbytes > 64 * 1024:
        with pytest.raises(remat.ModifiedInputError, match="multiply"):
            remat.grad(loss)(x)
    else:
        np.testing.assert_allclose(remat.grad(loss)(x), np.cos(x))


# -- zeros: values agree (0 * anything), slopes do not ---------------------------------------------

ZEROS = np.zeros(3)
_global_counts = {"steps": 0}


class Counts:
    fresh = 0  # the first step makes an attribute of the object of it

    def __init__(self):
        self.calls = [0]
        self.slope = 1.0

    def fresh_attribute(self, x):
        self.fresh += 1
        return x * self.fresh

    def deep(self, x):
        self.calls[0] += 1
        return x * self.calls[0]

    def __call__(self, x):
        self.slope *= 1.5
        return x * self.slope


def counter_by_function_attribute():
    def step(x):
        step.count = getattr(step, "count", 0) + 1
        return x * step.count

    return step


def counter_in_a_global_dict():
    def step(x):
        _global_counts["steps"] += 1
        return x * _global_counts["steps"]

    return step


def counter_in_a_counter():
    counts = collections.Counter()

    def step(x):
        counts["steps"] += 1
        return x * counts["steps"]

    return step


def counter_in_an_inner_function():
    inner = counter_in_a_list()
    return lambda x: inner(x)  # noqa: PLW0108


def counter_in_a_tuple():
    pair = (0, 1)

    def step(x):
        nonlocal pair
        pair = (pair[1], sum(pair))
        return x * pair[1]

    return step


def counter_of_numpy():
    count = np.int64(0)

    def step(x):
        nonlocal count
        count += 1
        return x * count

    return step


def counter_that_empties_a_list():
    factors = list(range(1, 100))
    return lambda x: x * factors.pop()


def switch():
    on = False

    def step(x):
        nonlocal on
        on = not on
        return x * (2.0 if on else 3.0)

    return step


HIDDEN_BY_ZEROS = {
    r"count\[0\]": counter_in_a_list,
    "count,": counter_by_nonlocal,
    "_global_count,": counter_by_global,
    r"_global_counts\['steps'\]": counter_in_a_global_dict,
    r"Counts\.slope": Counts,
    r"Counts\.fresh": lambda: Counts().fresh_attribute,
    r"Counts\.calls\[0\]": lambda: Counts().deep,
    r"step\.count": counter_by_function_attribute,
    r"counts\['steps'\]": counter_in_a_counter,
    r"\bcount\[0\], a number": counter_in_an_inner_function,
    "pair,": counter_in_a_tuple,
    r"count, .* then (np\.int64\(1\)|1)\.": counter_of_numpy,
    r"factors\[98\], .* was 99 and then gone": counter_that_empties_a_list,
    "on, .* was False and then True": switch,
}


@pytest.mark.parametrize("name", HIDDEN_BY_ZEROS)
@pytest.mark.parametrize("schedule", RERUN)
def test_a_counter_is_caught_when_the_state_is_zero(name, schedule) -> None:
    """The document starts from zeros: x * counter is 0 every time, its slope is not."""
    step = HIDDEN_BY_ZEROS[name]()
    with pytest.raises(remat.RecomputeMismatchError, match=rf"step \d .*{name}.*schedule=\"all\""):
        remat.grad(lambda x: np.sum(remat.checkpointed_loop(step, x, 6, 1, schedule=schedule)[0]))(
            ZEROS
        )


@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("name", HIDDEN_BY_ZEROS)
def test_a_counter_in_a_segment_has_the_slope_of_its_only_call(name, rows) -> None:
    x = np.zeros((rows, 3))
    _global_counts["steps"] = 0
    restart_global_count()
    slope = HIDDEN_BY_ZEROS[name]()(np.ones(()))  # of x * factor
    _global_counts["steps"] = 0
    restart_global_count()
    function = HIDDEN_BY_ZEROS[name]()
    found = remat.grad(lambda x: np.sum(remat.checkpoint(function, x)))(x)
    np.testing.assert_array_equal(found, np.full((rows, 3), slope))


def test_a_counter_in_a_while_loop_is_caught_when_the_state_is_zero() -> None:
    asked = itertools.count()
    step = counter_in_a_list()
    with pytest.raises(remat.RecomputeMismatchError, match=r"count\[0\]"):
        remat.grad(
            lambda x: np.sum(remat.checkpointed_while(lambda x: next(asked) < 6, step, x, 2)[0])
        )(ZEROS)


def test_a_number_that_other_code_changes_between_the_passes_is_caught() -> None:
    scale = 2.0

    def loss(x):
        nonlocal scale
        y, _ = remat.checkpointed_loop(lambda x: x * scale, x, 6, 1, schedule="revolve")
        scale = 3.0
        return np.sum(y)

    with pytest.raises(remat.RecomputeMismatchError, match=r"scale, .* was 2\.0 and then 3\.0"):
        remat.grad(loss)(ZEROS)


def test_one_leaf_of_zeros_is_enough_to_hide_a_counter() -> None:
    count = [0]

    def step(state):
        x, (v, i) = state
        count[0] += 1
        return np.sin(x), (v * count[0], i + 1)

    def loss(v):
        _, (v, _) = remat.checkpointed_loop(step, (X, (v, 0)), 6, 1, schedule="revolve")[0]
        return np.sum(v)

    with pytest.raises(remat.RecomputeMismatchError, match=r"count\[0\]"):
        remat.grad(loss)(ZEROS)


def affine_counter():
    count = [0]

    def step(x):
        count[0] += 1
        return x * count[0] + 1.0

    return step


def test_a_start_from_zeros_hides_a_counter_though_it_leads_elsewhere() -> None:
    """Of two steps only the first is run again, and its result is 1 whatever the slope is."""
    with pytest.raises(remat.RecomputeMismatchError, match=r"step 0 .*count"):
        remat.grad(
            lambda x: np.sum(
                remat.checkpointed_loop(affine_counter(), x, 2, 1, schedule="uniform")[0]
            )
        )(ZEROS)


def test_a_second_way_back_runs_every_step_again() -> None:
    step = counter_in_a_list()
    vjp, _ = make_vjp(lambda x: remat.checkpointed_loop(step, x, 6, schedule="all")[0], ZEROS)
    expected = np.prod(1.0 + 0.1 * np.arange(1, 7))
    np.testing.assert_allclose(vjp(np.ones(3)), expected)
    with pytest.raises(remat.RecomputeMismatchError, match=r"count\[0\]"):
        vjp(np.ones(3))


def counted(function):
    """Count calls, and do no harm with it."""
    calls = [0]

    def step(*args):
        calls[0] += 1
        return function(*args)

    return step, calls


@pytest.mark.parametrize(
    ("schedule", "evaluations"),
    [
        ("revolve", schedules.Revolve(9, 2).evaluations),
        ("uniform", schedules.Uniform(9, 2).evaluations),
        ("all", 9),
    ],
)
def test_counting_calls_is_fine_and_changes_no_count(schedule, evaluations) -> None:
    step, calls = counted(np.sin)
    found = remat.grad(
        lambda x: np.sum(remat.checkpointed_loop(step, x, 9, 2, schedule=schedule)[0])
    )(X)
    assert same_bits(found, remat.grad(lambda x: np.sum(plain_loop(np.sin, x, 9)))(X))
    assert calls == [evaluations]


def test_counting_calls_is_fine_in_a_segment_with_a_bias_of_zeros() -> None:
    layer, calls = counted(lambda x, b: np.sin(x) + b)
    _, found = remat.grad(lambda x, b: np.sum(remat.checkpoint(layer, x, b) ** 2), wrt=(0, 1))(
        X, ZEROS
    )
    np.testing.assert_allclose(found, 2 * np.sin(X))
    assert calls == [1]


def test_counting_calls_is_fine_from_a_constant_state_of_zeros() -> None:
    """Nobody asks for the slope at the zeros; the states after them are compared."""
    step, calls = counted(lambda h, w: np.tanh(h * w + w))

    def loss(run):
        return lambda w: np.sum(run(lambda h: step(h, w), ZEROS))

    found = remat.grad(loss(lambda f, h: remat.checkpointed_loop(f, h, 9, 2)[0]))(X)
    assert calls[0] > 9
    assert same_bits(found, remat.grad(loss(lambda f, h: plain_loop(f, h, 9)))(X))


def test_counting_calls_is_fine_from_rest() -> None:
    step, _ = counted(lambda state: (state[0] + 0.1 * state[1], state[1] - 0.1 * state[0]))

    def loss(run):
        return lambda x: np.sum(run(step, (x, 0.0 * x))[0])

    found = remat.grad(loss(lambda f, s: remat.checkpointed_loop(f, s, 9, 2)[0]))(X)
    assert same_bits(found, remat.grad(loss(lambda f, s: plain_loop(f, s, 9)))(X))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_zeros_and_numbers_that_stay_are_fine(schedule) -> None:
    memo, numbers = {}, [0.5, float("nan")]

    def step(x):
        return x * memo.setdefault("factor", numbers[0] + 1.0)

    found = remat.grad(
        lambda x: np.sum(remat.checkpointed_loop(step, x, 6, 1, schedule=schedule)[0])
    )(ZEROS)
    np.testing.assert_allclose(found, 1.5**6)


# -- replayed --------------------------------------------------------------------------------------

module_level = np.random.default_rng(0)
module_level_state = np.random.RandomState(0)
module_level_python = random.Random(0)


def reseed() -> None:
    global module_level
    random.seed(1)
    np.random.seed(2)
    module_level = np.random.default_rng(3)
    module_level_state.seed(4)
    module_level_python.seed(5)


def moments():
    return repr(
        (
            random.getstate(),
            np.random.get_state(legacy=False),
            module_level.bit_generator.state,
            module_level_state.get_state(legacy=False),
            module_level_python.getstate(),
        )
    )


def closed_over():
    rng = np.random.default_rng(7)
    return lambda x: x * rng.normal(size=3)


def closed_over_method():
    normal = np.random.default_rng(7).normal
    return lambda x: x * normal(size=3)


def closed_over_bits():
    bits = np.random.PCG64(7)
    return lambda x: x * np.random.Generator(bits).normal(size=3)


def in_an_object():
    class Noise:
        def __init__(self):
            self.rng = np.random.default_rng(7)

        def __call__(self, x):
            return x * self.rng.normal(size=3)

    return Noise()


def in_a_dict():
    box = {"rngs": [np.random.default_rng(7), random.Random(3)]}
    return lambda x: x * box["rngs"][0].normal(size=3) * box["rngs"][1].random()


def now_and_then():
    """Draws only for some of the states."""
    rng = np.random.default_rng(7)
    return lambda x: x * rng.normal(size=3) if np.sum(x) > 0 else x + 1.0


def gaussian_pairs():
    """A state with one number in stock: normal() of RandomState and gauss() make two at a time."""
    return lambda x: x * np.random.normal() + random.gauss(0, 1)


DRAWS = {
    "np.random": lambda: lambda x: x * np.random.randn(3),
    "np.random permutation": lambda: lambda x: x[np.random.permutation(3)] * 1.1,
    "random": lambda: lambda x: x * random.uniform(0, 2),
    "both": lambda: lambda x: x * random.random() + np.random.rand(3),
    "gaussian pairs": gaussian_pairs,
    "module level": lambda: lambda x: x * module_level.normal(size=3),
    "module level RandomState": lambda: lambda x: x * module_level_state.normal(size=3),
    "module level random": lambda: lambda x: x * module_level_python.random(),
    "closed over": closed_over,
    "closed over method": closed_over_method,
    "closed over bits": closed_over_bits,
    "in an object": in_an_object,
    "in a dict": in_a_dict,
    "now and then": now_and_then,
    "dropout": lambda: lambda x: np.sin(x) * (np.random.rand(3) > 0.3) + 0.1,
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_numbers_are_replayed_in_a_loop(name, schedule) -> None:
    def run(step, x):
        return remat.checkpointed_loop(step, x, 9, 2, schedule=schedule)[0]

    reseed()
    expected = remat.value_and_grad(lambda x: np.sum(plain_loop(DRAWS[name](), x, 9)))(X)
    after = moments()
    reseed()
    found = remat.value_and_grad(lambda x: np.sum(run(DRAWS[name](), x)))(X)
    assert moments() == after
    assert found[0] == expected[0]
    assert same_bits(found[1], expected[1])


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_replayed_in_a_segment(name) -> None:
    def twice(run):
        return lambda x: np.sum(plain_loop(lambda x: run(DRAWS[name](), x), x, 3))

    reseed()
    expected = remat.value_and_grad(twice(lambda f, x: f(x)))(X)
    after = moments()
    reseed()
    found = remat.value_and_grad(twice(remat.checkpoint))(X)
    assert moments() == after
    assert found[0] == expected[0]
    assert same_bits(found[1], expected[1])


@pytest.mark.parametrize("name", DRAWS)
def test_without_differentiation_random_numbers_go_on(name) -> None:
    reseed()
    expected = plain_loop(DRAWS[name](), X, 9)
    after = moments()
    reseed()
    final, _ = remat.checkpointed_loop(DRAWS[name](), X, 9, 2)
    assert moments() == after
    assert same_bits(final, expected)


def test_random_numbers_in_a_scan() -> None:
    def func(s, x):
        s = s * np.random.randn(3) + x
        return s, s * np.random.randn(3)

    def plain(s):
        total = 0.0
        for x in np.ones(8):
            s, y = func(s, x)
            total = total + np.sum(y)
        return total

    reseed()
    expected = remat.grad(plain)(X)
    reseed()
    found = remat.grad(lambda s: np.sum(remat.checkpointed_scan(func, s, np.ones(8), 2)[1]))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_random_numbers_in_a_loop_inside_a_loop() -> None:
    def inner(x):
        return x * np.random.randn(3)

    def f(run):
        return lambda x: np.sum(run(lambda x: run(inner, x), x))

    reseed()
    expected = remat.grad(f(lambda g, x: plain_loop(g, x, 4)))(X)
    reseed()
    found = remat.grad(f(lambda g, x: remat.checkpointed_loop(g, x, 4, 1)[0]))(X)
    assert same_bits(found, expected)


def test_numbers_drawn_between_forward_and_backward_do_not_matter() -> None:
    def loss(x):
        y, _ = remat.checkpointed_loop(lambda x: x * np.random.randn(3), x, 6, 1)
        np.random.randn(5)
        return np.sum(y)

    def plain(x):
        return np.sum(plain_loop(lambda x: x * np.random.randn(3), x, 6))

    reseed()
    expected = remat.grad(plain)(X)
    reseed()
    assert same_bits(remat.grad(loss)(X), expected)


def test_a_segment_draws_once_also_without_preserved_randomness() -> None:
    np.random.seed(3)
    found = remat.grad(
        lambda x: np.sum(
            remat.checkpoint(lambda x: x * np.random.randn(3), x, preserve_rng_state=False)
        )
    )(X)
    after = np.random.rand()
    np.random.seed(3)
    np.testing.assert_array_equal(found, np.random.randn(3))
    assert after == np.random.rand()


class UsesModuleLevel:
    shared = np.random.default_rng(0)

    def __call__(self, x):
        return x * module_level.normal(size=3)

    def from_the_class(self, x):
        return x * self.shared.normal(size=3)


other_module = types.ModuleType("remat_test_other_module")
other_module.rng = np.random.default_rng(0)
sys.modules[other_module.__name__] = other_module


def calls(function):
    return lambda x: function(x) * 1.0


def forgotten_places():
    draw = random.Random(0).random
    return {
        "a built-in method of a generator": lambda x: x * draw(),
        "module level, in a method": UsesModuleLevel(),
        "module level, in a method that the step calls": calls(UsesModuleLevel()),
        "class attribute": UsesModuleLevel().from_the_class,
        "another module": lambda x: x * other_module.rng.normal(size=3),
    }


@pytest.mark.parametrize("name", forgotten_places())
def test_more_places_of_generators(name) -> None:
    def start() -> None:
        reseed()
        UsesModuleLevel.shared = np.random.default_rng(0)
        other_module.rng = np.random.default_rng(0)

    start()
    step = forgotten_places()[name]
    expected = remat.grad(lambda x: np.sum(plain_loop(step, x, 6)))(X)
    start()
    step = forgotten_places()[name]
    found = remat.grad(lambda x: np.sum(remat.checkpointed_loop(step, x, 6, 1)[0]))(X)
    assert same_bits(found, expected)
