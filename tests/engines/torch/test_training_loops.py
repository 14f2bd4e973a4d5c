"""Budgets in the ordinary life of training loops: validation, exceptions, what is not trained."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import remat

from .oracles import assert_same_bits
from .test_workspace import peak_of_allocator


def network(width: int = 16, depth: int = 2) -> nn.Module:
    layers = [[nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)] for _ in range(depth)]
    return nn.Sequential(*(layer for part in layers for layer in part), nn.Dropout(0.1))


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.train()
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def living() -> Counter[type]:
    """Count what is alive, without the help of the garbage collector."""
    return Counter(map(type, gc.get_objects()))


class Total:
    def __init__(self) -> None:
        self.sum = torch.zeros(())
        self.last = None


def without_grad(model: nn.Module, x: torch.Tensor, total: Total) -> None:
    model.eval()
    with torch.no_grad():
        total.sum += model(x).square().mean()


def in_inference_mode(model: nn.Module, x: torch.Tensor, total: Total) -> None:
    model.eval()
    with torch.inference_mode():
        total.sum = total.sum + model(x).square().mean().item()


def with_grad(model: nn.Module, x: torch.Tensor, total: Total) -> None:
    model.eval()
    total.sum = total.sum + model(x).square().mean().detach()


def with_grad_in_train_mode(model: nn.Module, x: torch.Tensor, total: Total) -> None:
    total.sum = total.sum + model(x).square().mean().detach()


def with_a_result_that_stays(model: nn.Module, x: torch.Tensor, total: Total) -> None:
    total.last = model(x)
    total.sum = total.sum + total.last.detach().mean()


def that_fails(model: nn.Module, x: torch.Tensor, total: Total) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model[:4](x) @ torch.ones(3, 3)


EVALUATIONS = {
    f.__name__: f
    for f in (
        without_grad,
        in_inference_mode,
        with_grad,
        with_grad_in_train_mode,
        with_a_result_that_stays,
        that_fails,
    )
}


@pytest.mark.parametrize(
    ("name", "rows"),
    [*((name, 64) for name in EVALUATIONS), ("with_grad", 32), ("with_a_result_that_stays", 32)],
)
def test_validation_inside_of_a_manager_leaves_nothing_behind(name, rows) -> None:
    evaluate = EVALUATIONS[name]
    model, x, other = network(), torch.randn(64, 16), torch.randn(rows, 16)
    total, counts, tensors = Total(), [], []
    expected = []
    for number in range(3):
        torch.manual_seed(number)
        expected.append(step(copy.deepcopy(model), x))
    with remat.CheckpointManager(memory_budget=0.7) as manager:
        for epoch in range(3):
            for number in range(3):
                torch.manual_seed(number)
                found = step(model, x)
                for one, other_one in zip(found, expected[number], strict=True):
                    assert_same_bits(one, other_one, f"epoch {epoch}, step {number}")
            (budget,) = (b for b in manager._budgets if b.planned)
            assert len(budget.planned) == 1
            gc.collect()
            gc.disable()
            try:
                for number in range(67):
                    evaluate(model, other, total)
                    if number in (6, 66):
                        alive = living()
                        counts.append(sum(alive.values()))
                        tensors.append(alive[torch.Tensor])
            finally:
                gc.enable()
    assert max(tensors) == min(tensors[1:])
    assert counts[-1] - counts[-2] < 50
    assert counts[-1] - counts[1] < 50
    assert manager.last_pass.followed
    assert budget.planned[0].passes >= 7


def budget_of(manager: remat.CheckpointManager):
    (budget,) = (b for b in manager._budgets if b.planned)
    return budget


def gradient(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def two_inputs(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The program starts again with the second input, and both belong to one pass."""
    return gradient(model, (model(x) - model(x * 2)).square().mean())


