"""Hooks of users: each fires as often as without remat, with the same values."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import remat

from .oracles import APIS, bits, plain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).sin()).tanh()


def events(run, net: Net, x: torch.Tensor, attach) -> list[tuple[str, torch.Tensor]]:
    """Return what hooks saw, in order."""
    seen: list[tuple[str, torch.Tensor]] = []

    def note(name, *tensors):
        seen.extend((name, tensor.detach().clone()) for tensor in tensors if tensor is not None)

    attach(net, x, note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.RematWarning)
        y = run(net, x)
    y.sum().backward()
    return seen


def on_modules(net, x, note):
    for name, module in net.named_modules():
        module.register_forward_pre_hook(lambda m, args, n=name: note(f"before {n}", *args))
        module.register_forward_hook(lambda m, args, out, n=name: note(f"after {n}", out))


def on_modules_backward(net, x, note):
    for name, module in net.named_modules():
        module.register_full_backward_pre_hook(lambda m, out, n=name: note(f"before {n}", *out))
        module.register_full_backward_hook(lambda m, g, out, n=name: note(f"after {n}", *g, *out))


def that_change_things(net, x, note):
    net.first.register_forward_hook(lambda m, args, out: out * 2)
    net.second.register_full_backward_hook(lambda m, g, out: tuple(2 * t for t in g))
    net.register_forward_pre_hook(lambda m, args: (args[0].sin(),))
    x.register_hook(lambda g: note("x", g))


def on_parameters(net, x, note):
    for name, p in net.named_parameters():
        p.register_hook(lambda g, n=name: note(n, g))
        p.register_post_accumulate_grad_hook(lambda p, n=name: note(f"after {n}", p.grad))


def on_tensors_inside(net, x, note):
    def hook(module, args, out):
        out.retain_grad()
        out.register_hook(lambda g: note("out", g))
        out.grad_fn.register_hook(lambda gi, go: note("node", *go))
        out.grad_fn.register_prehook(lambda go: note("before node", *go))

    net.first.register_forward_hook(hook)


@pytest.mark.parametrize(
    "attach",
    [on_modules, on_modules_backward, that_change_things, on_parameters, on_tensors_inside],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("api", APIS)
def test_hooks_fire_as_without_remat(api, attach) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 3).requires_grad_()
    other, y = copy.deepcopy(net), x.detach().clone().requires_grad_()
    expected = events(plain, net, x, attach)
    found = events(APIS[api], other, y, attach)
    assert expected
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, one), (_, two) in zip(found, expected, strict=True):
        assert torch.equal(bits(one), bits(two)), name
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("api", APIS)
def test_an_optimizer_step_in_a_parameter_hook(api) -> None:
    """Parameters are updated while the pass is on its way: each is ready once, when it is done."""
    torch.manual_seed(0)
    nets = [nn.ModuleList(Net() for _ in range(3))]
    nets.append(copy.deepcopy(nets[0]))
    for net, run in zip(nets, (plain, APIS[api]), strict=True):

        def step(p):
            with torch.no_grad():
                p -= 0.1 * p.grad
            p.grad = None

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        h = torch.linspace(-1, 1, 12).view(4, 3)
        for layer in net:
            h = run(layer, h)
        h.sum().backward()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_retained_gradients_of_outputs_and_values_inside() -> None:
    grads = []
    for run in (plain, remat.checkpoint):
        x = torch.linspace(-1, 1, 5).requires_grad_()
        kept = []

        def f(x, kept=kept):
            h = (x * 2).sin()
            h.retain_grad()
            kept.append(h)
            return h.exp()

        y = run(f, x)
        y.retain_grad()
        (y * y).sum().backward()
        grads.append((x.grad, kept[0].grad, y.grad))
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)
