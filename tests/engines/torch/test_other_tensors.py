"""Tensors that are not plain memory: subclasses, nested, quantised, opaque ones; collectives."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import remat

from .oracles import FACES, Programs, randn, same

programs = Programs()
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


class Renamed(torch.Tensor):
    """A subclass without an opinion."""


class Scaled(torch.Tensor):
    """A tensor without memory of its own, as quantised weights are: a number times another one."""

    @staticmethod
    def __new__(cls, inner, scale):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].inner, args[0].scale)

        def plain(value):
            return value.inner * value.scale if isinstance(value, Scaled) else value

        return func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})


@programs.starting_from(randn(2, 3))
def a_subclass_made_inside(run, x):
    def f(x):
        return ((x * 2).as_subclass(Renamed).sin() * x).as_subclass(torch.Tensor).exp()

    return run(f, x)


@programs.starting_from(randn(2, 3))
def weights_without_memory(run, x):
    weight = Scaled(torch.linspace(0, 1, 9).view(3, 3), 2.0)
    return run(lambda x: (x.sin() @ weight).sin() * 2, x)


@programs.starting_from(randn(5, 3))
def nested_tensors(run, x):
    def f(x):
        parts = [(x[:2] * 2).sin(), (x[2:] * 3).sin()]
        padded = torch.nested.to_padded_tensor(torch.nested.as_nested_tensor(parts) * 2, 0.0)
        return padded.exp() * 2

    return run(f, x)


@programs.starting_from(randn(5, 3))
def memory_of_onednn(run, x):
    return run(lambda x: (x * 2).to_mkldnn().relu().to_dense().exp() * x, x)


class TrainedForIntegers(nn.Module):
    """An observer that updates its statistics in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.observer = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(self.observer(x * 2)).sin()


@programs.starting_from(lambda: (TrainedForIntegers(), *randn(5, 3)()))
def rounding_to_integers(run, model, x):
    return run(model, x), run(model, x + 3)


@programs.starting_from(lambda: (nn.Embedding(7, 3, sparse=True), torch.tensor([1, 2, 1])))
def sparse_gradients(run, embedding, index):
    return run(lambda index: (embedding(index) * 2).sin().exp(), index)


@programs.starting_from(lambda: (nn.Linear(3, 3), *randn(5, 3)(), *randn(3, 3)()))
def parameters_given_to_a_module(run, model, x, w):
    def f(x, w):
        return torch.func.functional_call(model, {"weight": w * 2}, (x,)).sin().exp()

    return run(f, x, w)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, face) -> None:
    same(*programs[name], FACES[face])


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_other_modes(where) -> None:
    """Modes of users see the ops of the forward pass, each once."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    counted = []

    def f(x):
        if where == "outside":
            return model(model(x).sin())
        with FlopCounterMode(display=False) as counter:
            y = model(model(x).sin())
        counted.append(counter.get_total_flops())
        return y

    with FlopCounterMode(display=False) as counter:
        y = remat.checkpoint(f, x)
    y.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 8
    assert counted in ([], [2 * 2 * 4 * 8 * 8])


def test_kernels_that_work_with_conjugate_views_inside() -> None:
    """PyTorch switches these off inside of any mode; its own pinv then goes wrong."""
    x = torch.randn(3, 3, dtype=torch.complex128, requires_grad=True)
    assert torch.equal(remat.checkpoint(torch.linalg.pinv, x), torch.linalg.pinv(x))


def test_a_few_numbers_that_are_drawn_and_then_written_to() -> None:
    def f(x):
        return (x * torch.randn(3).clamp_(-1, 1)).sin()

    x = torch.randn(3, requires_grad=True)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    torch.manual_seed(0)
    (found,) = torch.autograd.grad(remat.checkpoint(f, x).sum(), x)
    assert torch.equal(found, expected)


def test_a_long_region_does_not_hold_what_is_over() -> None:
    """The batches of a training loop inside of a scope, say."""
    w = torch.randn(3, requires_grad=True)
    gone = []
    with remat.CheckpointScope("loop"):
        for _ in range(5000):
            x = torch.from_numpy(np.ones(3, np.float32))
            (x * w).sin().sum().backward()
            gone.append(weakref.ref(x.untyped_storage()))
            del x
        assert sum(storage() is not None for storage in gone) < 3000
