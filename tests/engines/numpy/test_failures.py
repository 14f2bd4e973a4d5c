"""Steps that raise, and interruptions: the exception comes out as it is, nothing is left behind."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
from autograd.tracer import isbox, trace_stack

import remat
from remat.schedules import Revolve

from .oracles import plain_loop, same_bits

SCHEDULES = ["auto", "revolve", "uniform", "all"]
W = np.array([0.5, 0.7])
X = np.array([1.0, -0.4])


class Boom(Exception):
    pass


class Bomb:
    """A step that raises at one of its calls."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at = at
        self.error = error
        self.calls = 0
        self.w = W

    def __call__(self, x):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return np.tanh(x * self.w)


def run(step, x, schedule="revolve"):
    return np.sum(remat.checkpointed_loop(step, x, 8, 2, schedule=schedule)[0])


def loss(step, schedule):
    def f(w, x):
        step.w = w
        return run(step, x, schedule)

    return f


def total_calls(schedule: str) -> int:
    step = Bomb(-1, Boom())
    remat.grad(loss(step, schedule), wrt=(0, 1))(W, X)
    return step.calls


def assert_clean() -> None:
    assert trace_stack.top == -1
    assert not tracemalloc.is_tracing()


CALLS = [
    (schedule, at) for schedule in SCHEDULES for at in range(1, total_calls(schedule) + 1)
]  # every evaluation: sweep, recompute, taped run
EXPECTED = remat.grad(lambda w, x: np.sum(plain_loop(lambda x: np.tanh(x * w), x, 8)), wrt=(0, 1))(
    W, X
)


@pytest.mark.parametrize(("schedule", "at"), CALLS)
def test_an_exception_comes_out_as_it_is_with_the_step(schedule, at) -> None:
    error = Boom("mine")
    step = Bomb(at, error)
    with pytest.raises(Boom) as caught:
        remat.grad(loss(step, schedule), wrt=(0, 1))(W, X)
    assert caught.value is error
    assert caught.value.args == ("mine",)
    assert len(error.__notes__) == 1
    assert "step" in error.__notes__[0]
    assert_clean()


def test_the_note_names_the_step_that_raised() -> None:
    for k in range(5):
        error = Boom()

        def step(state, k=k, error=error):
            x, i = state
            if i[0] == k:
                raise error
            return x, i + 1

        with pytest.raises(Boom):
            remat.checkpointed_loop(step, (X, np.zeros(1)), 5)
        assert f"step {k} " in error.__notes__[0]


@pytest.mark.parametrize(("schedule", "at"), CALLS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Boom])
def test_an_interruption_leaves_nothing_behind(schedule, at, kind) -> None:
    step = Bomb(at, kind())
    with pytest.raises(kind):
        remat.grad(loss(step, schedule), wrt=(0, 1))(W, X)
    assert_clean()
    # What stands in the closure is what the user's function put there, and the next call works.
    assert isbox(step.w)
    found = remat.grad(loss(step, schedule), wrt=(0, 1))(W, X)
    for one, other in zip(found, EXPECTED, strict=True):
        assert same_bits(one, other)
    assert_clean()


@pytest.mark.parametrize(("schedule", "at"), CALLS)
def test_an_interruption_leaves_plain_closures_as_they_were(schedule, at) -> None:
    box = [W]
    bomb = Bomb(at, KeyboardInterrupt())

    def step(x):
        return bomb(x) * box[0]

    with pytest.raises(KeyboardInterrupt):
        remat.grad(lambda x: run(step, x, schedule))(X)
    assert box[0] is W
    assert bomb.w is W
    assert_clean()


@pytest.mark.parametrize("at", range(1, Revolve(8, 2).evaluations + 1))
def test_an_interruption_does_not_rewind_random_numbers_of_others(at) -> None:
    """Whatever the replay did to the sources, an interruption on the way back restores them."""
    random.seed(3)
    np.random.seed(3)
    step = Bomb(at, KeyboardInterrupt())

    def noisy(x):
        np.random.rand()
        return step(x)

    moments = []

    def f(x):
        y = run(noisy, x)
        moments.append(np.random.get_state()[2])
        return y

    with pytest.raises(KeyboardInterrupt):
        remat.grad(f)(X)
    if moments:  # it was interrupted on the way back
        assert np.random.get_state()[2] == moments[0]


@pytest.mark.parametrize("at", [1, 2])
def test_an_exception_in_a_segment(at) -> None:
    error = Boom()
    step = Bomb(at, error)

    def f(w):
        step.w = w
        return np.sum(remat.checkpoint(step, remat.checkpoint(step, X)))

    with pytest.raises(Boom) as caught:
        remat.grad(f)(W)
    assert caught.value is error
    assert_clean()


@pytest.mark.parametrize("at", range(1, 8))
def test_an_exception_in_a_while_loop_or_its_condition(at) -> None:
    error = Boom()
    step = Bomb(at, error)
    asked = []

    def cond(x):
        asked.append(1)
        return len(asked) < 5

    def f(w):
        step.w = w
        return np.sum(remat.checkpointed_while(cond, step, X, 1)[0])

    with pytest.raises(Boom) as caught:
        remat.grad(f)(W)
    assert caught.value is error
    assert_clean()


def test_an_exception_in_the_function_that_is_differentiated() -> None:
    def f(x):
        raise Boom

    with pytest.raises(Boom):
        remat.grad(f)(X)
    assert_clean()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tracing_of_memory_that_was_on_stays_on(schedule) -> None:
    tracemalloc.start()
    try:
        remat.grad(lambda x: run(np.tanh, x, schedule))(X)
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_an_error_with_a_progress_bar_puts_the_bar_away(capfd) -> None:
    step = Bomb(4, Boom())
    with pytest.raises(Boom):
        remat.checkpointed_loop(step, X, 8, 2, progress=True)
    capfd.readouterr()
    remat.checkpointed_loop(step, X, 8, 2, progress=True)
    assert "8/8" in capfd.readouterr().err


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pullback_that_failed_can_be_called_again(schedule) -> None:
    import autograd  # noqa: PLC0415

    step = Bomb(-1, Boom())
    pullback, _ = autograd.make_vjp(
        lambda x: remat.checkpointed_loop(step, x, 8, 2, schedule=schedule)[0]
    )(X)
    if schedule != "all":  # nothing is run on the way back of that one
        step.at = step.calls + 2
        with pytest.raises(Boom):
            pullback(np.ones(2))
    again = pullback(np.ones(2))
    expected = remat.grad(lambda x: plain_loop(lambda x: np.tanh(x * W), x, 8))(X)
    assert same_bits(again, expected)
