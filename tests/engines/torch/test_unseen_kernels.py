"""Kernels inside of a custom Function that neither PyTorch nor a dispatch mode sees.

As in Triton, they write through the address of a tensor. What a Function returns or saves over
memory that was there before counts as written by it: it is held, and never recomputed from before.
"""

from __future__ import annotations

import ctypes
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import remat
from remat.engines.torch.budget.manager import TorchBudget, run_within

from .oracles import in_a_budget, in_a_scope, in_a_scope_in_a_segment, planning
from .random_plans import RandomPlans

Make = Callable[[Tensor], Any]


def scale_in_place(tensor: Tensor, factor: float) -> None:
    numbers = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    for i in range(tensor.numel()):
        numbers[i] *= factor


def function(forward: Callable[[Any, Tensor], Any], derivative: Callable[[Any], Any]) -> Make:
    """Return a Function of one tensor; `derivative(ctx)` is what a gradient is multiplied with."""
    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(
            lambda ctx, first, *more: sum(
                (derivative(ctx) * g for g in more), derivative(ctx) * first
            )
        ),
    }
    return type("Unseen", (Function,), methods).apply


def as_view(ctx: Any, q: Tensor) -> Tensor:
    scale_in_place(q, -2.0)
    return q.view_as(q)


def as_itself(ctx: Any, q: Tensor) -> Tensor:
    scale_in_place(q, -2.0)
    return q


def detached(ctx: Any, q: Tensor) -> Tensor:
    scale_in_place(q, -2.0)
    return q.detach()


def marked_dirty(ctx: Any, q: Tensor) -> Tensor:
    scale_in_place(q, -2.0)
    ctx.mark_dirty(q)
    return q


def two_views(ctx: Any, q: Tensor) -> tuple[Tensor, Tensor]:
    scale_in_place(q, -2.0)
    return q.view_as(q), q.view_as(q)


def saves_its_input(ctx: Any, q: Tensor) -> Tensor:
    scale_in_place(q, -2.0)
    ctx.save_for_backward(q)
    return q.view_as(q)


def saves_a_view(ctx: Any, q: Tensor) -> Tensor:
    """As a fused loss that leaves its gradient where its input was."""
    total = q.sum()
    scale_in_place(q, -2.0)
    ctx.save_for_backward(q.detach())
    return total.expand(q.shape)


