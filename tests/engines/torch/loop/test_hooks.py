"""Hooks on tensors of loops, and writes to what loops return; the oracle is a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import remat

from .oracles import SCHEDULES, Plain, Remat

ALL = pytest.mark.parametrize("schedule", SCHEDULES)
START = [1.0, -0.4, 0.7]


@ALL
@pytest.mark.parametrize("where", ["state", "between", "both"])
def test_a_step_that_registers_hooks_on_its_own_tensors(where, schedule) -> None:
    """They see, and change, the gradients that they would see in a plain loop."""

    def run(api):
        seen = []

        def hook(gradient):
            seen.append(gradient.clone())
            return gradient * 0.5

        def step(s):
            if where != "between":
                s.register_hook(hook)
            t = s * 1.5
            if where != "state":
                t.register_hook(hook)
            return t.sin()

        x = torch.tensor(START, requires_grad=True)
        api.loop(step, x, 5).sum().backward()
        return x.grad, seen

    (found, seen), (expected, others) = run(Remat(1, schedule=schedule)), run(Plain())
    assert torch.equal(found, expected)
    assert len(seen) == len(others)
    assert all(map(torch.equal, seen, others))


def test_a_hook_that_is_removed_again() -> None:
    def step(s):
        handle = s.register_hook(lambda g: g * 100)
        handle.remove()
        return s.sin()

    x = torch.tensor(START, requires_grad=True)
    remat.checkpointed_loop(step, x, 5, 1)[0].sum().backward()
    expected = torch.autograd.grad(Plain().loop(torch.sin, x, 5).sum(), x)[0]
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("is_leaf", [False, True])
def test_hooks_that_a_step_registers_on_what_it_closes_over_are_refused(is_leaf) -> None:
    """Steps are run again: there would be too many of them."""
    x, w = torch.tensor(START, requires_grad=True), torch.ones(3, requires_grad=True)
    y = w if is_leaf else w * 2

    def step(s):
        y.register_hook(lambda g: g * 0.5)
        return s * y

    def run():
        remat.checkpointed_loop(step, x, 5, 1, schedule="revolve")[0].sum().backward()

    with pytest.raises(remat.UnsupportedError, match="before the loop"):
        run()
    assert w.grad is None


@ALL
@pytest.mark.parametrize("around", ["forward", "backward", "both"])
def test_a_flop_counter_around_a_loop_over_a_module(around, schedule) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.randn(2, 3)

    def run(api):
        model.zero_grad()
        counter = FlopCounterMode(display=False)
        if around != "backward":
            with counter:
                y = api.loop(model, x, 4).sum()
                if around == "both":
                    y.backward()
        else:
            y = api.loop(model, x, 4).sum()
        if around != "both":
            with counter:
                y.backward()
        return counter.get_total_flops(), model.weight.grad

    flops, gradient = run(Remat(1, schedule=schedule))
    expected, other = run(Plain())
    assert flops >= expected > 0
    assert torch.equal(gradient, other)


# -- writes to what a loop returned ----------------------------------------------------------------


def final_of_a_loop(api, x):
    return api.loop(lambda s: s * 1.5, x, 5)


def final_of_a_while(api, x):
    return api.until(lambda s: s.norm() < 9, lambda s: s * 1.5, x)


def final_of_a_scan(api, x):
    return api.scan(lambda s, y: (s * y, s + y), x, torch.full((5,), 1.5))[0]


def outputs_of_a_scan(api, x):
    return api.scan(lambda s, y: (s * y, s + y), x, torch.full((5,), 1.5))[1]


RESULTS = [final_of_a_loop, final_of_a_while, final_of_a_scan, outputs_of_a_scan]


@ALL
@pytest.mark.parametrize("result", RESULTS)
def test_a_result_that_is_written_to_before_the_backward_pass(result, schedule) -> None:
    def run(api):
        x = torch.tensor(START, requires_grad=True)
        y = result(api, x)
        y.mul_(2)
        return torch.autograd.grad(y.sum(), x)[0]

    assert torch.equal(run(Remat(1, schedule=schedule)), run(Plain()))


@ALL
@pytest.mark.parametrize("result", RESULTS)
def test_a_result_that_is_written_to_between_two_backward_passes(result, schedule) -> None:
    def run(api):
        x = torch.tensor(START, requires_grad=True)
        y = result(api, x)
        total = y.sum()
        total.backward(retain_graph=True)
        with torch.no_grad():
            y.mul_(3)
        total.backward()
        return x.grad

    assert torch.equal(run(Remat(1, schedule=schedule)), run(Plain()))


@ALL
def test_whole_numbers_that_are_written_to(schedule) -> None:
    x = torch.tensor(START, requires_grad=True)
    (y, count), _ = remat.checkpointed_loop(
        lambda s: (s[0] * 1.5, s[1] + 1), (x, torch.zeros(2, dtype=int)), 5, 1, schedule=schedule
    )
    count.zero_()
    y.sum().backward()
    assert x.grad.tolist() == [1.5**5] * 3


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])  # which run steps again
def test_a_step_that_does_not_repeat_itself_is_caught_though_its_result_was_written_to(
    schedule,
) -> None:
    x, calls = torch.tensor(START, requires_grad=True), []

    def step(s):
        calls.append(None)
        return s * 1.5 if len(calls) <= 8 else s * 1.4

    y, _ = remat.checkpointed_loop(step, x, 8, 1, schedule=schedule)
    y.mul_(2)
    with pytest.raises(remat.RecomputeMismatchError):
        y.sum().backward()
