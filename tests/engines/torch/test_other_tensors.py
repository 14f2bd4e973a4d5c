"""Tensors that are not plain memory: subclasses, nested, quantised, opaque ones; collectives."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import remat

from .oracles import APIS, Programs, randn, same

programs = Programs()
pytestmark = [
    pytest.mark.usefixtures("another_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*[Qq]uantize:UserWarning"),
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


class Doubling(torch.Tensor):
    """A tensor over the memory of another one, with its own idea of multiplication."""

    @staticmethod
    def __new__(cls, other):
        return torch.Tensor._make_subclass(cls, other)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            plain = [
                torch.Tensor._make_subclass(torch.Tensor, arg) if isinstance(arg, cls) else arg
                for arg in args
            ]
        out = func(*plain, **(kwargs or {}))
        if func is torch.ops.aten.detach.default:
            return cls(out)
        return out * 2 if func is torch.ops.aten.mul.Tensor else out


class Wrapper(torch.Tensor):
    """A tensor that passes all on to another one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        if func is torch.ops.aten.mul_.Tensor:
            return args[0]
        return cls(out) if func is torch.ops.aten.detach.default else out


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


def jagged(values):
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))


@programs.starting_from(randn(5, 3))
def jagged_tensors(run, x):
    def f(x):
        h = jagged((x * 2).sin())
        h = (h * h).sin()
        return h.values().exp(), torch.nested.to_padded_tensor(h * 2, 0.0).sin()

    return run(f, x)


@programs.starting_from(lambda: (*randn(5, 3)(), *randn(3, 3)()))
def modules_on_jagged_tensors(run, x, w):
    def f(x):
        parts = [x[:2].sin(), x[2:].cos()]
        h = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        h = nn.functional.layer_norm(nn.functional.linear(h.sin(), w), (3,))
        h = nn.functional.dropout(torch.where(h > 0, h, -h), 0.5)
        return [part.sin().exp() for part in h.softmax(-1).unbind()]

    return run(f, x)


@programs.starting_from(randn(5, 4))
def attention_on_jagged_tensors(run, x):
    def f(x):
        q = jagged((x * 2).sin()).unflatten(-1, [2, 2]).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(q, q.sin(), q.cos())
        return out.transpose(1, 2).flatten(-2).values().sin()

    return run(f, x)


@programs.starting_from(randn(5, 3))
def a_subclass_over_memory_that_is_known(run, x):
    """Autograd gets back the very class that it saved, which multiplies in its own way."""

    def f(x):
        h = torch.empty(5, 3).copy_(x.detach().sin())
        odd = Doubling(h)
        return ((odd * x).sin() * x).exp(), (h * x).sin()

    return run(f, x)


@programs.starting_from(randn(5, 3))
def a_wrapper_is_written_to(run, x):
    """What it wraps changes with it, and nobody counts that."""

    def f(x):
        h = (x.detach() * 2).sin()
        wrapper = Wrapper(h)
        before = (h.exp() * x).sin()
        wrapper.mul_(3)
        return before, (h * x).sin(), (wrapper * x).cos()

    return run(f, x)


def sparse_coo(values):
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 0, 2]]), values, (3, 3))


def sparse_csr(values):
    return torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 2]), values, (3, 3)
    )


@programs.starting_from(randn(3, 3))
def sparse_tensors(run, x):
    def f(x):
        matrix = sparse_coo((x[0] * 2).sin()).coalesce()
        return torch.sparse.mm(matrix, x.sin()).exp(), (matrix * 2 + matrix).to_dense().sin()

    return run(f, x)


@programs.starting_from(randn(3, 3))
def sparse_tensors_whose_parts_are_written_to(run, x):
    """They count their writes by themselves: neither shows in the other's version."""
    outside = torch.ones(3)
    matrix = sparse_coo(outside)

    def f(x):
        results = []
        for make in (sparse_coo, sparse_csr):
            values = (x[0].detach() * 2).sin()
            made = make(values)
            for tensor in (values, made.values() if make is sparse_csr else made, outside):
                before = [(m @ x.detach() * x).sin() for m in (made, matrix)]
                tensor.mul_(2)
                results += [*before, (values.exp() * x).sin(), (made.to_dense() * x).exp()]
        return results

    return run(f, x)


@programs.starting_from(randn(3, 3))
def a_sparse_tensor_is_written_to(run, x):
    def f(x):
        values = (x[0].detach() * 2).sin()
        matrix = sparse_csr(values)
        before = values.exp() * x, matrix.to_dense() * x
        matrix.mul_(2)
        return [h.sin() for h in (*before, values * x, matrix.to_dense() * x)]

    return run(f, x)


@programs.starting_from(randn(5, 3))
def integers_for_numbers(run, x):
    def f(x):
        q = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
        h = (q.t().dequantize().t() * x).sin()
        return h, (q[1:].dequantize() * x[1:]).exp(), (q.int_repr() * x).cos()

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


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


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
            w.grad = None
            del x
        assert sum(storage() is not None for storage in gone) < 3000


# -- under a budget --------------------------------------------------------------------------------


def nested(layout: torch.layout) -> Any:
    def make(w: torch.Tensor) -> torch.Tensor:
        given = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=layout)
        h = functional.gelu(functional.linear(given, w))
        return torch.nested.to_padded_tensor(functional.gelu(functional.linear(h, w)), 0.0)

    return make


def convolution_of(wrap: Any) -> Any:
    image, kernel = torch.randn(2, 1, 16, 16), torch.ones(4, 1, 3, 3)

    def make(w: torch.Tensor) -> torch.Tensor:
        h = functional.conv2d(wrap(image), wrap(kernel).requires_grad_()).relu() * 2
        return (getattr(h, "a", h).mean() * w).sin()

    return make


def an_expert_without_tokens(w: torch.Tensor) -> torch.Tensor:
    return torch.cat([(torch.ones(rows, 8) @ w).sin().cos().exp() for rows in (0, 256)])


UNDER_A_BUDGET = {
    "jagged": nested(torch.jagged),
    "nested": nested(torch.strided),
    "wrapper": convolution_of(lambda t: TwoTensor(t, t.clone())),
    "subclass": convolution_of(lambda t: t.as_subclass(Renamed)),
    "empty": an_expert_without_tokens,
}


@pytest.mark.parametrize("program", UNDER_A_BUDGET.values(), ids=UNDER_A_BUDGET)
def test_a_budget_with_other_tensors(program) -> None:
    w = torch.randn(8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(program(w).sum(), w)
    budget = 52_000 if program is an_expert_without_tokens else 80_000  # not all of it fits
    with remat.CheckpointManager(memory_budget=budget) as manager:
        for _ in range(3):
            (found,) = torch.autograd.grad(program(w).sum(), w)
            assert torch.equal(found, expected)
    assert manager.last_pass is not None


def test_a_model_with_a_budget_takes_nested_tensors() -> None:
    model = remat.auto_checkpoint(nn.Linear(8, 8), memory_budget="1MB")
    given = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)])
    for _ in range(3):
        torch.nested.to_padded_tensor(model(given), 0.0).sum().backward()
    assert model.bias.grad.sum() == 3 * 8 * 8


def test_parameters_can_be_swapped_after_a_fused_optimizer() -> None:
    model, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with remat.CheckpointManager(memory_budget="1MB"):
        for _ in range(2):
            model(torch.ones(4, 8)).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    weight = model.weight.detach().clone()
    torch.utils.swap_tensors(model.weight, other.weight)
    assert torch.equal(other.weight, weight)
