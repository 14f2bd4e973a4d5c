"""Passes that differ from step to step under a budget: few searches, and the budget is kept."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import remat
from remat.core.budget import Budget
from remat.plans import search

ROWS, WIDTH, LAYERS = 256, 32, 9


@pytest.fixture
def searched(monkeypatch) -> list:
    """The traces that were searched."""
    traces = []

    class Counting(search.Search):
        def __init__(self, trace) -> None:
            traces.append(trace)
            super().__init__(trace)

    monkeypatch.setattr(search, "Search", Counting)
    return traces


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(nn.functional.gelu(self.linear(self.norm(x))))


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x, dice):
        for layer in self.layers:
            if torch.rand((), generator=dice) < 0.7:
                x = layer(x)
        return x.square().mean()


class Experts(nn.Module):
    """Each token goes to one expert; one without tokens does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Layer() for _ in range(5))
        self.mixers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x, dice):
        for mixer in self.mixers:
            x = mixer(x)
            number = int(torch.randint(2, 5, (), generator=dice))
            chosen = torch.randint(number, (len(x),), generator=dice)
            out = torch.zeros_like(x)
            for expert in chosen.unique().tolist():
                where = (chosen == expert).nonzero().flatten()
                out = out.index_add(0, where, self.experts[expert](x[where]))
            x = x + out
        return x.square().mean()


def budget_of(manager):
    return next(each for each in manager._budgets if "torch" in type(each).__module__)


def run(model, steps, budget=None):
    """Return gradients of all steps, and the measured peaks."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    dice = torch.Generator().manual_seed(2)
    gradients, peaks = [], []

    def step():
        model.zero_grad()
        model(x, dice).backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    if budget is None:
        for _ in range(steps):
            step()
        return gradients, peaks
    with remat.CheckpointManager(memory_budget=budget) as manager:
        observed = budget_of(manager)
        ended = observed.backward_ended
        observed.backward_ended = lambda done: (peaks.append(done.meter.peak), ended(done))
        for _ in range(steps):
            step()
    return gradients, peaks


@pytest.mark.parametrize("make", [StochasticDepth, Experts])
def test_ever_changing_ops_cost_few_searches(make, searched) -> None:
    torch.manual_seed(0)
    model, steps = make(), 9
    plain, _ = run(model, steps)
    _, plain_peaks = run(model, steps, budget=1_000_000_000)
    searched.clear()
    budget = 500_000
    assert min(sorted(plain_peaks)[1:]) > 1.4 * budget  # all but one pass would be far above it
    gradients, peaks = run(model, steps, budget)
    assert all(
        (a is None and b is None) or torch.equal(a, b)
        for mine, other in zip(gradients, plain, strict=True)
        for a, b in zip(mine, other, strict=True)
    )
    assert len(peaks) == steps
    assert max(peaks) <= 1.15 * budget  # docs/budget.md
    assert len(searched) <= 5


def test_ever_new_shapes_cost_few_searches(searched) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(1)))
    with remat.CheckpointManager(memory_budget=0.8) as manager:
        for rows in range(64, 184):
            model(torch.ones(rows, WIDTH)).sum().backward()
        budget = budget_of(manager)
    assert len(searched) <= 6
    assert len(budget.planned) <= 32
    assert len(budget._searches._kept) <= 4


def test_a_program_that_comes_after_odd_ones_is_planned(searched) -> None:
    torch.manual_seed(0)
    layers = [Layer() for _ in range(9)]
    x = torch.ones(ROWS, WIDTH)
    with remat.CheckpointManager(memory_budget=0.7) as manager:
        for depth in range(1, 8):  # more than are planned at once
            nn.Sequential(*layers[:depth])(x).sum().backward()
        for _ in range(3):
            nn.Sequential(*layers)(x).sum().backward()
        assert manager.last_pass.followed
        assert len(manager.last_pass.trace.ops) > 30  # it is the program of nine layers
        assert manager.last_pass.recomputed_ops > 0


def test_sizes_that_are_new_in_every_step_are_not_planned(monkeypatch) -> None:
    """The ops are the same, and no plan is ever followed: each would be made in vain."""
    planned = []
    plan = Budget._plan
    monkeypatch.setattr(Budget, "_plan", lambda self, p: (planned.append(p), plan(self, p)))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)])
    rows = random.Random(0).sample(range(300, 600), 40)
    with remat.CheckpointManager(memory_budget=0.6):
        for count in rows:
            model(torch.ones(count, 32)).square().mean().backward()
    assert len(planned) <= 10
    with remat.CheckpointManager(memory_budget=0.6) as manager:
        for count in [*rows[:12], *rows[:12], *rows[:12]]:  # what comes again is planned
            model(torch.ones(count, 32)).square().mean().backward()
    assert manager.last_pass.followed
