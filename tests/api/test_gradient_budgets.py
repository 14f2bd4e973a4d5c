"""`grad` and `value_and_grad` with a memory budget, on functions of PyTorch tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import remat

X = torch.linspace(0.1, 1.0, 400_000)  # 1.6 MB


def steps(x: Any, count: int = 8) -> Any:
    for _ in range(count):
        x = torch.tanh(torch.sin(x) * 1.1 + torch.exp(-x * x))
    return torch.sum(x)


def by_autograd(function: Any, x: Any) -> Any:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


@pytest.mark.parametrize("budget", [0.6, "40MB", 40_000_000])
def test_a_gradient_within_a_budget_has_the_bits_of_autograd(budget: Any) -> None:
    gradient = remat.value_and_grad(steps, memory_budget=budget)
    for _ in range(3):
        value, found = gradient(X)
        assert torch.equal(found, by_autograd(steps, X))
        assert torch.equal(value, steps(X))


def exponentials(gradient: Any) -> int:
    """Count what PyTorch computes again first: backward has no use for it by itself."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradient(X)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::exp")


def test_a_budget_makes_it_recompute() -> None:
    tight, wide = (remat.grad(steps, memory_budget=budget) for budget in (0.5, "1GB"))
    tight(X)
    wide(X)
    assert exponentials(tight) > exponentials(wide)


def test_a_budget_that_is_too_small_is_refused_and_leaves_nothing_on() -> None:
    with pytest.raises(remat.BudgetTooSmallError, match="MB"):
        remat.grad(steps, memory_budget=2_000_000)(X)
    assert torch.equal(remat.grad(steps)(X), by_autograd(steps, X))


def test_another_program_is_planned_anew() -> None:
    gradient = remat.grad(steps, memory_budget=0.7)
    for count in (4, 6, 4):
        expected = by_autograd(lambda x, n=count: steps(x, n), X)
        assert torch.equal(gradient(X, count), expected)
