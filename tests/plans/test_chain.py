"""Plans for chains of unlike layers against brute force and a machine that counts bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.errors import BudgetTooSmallError
from remat.plans.chain import ChainLayer, ChainPlan, Segment, plan_chain

Steps = tuple[int | Segment, ...]


class Machine:
    """Runs a plan as an engine does: counts what is allocated, and the seconds of all forwards."""

    def __init__(self, layers: list[ChainLayer]) -> None:
        self.layers = layers
        self.now = self.peak = 0
        self.seconds = 0.0

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def forward(self, layer: int, nbytes: int) -> None:
        about = self.layers[layer]
        self.seconds += about.seconds
        self.take(nbytes)
        self.take(about.forward_workspace_bytes)
        self.now -= about.forward_workspace_bytes

    def gradient_bytes(self, position: int) -> int:
        """Of what layer `position` reads."""
        if position == len(self.layers):
            return self.layers[-1].output_bytes
        own = self.layers[position].input_gradient_bytes
        if own is not None:
            return own
        return self.layers[position - 1].output_bytes if position else 0

    def run(self, steps: Steps, *, is_top: bool = True) -> None:
        """Go forward and backward; the gradient of the result is there, unless at the top."""
        for step in steps:
            if isinstance(step, Segment):
                self.run_without_tapes(flat(step))
            else:
                self.forward(step, self.layers[step].tape_bytes)
        if is_top:
            self.take(self.gradient_bytes(len(self.layers)))
        for step in reversed(steps):
            if isinstance(step, Segment):
                self.now -= self.layers[flat(step)[-1]].output_bytes
                self.run(step.steps, is_top=False)
            else:
                self.backward(step)

    def run_without_tapes(self, layers: list[int]) -> None:
        for place, layer in enumerate(layers):
            self.forward(layer, self.layers[layer].output_bytes)
            if place:
                self.now -= self.layers[layers[place - 1]].output_bytes

    def backward(self, layer: int) -> None:
        about = self.layers[layer]
        self.take(self.gradient_bytes(layer))
        self.take(about.backward_workspace_bytes)
        self.now -= about.backward_workspace_bytes
        self.now -= about.tape_bytes + self.gradient_bytes(layer + 1)


def flat(step: int | Segment) -> list[int]:
    if isinstance(step, int):
        return [step]
    return [layer for inner in step.steps for layer in flat(inner)]


def judge(layers: list[ChainLayer], steps: Steps) -> tuple[int, float]:
    machine = Machine(layers)
    machine.run(steps)
    assert machine.now == machine.gradient_bytes(0)  # that of the input is what is left
    return machine.peak, machine.seconds - sum(layer.seconds for layer in layers)


def all_plans(first: int, stop: int) -> Iterator[Steps]:
    if first == stop:
        yield ()
        return
    for rest in all_plans(first + 1, stop):
        yield (first, *rest)
    for cut in range(first + 1, stop):
        for inner, rest in itertools.product(list(all_plans(first, cut)), all_plans(cut, stop)):
            yield (Segment(inner), *rest)


def random_layers(seed: int, count: int) -> list[ChainLayer]:
    dice = random.Random(seed)
    layers = []
    for _ in range(count):
        output = dice.randrange(1, 12)
        layers.append(
            ChainLayer(
                seconds=float(dice.randrange(1, 9)),
                output_bytes=output,
                tape_bytes=output + dice.randrange(0, 20),
                input_gradient_bytes=dice.choice([None, 3]),
                forward_workspace_bytes=dice.choice([0, 0, 5]),
                backward_workspace_bytes=dice.choice([0, 0, 7]),
            )
        )
    return layers


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_brute_force(count: int, seed: int) -> None:
    layers = random_layers(seed, count)
    judged = [judge(layers, steps) for steps in all_plans(0, count)]
    least = min(peak for peak, _ in judged)
    for budget in range(least, max(peak for peak, _ in judged) + 2, 3):
        best = min(seconds for peak, seconds in judged if peak <= budget)
        plan = plan_chain(layers, budget)
        assert plan.extra_seconds == best
        assert judge(layers, plan.steps) == (plan.peak_bytes, plan.extra_seconds)
        assert plan.peak_bytes <= budget
    with pytest.raises(BudgetTooSmallError, match=f"at least {least} bytes"):
        plan_chain(layers, least - 1)


def test_equal_to_brute_force_of_eight_layers() -> None:
    layers = random_layers(99, 8)
    judged = [judge(layers, steps) for steps in all_plans(0, 8)]
    for budget in sorted({peak for peak, _ in judged})[::7]:
        best = min(seconds for peak, seconds in judged if peak <= budget)
        assert plan_chain(layers, budget).extra_seconds == best


@given(st.integers(0, 10**6), st.integers(1, 25), st.floats(0, 1))
def test_keeps_to_the_budget(seed: int, count: int, part: float) -> None:
    """Also where bytes are no multiples of a bucket."""
    dice = random.Random(seed)
    layers = []
    for _ in range(count):
        output = dice.randrange(1, 10**6)
        layers.append(ChainLayer(dice.random(), output, output + dice.randrange(10**6)))
    everything = judge(layers, tuple(range(count)))[0]
    budget = int(everything * part)
    try:
        plan = plan_chain(layers, budget)
    except BudgetTooSmallError as error:
        least = int(str(error).split("at least ")[1].split()[0])
        assert least > budget
        plan = plan_chain(layers, least)
        budget = least
    peak, seconds = judge(layers, plan.steps)
    assert peak == plan.peak_bytes <= budget
    assert seconds == pytest.approx(plan.extra_seconds)
    assert [layer for step in plan.steps for layer in flat(step)] == list(range(count))


def test_a_large_budget_changes_nothing() -> None:
    layers = random_layers(5, 30)
    assert plan_chain(layers, "1GB").steps == tuple(range(30))


def test_a_hundred_layers_in_five_hundred_buckets() -> None:
    dice = random.Random(1)
    sizes = [dice.randrange(10**6, 10**7) for _ in range(100)]
    layers = [ChainLayer(dice.random(), size, 2 * size) for size in sizes]
    plain = judge(layers, tuple(range(100)))[0]
    plan = plan_chain(layers, plain // 5)
    assert judge(layers, plan.steps)[0] <= plain // 5
    assert plan.extra_seconds < 1.2 * sum(layer.seconds for layer in layers)


def test_a_chain_that_fits_but_not_in_whole_buckets() -> None:
    layers = [ChainLayer(1.0, 1, 100_000)]
    assert plan_chain(layers, 100_001) == ChainPlan((0,), 100_001, 0.0)


def test_a_result_without_bytes() -> None:
    layers = [*random_layers(3, 3), ChainLayer(1.0, 0, 0)]
    judged = [judge(layers, steps) for steps in all_plans(0, 4)]
    assert plan_chain(layers, min(judged)[0]).peak_bytes == min(judged)[0]


def test_no_layers() -> None:
    assert plan_chain([], 0) == ChainPlan((), 0, 0.0)


def test_layers_of_a_segment() -> None:
    assert Segment((1, Segment((2, 3)), 4)).layers == (1, 2, 3, 4)