def two_losses(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    one, other = model(x).square().mean(), model(x * 2).square().mean()
    return [*gradient(model, one), *gradient(model, other)]


def a_loss_that_is_printed_now_and_then(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    loss = y.square().mean()
    if next(_numbers) % 2:
        _total.add_((y.detach() > 0).float().mean())
        with torch.no_grad():
            model(x[:8]).sum()
    return gradient(model, loss)


_numbers, _total = iter(range(1000)), torch.zeros(())


@pytest.mark.parametrize("program", [two_inputs, two_losses, a_loss_that_is_printed_now_and_then])
def test_what_is_one_program_gets_one_plan(program) -> None:
    model, x = network().eval(), torch.randn(64, 16)
    plain = program(copy.deepcopy(model), x)
    with remat.CheckpointManager(memory_budget=0.9) as manager:
        for _ in range(6):
            for one, other in zip(program(model, x), plain, strict=True):
                assert_same_bits(one, other)
        assert manager.last_pass.followed
        known = [len(planned.keys) for planned in budget_of(manager).planned]
    # (A pass that was taken for two has been planned, at first, from its second half.)
    assert len(known) <= 1 + (program is two_losses)


def test_a_step_that_fails_is_no_other_program() -> None:
    model, x = network(), torch.randn(64, 16)

    def fails(grad: torch.Tensor) -> None:
        raise KeyError("mine")

    with remat.CheckpointManager(memory_budget=0.8) as manager:
        for number in range(9):
            with pytest.raises((KeyError, RuntimeError)) if number % 3 else nullcontext():
                y = model[:4](x)
                if number % 3 == 1:
                    y = y @ torch.ones(3, 3)
                y = model[4:](y)
                if number % 3 == 2:
                    y.register_hook(fails)
                y.square().mean().backward()
        assert manager.last_pass.followed
        assert len(budget_of(manager).planned) == 1


def test_an_evaluation_of_a_model_with_a_budget_is_not_planned() -> None:
    model = remat.auto_checkpoint(network(), memory_budget=0.8).eval()
    budget = model.forward.budget
    for rows in range(1, 20):
        model(torch.ones(rows, 16))  # as `generate` does, if nobody switches gradients off
    assert budget.planned == []
    step(model, torch.ones(64, 16))
    assert len(budget.planned) == 1
    model.eval()
    model(torch.ones(32, 16)).sum().backward()  # it is planned if there is a backward
    assert len(budget.planned) == 2


def test_a_frozen_model_needs_no_budget() -> None:
    x = torch.ones(64, 16)
    model = remat.auto_checkpoint(network().requires_grad_(False), memory_budget="1KB")
    for rows in range(1, 5):
        assert not model(x[:rows]).requires_grad
    assert model.forward.budget.planned == []
    with remat.CheckpointManager(memory_budget="1KB") as manager:
        for _ in range(3):
            network().requires_grad_(False)(x).sum()
    assert manager.last_pass is None


def test_a_budget_that_is_too_small_is_an_error_in_every_step() -> None:
    model, x = network(), torch.randn(64, 16)
    with remat.CheckpointManager(memory_budget="10KB") as manager:
        for _ in range(3):
            loss = model(x).square().mean()
            for _ in range(2):
                with pytest.raises(remat.BudgetTooSmallError, match="at least"):
                    loss.backward(retain_graph=True)
    assert manager.last_pass is None


def unrolled(cell: torch.nn.Module, x: torch.Tensor, steps: int = 6) -> torch.Tensor:
    states = [torch.zeros(256, 32) for _ in range(2)]
    total = torch.zeros(())
    for _ in range(steps):
        state = cell(x, tuple(states) if isinstance(cell, torch.nn.LSTMCell) else states[0])
        states = list(state) if isinstance(state, tuple) else [state]
        total = total + states[0].square().mean()
    return total


def micro_batches(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(net(part).square().mean() for part in x.chunk(4))


@pytest.mark.parametrize(
    ("module", "program", "share"),
    [
        (torch.nn.RNNCell(32, 32), unrolled, 0.7),
        (torch.nn.LSTMCell(32, 32), unrolled, 0.95),
        (torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh()), micro_batches, 0.8),
    ],
    ids=["rnn", "lstm", "micro batches"],
)
def test_a_step_whose_program_repeats_is_one_pass(module, program, share) -> None:
    """Each part of it begins as the whole does, from parameters and inputs alone."""
    x = torch.ones(256, 32)

    def run() -> list[torch.Tensor]:
        module.zero_grad(set_to_none=False)
        program(module, x).backward()
        return [parameter.grad for parameter in module.parameters()]

    expected = [gradient.clone() for gradient in run()]
    plain = peak_of_allocator(run)
    with remat.CheckpointManager(memory_budget=int(share * plain)) as manager:
        for number in range(5):
            peak = peak_of_allocator(run)
            for one, other in zip(run(), expected, strict=True):
                assert_same_bits(one, other, f"step {number}")
    assert manager.last_pass.followed
    assert peak <= 1.05 * share * plain


def test_a_changed_budget_counts_for_the_next_step() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    x = torch.randn(256, 64)
    with remat.CheckpointManager(memory_budget="1GB") as manager:
        for _ in range(3):
            model(x).cos().sum().backward()
        manager.memory_budget = 1
        with pytest.raises(remat.BudgetTooSmallError):
            model(x).cos().sum().backward()
