"""Checkpoints that are rounded: what can still be compared is compared, and nothing else."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given

import remat
from remat.loops import LoopRun
from remat.schedules import Revolve, Save, Tier, Uniform
from remat.schedules.online import OnlineRun

from ..schedules.strategies import Limited, any_schedule, thorough
from .both import both

SCHEDULES = ["auto", "revolve", "uniform"]


class Scrambled:
    """StepOperations over (step, number) whose numbers are scrambled by every step."""

    records_runs = False

    def __init__(self, spoil: int | None = None) -> None:
        self.runs: list[int] = []
        self.spoil = spoil  # the run whose result is another one

    def _step(self, held):
        step, number = held
        self.runs.append(step)
        return step + 1, (
            number * 48271 + 11 + 10**6 * (len(self.runs) - 1 == self.spoil)
        ) % 2147483647

    def advance(self, state, start, stop):
        for _ in range(start, stop):
            state = self._step(state)
        return state

    def hold(self, state):
        return state

    hold_final = resume = hold

    def record(self, held, start, stop):
        assert held[0] == start
        return held, self._step(held)

    def backward_steps(self, tape, gradient, start, stop):
        return gradient + 1

    def difference(self, one, other):
        return None if one == other else f"{one} is not {other}"

    def split(self, held):
        return [held[1]], held[0]

    def join(self, leaves, rest):
        return rest, leaves[0]

    def compare_outputs(self, wanted):
        pass


class Rounding:
    """A shelf that forgets the last digits."""

    exact, in_memory, error, nbytes = False, True, 0.0, 0

    def __init__(self) -> None:
        self.held = {}

    def put(self, key, leaves):
        self.held[key] = self.as_stored(leaves)

    def as_stored(self, leaves):
        return [leaf // 1000 * 1000 for leaf in leaves]

    def get(self, key):
        return self.held[key]

    def drop(self, key):
        del self.held[key]

    def close(self):
        self.held.clear()


class OpaqueRounding:
    """The same without a way to say what would come back."""

    exact, in_memory, error, nbytes = False, True, 0.0, 0

    def __init__(self) -> None:
        self.shelf = Rounding()
        self.put, self.get, self.drop = self.shelf.put, self.shelf.get, self.shelf.drop
        self.close = self.shelf.close


def run_through(schedule, operations):
    run = LoopRun(operations, (0, 12345), schedule.steps, stores={Tier.MEMORY: Rounding()})
    run.forward(schedule)
    assert run.backward(0) == schedule.steps


@given(any_schedule)
@thorough
def test_steps_that_repeat_themselves_are_never_refused(drawn: Limited) -> None:
    run_through(drawn.schedule, Scrambled())


@given(any_schedule, st.data())
@thorough
def test_a_spoiled_run_of_the_first_segment_is_caught(drawn: Limited, data) -> None:
    """Up to the first rounded checkpoint every step that runs twice starts from the same state."""
    # (The final state of its first sweep is compared by `backward`, if that gets it.)
    assume(not isinstance(drawn.schedule, OnlineRun))
    operations = Scrambled()
    run_through(drawn.schedule, operations)
    count = {step: operations.runs.count(step) for step in operations.runs}
    exact = first_checkpoint(drawn.schedule)
    spoilable = [i for i, step in enumerate(operations.runs) if step < exact and count[step] > 1]
    if not spoilable:
        return
    with pytest.raises(remat.RecomputeMismatchError):
        run_through(drawn.schedule, Scrambled(data.draw(st.sampled_from(spoilable))))


def first_checkpoint(schedule) -> int:
    """Return where the first state is saved, in the whole pass."""
    saved = [action.step for action in schedule if isinstance(action, Save)]
    return min(saved, default=schedule.steps)


@pytest.mark.parametrize("schedule", [Revolve(9, 2), Uniform(9, 3)], ids=repr)
def test_the_error_names_the_steps(schedule) -> None:
    with pytest.raises(remat.RecomputeMismatchError, match=r"steps 0 to \d"):
        run_through(schedule, Scrambled(spoil=0))


@pytest.mark.parametrize("schedule", [Revolve(9, 2), Uniform(9, 3)], ids=repr)
def test_a_store_that_cannot_say_what_it_rounds_to_is_compared_less(schedule) -> None:
    def run(spoil):
        operations = Scrambled(spoil)
        shelves = {Tier.MEMORY: OpaqueRounding()}
        loop = LoopRun(operations, (0, 12345), schedule.steps, stores=shelves)
        loop.forward(schedule)
        assert loop.backward(0) == schedule.steps

    run(None)
    run(0)  # step 0 is compared with a rounded checkpoint only


# -- on the engines --------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("store", ["bfloat16", "float16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoints", [0, 1, 3])
def test_a_step_that_counts_is_refused(on, schedule, store, checkpoints) -> None:
    calls = [0]

    def step(x):
        calls[0] += 1
        return x * 1.01 ** calls[0]

    def run(x):
        options = {"schedule": schedule, "store": store}
        return on.sum(remat.checkpointed_loop(step, x, 12, checkpoints, **options)[0])

    with pytest.raises(remat.RecomputeMismatchError):
        on.value_and_grad(run, [1.0, 2.0])


@both
@pytest.mark.parametrize("store", ["bfloat16", "float16"])
def test_a_while_loop_with_a_step_that_counts_is_refused(on, store) -> None:
    calls = [0]

    def step(x):
        calls[0] += 1
        return x * 1.01 ** calls[0]

    def run(x):
        condition = lambda x: calls[0] < 12  # noqa: E731
        return on.sum(remat.checkpointed_while(condition, step, x, 3, store=store)[0])

    with pytest.raises(remat.RecomputeMismatchError):
        on.value_and_grad(run, [1.0, 2.0])


@both
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_output_that_counts_is_refused(on, schedule) -> None:
    calls = [0]

    def step(h, x):
        calls[0] += 1
        return on.sin(h + x), h * calls[0]

    def run(h):
        xs = on.array([0.1] * 12)
        return on.sum(
            remat.checkpointed_scan(step, h, xs, 2, schedule=schedule, store="bfloat16")[1]
        )

    with pytest.raises(remat.RecomputeMismatchError, match="its output"):
        on.value_and_grad(run, [1.0, 2.0])


@both
@pytest.mark.parametrize("store", ["bfloat16", "float16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_counter_that_does_no_harm_is_let_be(on, schedule, store) -> None:
    calls = [0]

    def step(h, x):
        calls[0] += 1
        return on.sin(h + x), h * x

    def run(h):
        final, ys = remat.checkpointed_scan(
            step, h, on.array(np.linspace(0.1, 0.3, 20)), 3, schedule=schedule, store=store
        )
        return on.sum(final) + on.sum(ys)

    def plain(h):
        total = 0.0
        for x in np.linspace(0.1, 0.3, 20):
            total, h = total + on.sum(h * x), on.sin(h + x)
        return total + on.sum(h)

    _, found = on.value_and_grad(run, [0.4, 0.9])
    _, expected = on.value_and_grad(plain, [0.4, 0.9])
    np.testing.assert_allclose(found, expected, rtol=2e-2)
