"""Passes that take more than their ops show: the next plan leaves room for it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import remat

ROWS, WIDTH = 512, 64
LAYER_BYTES = ROWS * WIDTH * 4


class Hungry(torch.autograd.Function):
    """The sine; its backward allocates memory of its own."""

    @staticmethod
    def forward(ctx, x, nbytes):
        ctx.save_for_backward(x)
        ctx.nbytes = nbytes
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        workspace = gradient.new_ones(ctx.nbytes // 4)
        return gradient * x.cos() * workspace[0], None


class Network(nn.Module):
    """Blocks, with hungry ops at the end: there memory is at its peak."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(10)
        )
        self.nbytes = nbytes

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return Hungry.apply(x, self.nbytes).sum()


INPUT = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def records(network: nn.Module, budget: int, count: int = 5) -> list:
    found = []
    with remat.CheckpointManager(memory_budget=budget) as manager:
        for _ in range(count):
            network.zero_grad()
            network(INPUT).backward()
            found.append(manager.last_pass)
    return found


def gradients(network: nn.Module) -> list[torch.Tensor]:
    network.zero_grad()
    network(INPUT).backward()
    return [parameter.grad for parameter in network.parameters()]


@pytest.mark.parametrize("share", [0.6, 0.75])
def test_the_next_plan_leaves_room_for_what_was_measured(share) -> None:
    budget = int(share * remat.memory_report(Network(4), INPUT).peak_bytes)
    frugal = records(Network(4), budget)
    hungry = records(Network(4 * LAYER_BYTES), budget)
    assert hungry[1].measured_peak > 1.05 * budget  # the plan does not know of it
    assert hungry[1].plan.peak_bytes <= budget
    assert all(record.followed for record in hungry[2:])
    assert max(record.measured_peak for record in hungry[2:]) <= budget
    assert hungry[-1].plan.peak_bytes < hungry[1].plan.peak_bytes
    assert hungry[-1].recomputed_ops > hungry[1].recomputed_ops
    assert hungry[-1].plan is hungry[-2].plan  # it has settled
    assert max(record.measured_peak for record in frugal[1:]) <= budget
    assert frugal[-1].plan.peak_bytes > hungry[-1].plan.peak_bytes


def test_gradients_stay_those_of_the_plain_network() -> None:
    expected = gradients(Network(4 * LAYER_BYTES))
    network = Network(4 * LAYER_BYTES)
    budget = int(0.7 * remat.memory_report(Network(4), INPUT).peak_bytes)
    with remat.CheckpointManager(memory_budget=budget):
        for _ in range(4):
            for found, plain in zip(gradients(network), expected, strict=True):
                assert torch.equal(found, plain)


def test_a_budget_with_room_for_it_is_used_as_before() -> None:
    budget = 2 * remat.memory_report(Network(4), INPUT).peak_bytes
    found = records(Network(4 * LAYER_BYTES), budget)
    assert found[-1].recomputed_ops == 0
    assert found[-1].measured_peak <= budget


def test_where_no_plan_is_small_enough_it_says_so_once_with_numbers() -> None:
    smallest = smallest_budget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = records(Network(20 * LAYER_BYTES), int(1.1 * smallest))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1
    assert "by any plan found" in texts[0]
    needed = int(texts[0].split("give at least ")[1].split()[0])
    assert needed == pytest.approx(smallest + 20 * LAYER_BYTES, rel=0.05)
    assert found[-1].plan.peak_bytes <= 1.01 * smallest  # as near as it gets
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = records(Network(20 * LAYER_BYTES), needed)
    assert max(record.measured_peak for record in found[2:]) <= needed


def smallest_budget() -> int:
    with pytest.raises(remat.BudgetTooSmallError) as caught:
        records(Network(4), 1000)
    assert caught.value.smallest is not None
    return caught.value.smallest
