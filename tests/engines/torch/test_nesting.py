"""Regions inside of regions, and other people's hooks and checkpoints inside and outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat

from .oracles import APIS, Programs, randn, same

programs = Programs()


def deep(run, x, depth):
    """A tree of regions: each does something before, between and after its two inner ones."""
    if depth == 0:
        return F.dropout(x.sin() * 1.1, 0.1)
    h = (x * 1.1).sin()
    h = run(deep, run, h, depth - 1)
    k = h.exp() * x
    k = run(deep, run, k.clamp(max=2), depth - 1)
    return k.cos() + h


@programs.starting_from(randn(4, 3))
def a_tree_of_regions(run, x):
    return run(deep, run, x, 3)


@programs.starting_from(randn(30, 50))
def a_tree_of_larger_regions(run, x):
    return run(deep, run, x, 2)


@programs.starting_from(randn(4, 3))
def a_chain_inside_of_a_region(run, x):
    def chain(x):
        for _ in range(4):
            x = run(lambda x: (x * 2).sin().exp(), x)
        return x

    return run(chain, x), run(chain, x.cos())


@programs.starting_from(randn(4, 3))
def inner_values_used_outside_of_the_inner_region(run, x):
    def outer(x):
        kept = []

        def inner(x):
            h = (x * 2).sin()
            kept.append(h)
            return h.exp()

        y = run(inner, x.cos())
        return y * kept[0], kept[0].exp()

    return run(outer, x)


@programs.starting_from(randn(4, 3))
def values_of_a_region_used_in_a_later_one(run, x):
    kept = []

    def first(x):
        h = (x * 2).sin()
        kept.append(h)
        return h.exp() * 2

    def second(y):
        return (y * kept[0]).sin() * kept[0].exp()

    return run(second, run(first, x)), kept[0].cos()


@programs.starting_from(randn(4, 3))
def writes_across_regions(run, x):
    def outer(x):
        h = x * 2

        def inner(h):
            h.mul_(3)
            return h.sin() * 2

        a = run(inner, h)
        k = h * 1
        k.add_(1)
        return a * 2, run(lambda k: k.exp().sin(), k)

    return run(outer, x)


@programs.starting_from(randn(4, 3))
def only_the_inner_region(run, x):
    def outer(x):
        return run(lambda x: (x.sin() * 2).exp(), x)

    return run(outer, x)


@programs.starting_from(lambda: (*randn(4, 3)(), *randn(4, 3)()))
def an_inner_region_without_gradients(run, x, w):
    def outer(x):
        with torch.no_grad():
            scale = run(lambda w: (w * 2).sin().abs(), w)
        return run(lambda x: (x * scale).sin() * scale, x)

    return run(outer, x)


# -- checkpoints of torch --------------------------------------------------------------------------


def torchs(fn, *args):
    return torch_checkpoint(fn, *args, use_reentrant=False)


def torchs_reentrant(fn, *args):
    return torch_checkpoint(fn, *args, use_reentrant=True)


def inner_function(x):
    return F.dropout((x * 2).sin(), 0.2).exp()


@pytest.mark.parametrize("other", [torchs, torchs_reentrant])
@pytest.mark.parametrize("api", APIS)
def test_a_checkpoint_of_torch_inside(api, other) -> None:
    def program(run, x):
        def outer(x):
            return other(inner_function, x.cos()) * other(inner_function, x.sin()) * 2

        return run(outer, x).sin()

    same(program, randn(4, 3), APIS[api])


@pytest.mark.parametrize("other", [torchs, torchs_reentrant])
@pytest.mark.parametrize("api", APIS)
def test_a_checkpoint_of_torch_outside(api, other) -> None:
    def program(run, x):
        def outer(x):
            return run(inner_function, x.cos()) * run(inner_function, x.sin()) * 2

        return other(outer, x).sin()

    same(program, randn(4, 3), APIS[api])


# PyTorch 2.15 says that a later version will show such tensors to hooks, as those of regions are.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
def test_selective_checkpoints_of_torch() -> None:
    from torch.utils import checkpoint as module  # noqa: PLC0415

    def contexts():
        return module.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    def program(run, x):
        def outer(x):
            inner = module.checkpoint(
                inner_function, x.cos(), use_reentrant=False, context_fn=contexts
            )
            return run(inner_function, inner) * 2

        return run(outer, x)

    same(program, randn(4, 3), remat.checkpoint)


# -- hooks on what autograd saves ------------------------------------------------------------------


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("api", APIS)
def test_other_hooks_on_saved_tensors(api, where) -> None:
    def program(run, x):
        def f(x):
            if where == "outside":
                return (x * 2).sin().exp()
            h = (x * 2).sin()
            with save_on_cpu():
                h = (h * 3).exp()
            with saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
                h = h.cos()
            return h.sin() * h

        if where == "inside":
            return run(f, x)
        with save_on_cpu(), saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
            return run(f, x).sin()

    same(program, randn(4, 3), APIS[api])


def test_hooks_of_the_user_see_what_is_outside_of_regions() -> None:
    seen = []
    x = torch.randn(3).requires_grad_()
    with saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        y = remat.checkpoint(lambda x: (x * 2).sin(), x).exp()
        assert len(seen) == 1
    y.sum().backward()


# -- scopes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", programs)
@pytest.mark.parametrize("api", APIS)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


@pytest.mark.parametrize("outer", APIS)
@pytest.mark.parametrize("inner", APIS)
def test_every_face_in_every_other(inner, outer) -> None:
    def program(run, x):
        inside = APIS[inner] if run is APIS[outer] else run

        def f(x):
            h = (x * 2).sin()
            h = inside(lambda h: F.dropout(h * x, 0.3).exp().sin(), h)
            return h * 2, inside(lambda h: (h * 3).cos() * h, h.exp())

        return run(f, x)

    same(program, randn(6, 5), APIS[outer])


def test_a_scope_can_be_entered_again() -> None:
    scope = remat.CheckpointScope("again")

    def program(run, x):
        def layers(x):
            for _ in range(3):
                with scope:
                    x = (x * 2).sin().exp()
            return x

        def plainly(x):
            for _ in range(3):
                x = (x * 2).sin().exp()
            return x

        return (layers if run is remat.checkpoint else plainly)(x)

    same(program, randn(4), remat.checkpoint)


def test_a_scope_inside_of_itself() -> None:
    scope = remat.CheckpointScope("self")
    x = torch.randn(4).requires_grad_()
    with scope:
        h = (x * 2).sin()
        with scope:
            h = h.exp().cos()
        h = (h * x).sin()
    h.sum().backward()
    found, x.grad = x.grad, None
    (((x * 2).sin().exp().cos() * x).sin()).sum().backward()
    assert torch.equal(found, x.grad)


def test_a_disabled_scope_does_nothing() -> None:
    with remat.CheckpointScope("off", enabled=False) as scope:
        assert _get_current_dispatch_mode_stack() == []
        with scope:
            assert _get_current_dispatch_mode_stack() == []
    assert scope.nodes == []
    assert not scope.is_enabled


def test_modules_in_modules() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, run, x):
            def f(x):
                h = run(nn.Sequential(self.first, nn.Tanh(), self.norm), x)
                return run(self.second, h.sin()) * run(self.first, h)

            return run(f, x)

    same(lambda run, m, x: m(run, x), lambda: (Outer(), torch.randn(4, 3)), APIS["nested"])
