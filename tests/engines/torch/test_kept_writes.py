"""Policies that keep what an in-place op has written: the right bytes, and not computed again."""

from __future__ import annotations

import pytest
import torch

import remat

from .oracles import assert_same_bits

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