def into_zeros(ctx: Any, q: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    ctypes.memmove(out.data_ptr(), q.data_ptr(), q.nbytes)
    return out


def into_zeros_that_are_read(ctx: Any, q: Tensor) -> Tensor:
    out = q.new_zeros(q.shape)
    ctypes.memmove(out.data_ptr(), q.data_ptr(), q.nbytes)
    return out * 1.5


def into_a_copy(ctx: Any, q: Tensor) -> Tensor:
    out = q.clone()
    scale_in_place(out, -2.0)
    return out


def into_a_copy_that_is_saved(ctx: Any, q: Tensor) -> Tensor:
    factors = torch.zeros_like(q).double().float()
    scale_in_place(factors.fill_(1.0), -2.0)
    ctx.save_for_backward(factors)
    return q * -2.0


def into_what_was_filled(ctx: Any, q: Tensor) -> Tensor:
    out = torch.empty_like(q)
    scale_in_place(out.copy_(q), -2.0)
    return out


def saved(ctx: Any) -> Tensor:
    return ctx.saved_tensors[0]


FUNCTIONS = {
    "view": function(as_view, lambda ctx: -2.0),
    "itself": function(as_itself, lambda ctx: -2.0),
    "detached": function(detached, lambda ctx: -2.0),
    "dirty": function(marked_dirty, lambda ctx: -2.0),
    "two views": lambda q: sum(function(two_views, lambda ctx: -2.0)(q)),
    "saves its input": function(saves_its_input, saved),
    "saves a view": function(saves_a_view, saved),
    "zeros": function(into_zeros, lambda ctx: 1.0),
    "zeros that are read": function(into_zeros_that_are_read, lambda ctx: 1.5),
    "a copy": function(into_a_copy, lambda ctx: -2.0),
    "a copy that is saved": function(into_a_copy_that_is_saved, saved),
    "what was filled": function(into_what_was_filled, lambda ctx: -2.0),
    "a view of it": lambda q: function(as_view, lambda ctx: -2.0)(q).t().sin().t(),
    "a detached view of it": lambda q: function(detached, lambda ctx: -2.0)(q).t().sin().t(),
    "twice": lambda q: function(as_view, lambda ctx: -2.0)(FUNCTIONS["view"](q).cos() * 0.5),
    "overwritten": lambda q: function(detached, lambda ctx: -2.0)(q).mul_(0.5).sin().mul_(0.5),
}


def program(make: Make, x: Tensor, w: Tensor) -> Tensor:
    """Compute something before, from, and after what a Function has written."""
    q = x @ w
    before = (q * 2.0).sin()
    q = make(q)
    y = torch.tanh(q * q) + before
    z = make(y @ w)
    return torch.tanh(z * y)


def gradients(run: Callable[..., Any], make: Make, *, is_frozen: bool = False) -> list[Tensor]:
    x = torch.linspace(-1.0, 1.0, 20).view(4, 5).requires_grad_(not is_frozen)
    w = torch.linspace(-0.9, 1.1, 25).view(5, 5).requires_grad_(not is_frozen)
    scale = torch.linspace(0.5, 1.5, 20).view(4, 5).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of policies that keep nothing
        result = run(lambda: program(make, x, w) * scale)
    return list(torch.autograd.grad(result.square().sum(), [scale] if is_frozen else [x, w, scale]))


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def under_a_policy(policy: Any) -> Callable[..., Any]:
    return lambda fn: remat.checkpoint(policy=policy)(fn)()


def at_random(seed: int) -> Callable[..., bool]:
    rng = random.Random(seed)
    return lambda op, shapes, nbytes, name: rng.random() < 0.5


def profiled(fn: Callable[[], Any]) -> Any:
    with remat.CheckpointProfiler():
        return remat.checkpoint(fn)()


WAYS = {
    "segment": lambda fn: remat.checkpoint(fn)(),
    "scope": in_a_scope,
    "scope in a segment": lambda fn: in_a_scope_in_a_segment(lambda _: fn(), torch.zeros(1)),
    "holding scope": under_a_policy(remat.policies.save_everything),
    "matrix products": under_a_policy(remat.policies.save_matmuls),
    "at random": under_a_policy(at_random(0)),
    "at random, again": under_a_policy(at_random(1)),
    "profiler": profiled,
    "unplanned pass": in_a_budget,
}


def wrong_ways(make: Make, *, is_frozen: bool) -> list[str]:
    expected = gradients(lambda fn: fn(), make, is_frozen=is_frozen)
    return [
        name
        for name, way in WAYS.items()
        if not equal(gradients(way, make, is_frozen=is_frozen), expected)
    ]


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_what_a_kernel_has_written_is_never_computed_from_before(make) -> None:
    assert not wrong_ways(make, is_frozen=False)


# Without a graph PyTorch does not tell a detached tensor that a Function has returned from others.
FROZEN = [name for name in FUNCTIONS if name not in ("saves a view", "overwritten")]


@pytest.mark.parametrize("name", [name for name in FROZEN if "detached" not in name])
def test_the_same_before_the_first_layer_that_trains(name) -> None:
    assert not wrong_ways(FUNCTIONS[name], is_frozen=True)


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_any_plan(make) -> None:
    expected = gradients(lambda fn: fn(), make)
    for seed in range(4):
        budget = TorchBudget("1GB", planning(RandomPlans(seed)))
        run = partial(run_within, budget, args=())
        for _ in range(4):
            assert equal(gradients(run, make), expected)


class Rotate(Function):
    """As `as_view`, with a backward that allocates nothing but its gradient."""

    forward = staticmethod(as_view)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -2.0 * gradient


@pytest.mark.filterwarnings("ignore:a pass takes")  # what the backward of Rotate allocates
def test_all_steps_of_a_budget() -> None:
    """A plan counts what a Function has written as held, and no memory twice."""
    weights = [torch.linspace(-1.0, 1.0, 64).view(8, 8).requires_grad_() for _ in range(4)]
    x = torch.linspace(-1.0, 1.0, 64 * 8).view(64, 8)

    def step() -> list[Tensor]:
        y = x
        for w in weights:
            q = Rotate.apply(y @ w)
            y = torch.tanh(q * q)
        return list(torch.autograd.grad(y.sum(), weights))

    expected = step()
    manager = remat.CheckpointManager(memory_budget=0.85)
    with manager:
        for _ in range(4):
            assert equal(step(), expected)
    with (
        pytest.raises(remat.BudgetTooSmallError, match="at least"),
        remat.CheckpointManager(memory_budget=0.3),
    ):
        step()


def test_what_a_function_has_computed_afresh_is_recomputed() -> None:
    double = function(lambda ctx, q: q * 2.0, lambda ctx: 2.0)
    with remat.CheckpointProfiler() as profiler:
        x = torch.ones(3, requires_grad=True)
        remat.checkpoint(lambda x: double(double(x).sin()).sin(), x).sum().backward()
    assert profiler.regions[0].ops == 3
