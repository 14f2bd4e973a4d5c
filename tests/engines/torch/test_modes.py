"""Dispatch modes of the program: around a region, inside of it, around the backward pass."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import remat

from .oracles import APIS, Programs, randn, same


class Tripled(TorchDispatchMode):
    """Changes what sin gives."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3 if func is torch.ops.aten.sin.default else out


class LooksOn(TorchDispatchMode):
    """Counts what sin is called for."""

    remat_looks_on = True

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


def waves(x):
    return x.sin().exp().sin().exp()


def four_regions(x):
    for _ in range(4):
        x = remat.checkpoint(waves, x)
    return x.sum()


programs = Programs()


@programs.starting_from(randn(3, 4))
def a_mode_around(run, x):
    with Tripled():
        return run(waves, x)


@programs.starting_from(randn(3, 4))
def a_mode_around_both_passes(run, x):
    with Tripled():
        y = run(waves, x)
        return torch.autograd.grad(y.sum(), x)


@programs.starting_from(randn(3, 4))
def a_mode_around_the_backward_pass(run, x):
    y = run(waves, x)
    with Tripled():
        return torch.autograd.grad(y.sum(), x)


@programs.starting_from(randn(3, 4))
def a_mode_inside(run, x):
    def f(x):
        with Tripled():
            y = waves(x)
        return waves(y)

    return run(f, x)


@programs.starting_from(randn(3, 4))
def a_mode_between_two_regions(run, x):
    def f(x):
        with Tripled():
            y = run(waves, x)
        return waves(y)

    return run(f, x)


@programs.starting_from(randn(3, 4))
def a_mode_around_one_of_two(run, x):
    with Tripled():
        y = run(waves, x)
    return run(waves, y)


@programs.starting_from(randn(3, 4))
def a_mode_around_that_sees_a_write(run, x):
    def f(x):
        y = x.sin()
        z = (y + 1).sin()
        y.mul_(2)
        return (z + y).exp()

    with Tripled():
        return run(f, x)


@programs.starting_from(randn(3, 4))
def a_mode_under_one_that_looks_on(run, x):
    with Tripled(), LooksOn():
        return run(waves, x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


def test_a_mode_that_may_change_ops_is_told_once_with_a_remedy() -> None:
    def told(x):
        return waves(x)

    x = torch.randn(3, requires_grad=True)
    with Tripled(), pytest.warns(remat.RematWarning, match="Tripled.*remat_looks_on = True"):
        remat.checkpoint(told, x)
    with Tripled(), warnings.catch_warnings():
        warnings.simplefilter("error")
        remat.checkpoint(told, x)


@pytest.mark.parametrize("mode", [LooksOn, lambda: FlopCounterMode(display=False)])
def test_a_mode_that_looks_on_changes_nothing(mode) -> None:
    x = torch.randn(3, requires_grad=True)
    with warnings.catch_warnings(), mode(), remat.CheckpointProfiler() as profiler:
        warnings.simplefilter("error")
        four_regions(x).backward()
    assert profiler.memory_saved() > 0
    assert profiler.recompute_count() == 4


def test_a_mode_that_looks_on_sees_what_the_program_calls() -> None:
    x = torch.randn(3, requires_grad=True)
    with LooksOn() as seen:
        remat.checkpoint(waves, x).sum().backward()
    assert seen.calls == 2  # what is run again in the backward pass is no call of the program


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_no_savings_are_claimed_where_all_is_held() -> None:
    x = torch.randn(3, requires_grad=True)
    with Tripled(), remat.CheckpointProfiler() as profiler:
        four_regions(x).backward()
    assert profiler.memory_saved() == 0
    assert profiler.recompute_count() == 0


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_single_tensors_where_all_is_held() -> None:
    x = torch.randn(3, requires_grad=True)
    with Tripled(), remat.CheckpointScope("held") as scope:
        y = remat.checkpoint(remat.mark_checkpoint(x.sin()))
    assert scope.nodes == []
    assert torch.equal(y, 3 * x.sin())
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, x.cos())  # autograd knows nothing of the mode below it


@pytest.mark.parametrize("api", APIS)
def test_a_loop_in_a_region_under_a_mode_sees_the_mode(api) -> None:
    """The region steps aside for the loop, the mode does not."""

    def f(x):
        with LooksOn() as seen:
            out, _ = remat.checkpointed_loop(lambda s: s.sin(), x.exp(), seq_length=3)
        return out, seen.calls

    _, calls = APIS[api](f, torch.randn(3, requires_grad=True))
    assert calls == 3


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def of_masked_fill() -> list[torch.Tensor]:
    x = torch.linspace(-1.0, 1.0, 64 * 257).view(64, 257)
    value = torch.tensor(0.5, requires_grad=True)
    return list(torch.autograd.grad((x.masked_fill(x.sin() > 0.1, value) * x.cos()).sum(), value))


def of_prod() -> list[torch.Tensor]:
    x = torch.linspace(-1.5, 1.7, 64 * 7).view(64, 7).requires_grad_()
    return list(torch.autograd.grad(x.prod(1).sin().sum(), x))


def of_lstsq() -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    a = torch.randn(9, 5, dtype=torch.cfloat, generator=numbers).requires_grad_()
    b = torch.randn(9, 3, dtype=torch.cfloat, generator=numbers)
    return list(torch.autograd.grad(torch.linalg.lstsq(a, b).solution.abs().sum(), a))


AROUND = [
    remat.CheckpointProfiler,
    lambda: remat.CheckpointManager(memory_budget="1GB"),
    lambda: remat.CheckpointScope("around"),
]


@pytest.mark.parametrize("formula", [of_masked_fill, of_prod])
@pytest.mark.parametrize("around", AROUND)
def test_formulas_that_ask_for_modes_give_what_they_give_under_an_empty_one(
    formula, around
) -> None:
    """docs/pytorch.md lists them: in backward under a mode, their last bits are others."""
    with Nothing():
        expected = formula()
    with around():
        found = formula()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("around", AROUND)
def test_conjugates_inside_of_kernels_while_backward_runs_in_a_mode(around) -> None:
    """Under an empty mode PyTorch's own gradient of complex least squares is wrong."""
    expected = of_lstsq()
    with around():
        found = of_lstsq()
    torch.testing.assert_close(found, expected)
