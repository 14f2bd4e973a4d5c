"""Policies that keep what an in-place op has written: the right bytes, and not computed again."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

import remat
from remat.engines.torch.budget.manager import TorchBudget, run_within
from remat.engines.torch.recording import recorder, storages, views, writes

from .oracles import assert_same_bits, planning
from .random_plans import RandomPlans

X = torch.linspace(-1.0, 1.0, 64 * 64).view(64, 64)
W = torch.linspace(-0.5, 0.5, 64 * 64).view(64, 64).requires_grad_()


def everything(op, shapes, nbytes, name) -> bool:
    return True


@pytest.mark.parametrize("part", [lambda a: a.t(), lambda a: a[:32], lambda a: a[:, 1:5]])
def test_a_write_to_a_view_that_is_kept(part) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a = (x @ W).sin()
        torch._foreach_mul_([part(a)], 2.0)
        return a.sin().sum()

    (expected,) = torch.autograd.grad(function(X), W)
    (found,) = torch.autograd.grad(remat.checkpoint(function, X, policy=everything), W)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("relu", [torch.relu, torch.relu_])
def test_what_is_kept_is_not_computed_again(relu) -> None:
    def recomputed_ops(policy) -> int:
        with remat.CheckpointProfiler() as profiler:
            result = remat.checkpoint(lambda x: relu(x @ W).sin().sin(), X, policy=policy)
            result.sum().backward()
        return profiler.regions[0].ops

    assert recomputed_ops(None) == 3
    assert recomputed_ops(lambda op, shapes, nbytes, name: "relu" in op) == 1


def transposed(x: torch.Tensor) -> torch.Tensor:
    v = (x * 2).detach().t()
    v.add_(1.0)
    a = v * 2
    y = torch.sin(x + v)
    v.mul_(3)
    return y + a + v


def a_part_of_data(x: torch.Tensor) -> torch.Tensor:
    v = (x * 2).data[1:]
    v.add_(1.0)
    a = v * 2
    y = torch.sin(x[1:] + v)
    v.mul_(3)
    return y + a + v


def balanced_targets(x: torch.Tensor) -> torch.Tensor:
    """Sinkhorn's balancing of a detached matrix, as in clustering losses."""
    q = torch.exp(x / 0.5).detach().t()
    weight = q * 0.5
    q /= q.sum()
    for _ in range(2):
        q /= q.sum(dim=1, keepdim=True)
        q /= q.shape[0]
        x = x * torch.log_softmax(x + q.t(), dim=1)
        q /= q.sum(dim=0, keepdim=True)
        q /= q.shape[1]
    q *= q.shape[1]
    return q.t() * x + weight.t()


@pytest.mark.parametrize("function", [transposed, a_part_of_data, balanced_targets])
def test_any_policy_over_writes_to_views_of_detached_memory(function) -> None:
    x = (X[:6, :6] * 1.5).requires_grad_()
    (expected,) = torch.autograd.grad(function(x).square().sum(), x)
    policies = [remat.policies.save_ops("add_"), remat.policies.save_ops("div_", "mul_")]
    policies += [random_policy(seed) for seed in range(60)]
    wrong = [
        policy
        for policy in policies
        if not torch.equal(gradient(function, x, policy=policy), expected)
    ]
    assert not wrong


def gradient(function, x: torch.Tensor, **options) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these policies keep nothing
        result = remat.checkpoint(function, x, **options)
    (found,) = torch.autograd.grad(result.square().sum(), x)
    return found


def random_policy(seed: int):
    rng = random.Random(seed)
    return lambda op, shapes, nbytes, name: rng.random() < 0.4


@pytest.mark.parametrize("function", [transposed, a_part_of_data, balanced_targets])
def test_any_plan_over_writes_to_views_of_detached_memory(function) -> None:
    x = (X[:6, :6] * 1.5).requires_grad_()
    (expected,) = torch.autograd.grad(function(x).square().sum(), x)
    for seed in range(20):
        budget = TorchBudget("1GB", planning(RandomPlans(seed)))
        for _ in range(3):
            found = torch.autograd.grad(run_within(budget, function, (x,)).square().sum(), x)
            assert_same_bits(found[0], expected)


def test_what_was_written_through_a_view_is_kept_without_a_known_shape(monkeypatch) -> None:
    """The tensor that an op returned is gone, and a view of it that nobody has seen is written to.

    A replay gives the shape of the original, so what a policy keeps is never computed again.
    """
    for module in (views, writes, storages, recorder):
        monkeypatch.setattr(module, "note_views", lambda value: None)
    x = (X[:6, :6] * 1.5).requires_grad_()
    (expected,) = torch.autograd.grad(transposed(x).square().sum(), x)
    policy = remat.policies.save_ops("add_")
    assert_same_bits(gradient(transposed, x, policy=policy), expected)


def test_a_profiled_scope_that_holds_a_conjugate_view_only() -> None:
    def function(x: torch.Tensor, **options) -> torch.Tensor:
        with remat.CheckpointScope("holding", use_recomputation=False, **options):
            y = torch.complex(x.sin(), x.cos())
            return (torch.complex(x.cos(), x) @ y.mH).real.sum()

    x = X[:4, :4].clone().requires_grad_()
    with remat.CheckpointProfiler():
        (found,) = torch.autograd.grad(function(x), x)
    (expected,) = torch.autograd.grad(function(x, enabled=False), x)
    assert_same_bits(found, expected)
