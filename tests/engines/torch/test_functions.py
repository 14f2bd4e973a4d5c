"""Custom autograd functions and custom ops inside of a region."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import remat

from .oracles import APIS, Programs, randn, same

programs = Programs()
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")


class SavesInputs(Function):
    @staticmethod
    def forward(ctx, x, w):
        h = (x * w).sin()
        ctx.save_for_backward(x, w, h)
        return h * 2

    @staticmethod
    def backward(ctx, grad):
        x, w, h = ctx.saved_tensors
        slope = 2 * grad * (1 - h * h).clamp_min(0).sqrt()
        return slope * w, slope * x


class SavesOutput(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y


class DataOnContext(Function):
    @staticmethod
    def forward(ctx, x, power):
        ctx.power = power
        ctx.slope = power * x ** (power - 1)  # a tensor, not saved in the way that it should be
        return x**power

    @staticmethod
    def backward(ctx, grad):
        assert ctx.power == 3
        return grad * ctx.slope, None


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2).exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * 2


class WithIndices(Function):
    @staticmethod
    def forward(ctx, x):
        values, indices = x.sort(1)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, none):
        assert none is None
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(1, indices, grad)


class NewStyle(Function):
    @staticmethod
    def forward(x, w):
        return x @ w, x.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad, grad_sum):
        x, w = ctx.saved_tensors
        return grad @ w.t() + grad_sum, x.t() @ grad


class Straight(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class ViaNumpy(Function):
    @staticmethod
    def forward(ctx, x):
        array = x.detach().numpy()
        ctx.save_for_backward(torch.from_numpy(array * 2))
        return torch.from_numpy(array**2)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


@programs.starting_from(lambda: (*randn(4, 3)(), *randn(3)()))
def saves_inputs(run, x, w):
    return run(lambda x, w: SavesInputs.apply(SavesInputs.apply(x * 2, w).sin(), w).exp(), x, w)


@programs.starting_from(randn(4, 3))
def saves_output(run, x):
    return run(lambda x: SavesOutput.apply(SavesOutput.apply(x * 0.5).sin()) * x, x)


@programs.starting_from(randn(4, 3))
def data_on_context(run, x):
    return run(lambda x: DataOnContext.apply(x.sin(), 3).exp(), x)


@programs.starting_from(randn(4, 3))
def marked_dirty(run, x):
    def f(x):
        h = x * 0.5
        h = InPlace.apply(h)
        return h.sin(), (InPlace.apply(x * 0.1) * h).cos()

    return run(f, x)


@programs.starting_from(randn(4, 3))
def not_differentiable(run, x):
    def f(x):
        values, indices = WithIndices.apply(x.sin())
        return values.exp(), indices, x.gather(1, indices).sin()

    return run(f, x)


@programs.starting_from(lambda: (*randn(4, 3)(), *randn(3, 3)()))
def context_set_up_afterwards(run, x, w):
    def f(x, w):
        h, total = NewStyle.apply(x * 2, w.sin())
        return h.sin() * total, h.exp()

    return run(f, x, w)


@programs.starting_from(randn(4, 3))
def straight_through(run, x):
    return run(lambda x: (Straight.apply(x * 5) * x).sin(), x)


@programs.starting_from(randn(4, 3))
def via_numpy(run, x):
    return run(lambda x: ViaNumpy.apply((x * 2).sin()).exp(), x)


@programs.starting_from(randn(4, 3))
def saved_for_forward_mode_too(run, x):
    def f(x):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual((x * 2).sin(), torch.ones_like(x))
            primal, tangent = torch.autograd.forward_ad.unpack_dual(dual.exp() * x)
            return primal * 1, tangent * 1

    return run(f, x)


# -- custom ops ------------------------------------------------------------------------------------

calls: list[str] = []


def _shift(x, by):
    calls.append("shift_")
    x.add_(by)


library = torch.library.Library("remat_tests", "FRAGMENT")
library.define("twice(Tensor x) -> Tensor")
library.define("shift_(Tensor(a!) x, float by) -> ()")
library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
library.impl("shift_", _shift, "CPU")
torch.library.register_autograd("remat_tests::twice", lambda ctx, g: g * 2, lib=library)


@programs.starting_from(randn(4, 3))
def custom_op(run, x):
    return run(lambda x: torch.ops.remat_tests.twice(x.sin()).exp() * x, x)


@programs.starting_from(randn(4, 3))
def custom_op_that_writes(run, x):
    def f(x):
        h = x.detach() * 2
        a = (x * h.abs()).sin()
        torch.ops.remat_tests.shift_(h, 3.0)
        return a, (x * h.abs()).cos()

    return run(f, x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


def test_a_custom_op_is_not_run_again() -> None:
    """Nobody can tell what it does besides; so what it made is held."""
    calls.clear()
    x = torch.randn(4, 3).requires_grad_()

    def f(x):
        h = x.detach() * 2
        torch.ops.remat_tests.shift_(h, 3.0)
        return (x * h.abs()).cos()

    remat.checkpoint(f, x).sum().backward()
    assert calls == ["shift_"]


def test_the_forward_of_a_function_runs_once() -> None:
    runs = []

    class Counted(Function):
        @staticmethod
        def forward(ctx, x):
            runs.append("forward")
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            runs.append("backward")
            return grad * ctx.saved_tensors[0].cos()

    x = torch.randn(3).requires_grad_()
    remat.checkpoint(lambda x: Counted.apply(x * 2).exp(), x).sum().backward()
    assert runs == ["forward", "backward"]


def test_second_derivatives_of_a_function() -> None:
    def program(run, x):
        y = run(lambda x: SavesOutput.apply(x * 2).sin(), x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return g * 2

    same(program, randn(4), remat.checkpoint)
