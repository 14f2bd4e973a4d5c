"""Tensors and passes that once made a region fail."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import remat

from .oracles import APIS, Programs, plain, same

programs = Programs()
FORGETTING = ["segment", "scope", "nested", "group"]


@programs.starting_from(lambda: (torch.linspace(0.1, 1.0, 16).reshape(4, 4).requires_grad_(),))
def a_compressed_sparse_leaf(run, x):
    sparse = (torch.eye(4) * 2).to_sparse_csr().requires_grad_()
    return run(lambda x: torch.sin(sparse @ x.exp()) + sparse @ x, x)


def complex_leaf():
    return (torch.linspace(0.1, 1.0, 4).requires_grad_(),)


@programs.starting_from(complex_leaf)
def a_gradient_of_a_complex_function(run, x):
    def f(x):
        z = torch.complex(x.exp(), x)
        y = (z * z.conj() * (2 + 1j)).abs().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return (g**2).sum()

    return run(f, x)


@programs.starting_from(complex_leaf)
def a_gradient_in_the_middle(run, x):
    """A pass that builds no graph, inside of a region: what follows is right all the same."""

    def f(x):
        y = x.exp().sin()
        (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return (y * g).cos() + x.exp()

    return run(f, x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


@pytest.mark.parametrize("api", APIS)
def test_a_gradient_of_a_complex_function_in_double(api) -> None:
    """The number keeps its 53 bits. (Under any dispatch mode the last one may differ.)"""

    def f(x):
        z = torch.complex(x.exp(), x) * (0.1 + 0.3j)
        (g,) = torch.autograd.grad(torch.view_as_real(z).prod(-1).sum(), x, create_graph=True)
        return (g**2).sum()

    x = torch.linspace(0.1, 1.0, 4).double().requires_grad_()
    (found,) = torch.autograd.grad(APIS[api](f, x), x)
    (expected,) = torch.autograd.grad(f(x), x)
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("api", APIS)
def test_parameters_of_inference_mode(api) -> None:
    with torch.inference_mode():
        linear = nn.Linear(4, 4)

    def f(x):
        with torch.no_grad():
            mask = linear(x)
        return (x.exp() * mask).sin()

    def gradient(run) -> Tensor:
        x = torch.linspace(0.1, 1.0, 8).reshape(2, 4).requires_grad_()
        run(f, x).sum().backward()
        return x.grad

    assert torch.equal(gradient(APIS[api]), gradient(plain))


@pytest.mark.parametrize("api", APIS)
def test_dropout_of_a_meta_tensor(api) -> None:
    x = torch.randn(2, 2, device="meta", requires_grad=True)
    APIS[api](lambda x: F.dropout(x.exp(), 0.5).sin(), x).sum().backward()
    assert x.grad.shape == (2, 2)


# -- a parameter whose memory was freed ------------------------------------------------------------

USES = {
    "weight": lambda m, x: m(x.exp()).sin(),
    "view of it": lambda m, x: (x.exp() @ m.weight[:2].t()).sin(),
    "transposed": lambda m, x: (x.exp() @ m.weight.t()).sin(),
}


@pytest.mark.parametrize("api", FORGETTING)
@pytest.mark.parametrize("use", USES)
def test_a_parameter_whose_memory_was_freed(use, api) -> None:
    linear = nn.Linear(4, 4)
    y = APIS[api](functools.partial(USES[use], linear), torch.ones(2, 4, requires_grad=True))
    linear.weight.untyped_storage().resize_(0)
    with pytest.raises(remat.ModifiedInputError, match=r"\[4, 4\].*freed.*each sharded module"):
        y.sum().backward()


# -- scopes that are closed out of order -----------------------------------------------------------


def test_scopes_closed_out_of_order_around_hooks_of_the_program() -> None:
    x = torch.linspace(0.1, 1.0, 4).requires_grad_()
    outer, inner = remat.CheckpointScope("outer"), remat.CheckpointScope("inner")
    packed = []
    hooks = saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    outer.__enter__()
    hooks.__enter__()
    inner.__enter__()
    y = x.exp().sin()
    outer.__exit__(None, None, None)
    z = y.exp()  # the hooks of the program are on, and nothing else is
    assert len(packed) == 1
    hooks.__exit__()
    inner.__exit__(None, None, None)
    z.sum().backward()
    expected = torch.autograd.grad(x.exp().sin().exp().sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_a_mode_that_was_entered_inside_stays_on() -> None:
    class Counting(TorchDispatchMode):
        remat_looks_on = True
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    scope, mode = remat.CheckpointScope("scope"), Counting()
    x = torch.linspace(0.1, 1.0, 4).requires_grad_()
    scope.__enter__()
    mode.__enter__()
    y = x.exp().sin()
    scope.__exit__(None, None, None)
    before = mode.seen
    y.cos()
    assert mode.seen == before + 1
    mode.__exit__(None, None, None)
    y.sum().backward()
    assert torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())


# -- limits of PyTorch itself, documented ----------------------------------------------------------


class Named(Tensor):
    pass


class Nothing(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_a_mode_that_does_nothing(f, *args):
    with Nothing():
        return f(*args)


def test_a_subclass_is_not_made_by_its_constructor_under_any_mode() -> None:
    """PyTorch's own limit; `as_subclass` is the way."""

    def f(x):
        return x.exp() * Named(torch.ones(2))

    def g(x):
        return (x.exp() * torch.ones(2).as_subclass(Named)).as_subclass(Tensor).sin()

    x = torch.ones(2, requires_grad=True)
    for run in (under_a_mode_that_does_nothing, remat.checkpoint):
        with pytest.raises(RuntimeError, match="already associated to a python object"):
            run(f, x)
    remat.checkpoint(g, x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(g(x).sum(), x)[0])


def smoothed_loss():
    torch.manual_seed(3)
    logits, target = torch.randn(64, 40), torch.randint(0, 40, (64,))
    target[::3] = -100
    weight = torch.rand(40)
    return lambda x: F.cross_entropy(x, target, weight=weight, label_smoothing=0.1), logits


def bilinear():
    torch.manual_seed(3)
    layer = nn.Bilinear(8, 8, 8)

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x.exp(), x.exp()).float()

    return f, torch.randn(4, 8)


def lstm_without_grad():
    torch.manual_seed(3)
    lstm = nn.LSTM(8, 16, 2)

    def f(x):
        with torch.no_grad():
            noise = lstm(x)[0]
        return x.exp().sum() * noise

    return f, torch.randn(5, 3, 8)


@pytest.mark.parametrize("make", [smoothed_loss, bilinear, lstm_without_grad])
def test_what_pytorch_computes_otherwise_under_any_dispatch_mode(make) -> None:
    """A few composite ops ask whether a mode is on and take another way: remat gives that value."""
    f, x = make()

    def result(run) -> tuple[Tensor, Tensor]:
        given = x.clone().requires_grad_()
        out = run(f, given)
        out.sum().backward()
        return out.detach(), given.grad

    value, gradient = result(remat.checkpoint)
    expected, expected_gradient = result(under_a_mode_that_does_nothing)
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected_gradient)
    near, near_gradient = result(plain)
    assert torch.allclose(value, near, rtol=0.05, atol=0.05)
    assert torch.allclose(gradient, near_gradient, rtol=0.05, atol=0.05)
