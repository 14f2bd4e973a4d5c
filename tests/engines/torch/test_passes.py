"""Several backward passes, parts of one, derivatives of derivatives, gradients off and on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat

from .oracles import APIS, Programs, backward, randn, same, seed_of

programs = Programs()


def layers(x):
    h = F.dropout((x * 2).sin(), 0.2)
    return h.exp() * h, (x.cos() * h).tanh()


# -- several passes --------------------------------------------------------------------------------


@programs.starting_from(randn(4, 3))
def the_same_graph_three_times(run, x):
    y = run(layers, x)
    for _ in range(2):
        backward(list(y), retain_graph=True)
    return y


@programs.starting_from(randn(4, 3))
def one_output_after_the_other(run, x):
    a, b = run(layers, x)
    backward([a], retain_graph=True)
    return b


@programs.starting_from(lambda: (*randn(4, 3)(), *randn(3, 3)()))
def a_subset_of_the_inputs(run, x, w):
    def f(x, w):
        h = (x.sin() @ w).exp()
        return h * x, (h * 2).sin()

    y = run(f, x, w)
    (first,) = torch.autograd.grad(y, w, [seed_of(out) for out in y], retain_graph=True)
    (second,) = torch.autograd.grad(y, x, [seed_of(out) for out in y], retain_graph=True)
    return first, second, y


@programs.starting_from(randn(4, 3))
def with_respect_to_a_value_inside(run, x):
    kept = []

    def f(x):
        h = (x * 2).sin()
        kept.append(h)
        return (h.exp() * h).cos()

    y = run(f, x)
    (inside,) = torch.autograd.grad(y, kept[0], seed_of(y), retain_graph=True)
    return inside, y


@programs.starting_from(randn(4, 3))
def accumulated(run, x):
    for n in range(3):
        backward(list(run(layers, x * n)))
    return run(layers, x)


@programs.starting_from(lambda: (*randn(4, 3)(), *randn(4, 3)()))
def passes_in_turn(run, x, w):
    """Two graphs over the same regions, walked back in the wrong order and at the same time."""
    a = run(layers, x * w)
    b = run(layers, x + w)
    backward([a[0]], retain_graph=True)
    backward([b[1], a[1]], retain_graph=True)
    return b


@programs.starting_from(randn(4, 3))
def inputs_of_a_backward_pass(run, x):
    y = run(layers, x * 1.5)
    torch.autograd.backward(y, [seed_of(out) for out in y], inputs=[x])
    return x.grad.clone()


@programs.starting_from(randn(4, 3))
def many_gradients_at_once(run, x):
    y = run(layers, x)[0]
    seeds = torch.eye(12).view(12, 4, 3)
    (batched,) = torch.autograd.grad(y, x, seeds, is_grads_batched=True)
    return batched


# -- derivatives of derivatives --------------------------------------------------------------------


@programs.starting_from(randn(4, 3))
def second_derivatives(run, x):
    y = run(layers, x)
    (g,) = torch.autograd.grad(y, x, [seed_of(out) for out in y], create_graph=True)
    return g.sin(), y


@programs.starting_from(randn(4))
def third_derivatives(run, x):
    y = run(lambda x: (x * 2).sin().exp() * x, x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
    return h * 2


@programs.starting_from(lambda: (nn.Linear(3, 3), torch.randn(4, 3).requires_grad_()))
def gradient_penalty(run, model, x):
    y = run(lambda x: model(model(x).sin()).tanh(), x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y, (g.norm(dim=1) - 1).square()


@programs.starting_from(lambda: (nn.Linear(3, 3), torch.randn(4, 3).requires_grad_()))
def gradient_penalty_in_a_region(run, model, x):
    def f(x):
        y = model(model(x).sin()).tanh()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, (g.norm(dim=1) - 1).square()

    return run(f, x)


@programs.starting_from(randn(4, 3))
def checkpointed_gradients_of_checkpointed_functions(run, x):
    def penalty(x):
        y = run(lambda x: (x * 2).sin().exp(), x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (g * g).sin()

    return run(penalty, x)


@programs.starting_from(randn(4, 3))
def hessian(run, x):
    def f(v):
        return run(lambda v: (v * 2).sin().exp().sum() ** 2, v)

    return torch.autograd.functional.hessian(f, x.detach()[0]).requires_grad_() * x[0]


# -- backward passes inside of a region ------------------------------------------------------------


@programs.starting_from(randn(4, 3))
def a_gradient_inside(run, x):
    def f(x):
        inner = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((inner * 2).sin().exp().sum(), inner)
        return (x * g).sin() * g

    return run(f, x)


@programs.starting_from(lambda: (nn.Linear(3, 3), torch.randn(4, 3).requires_grad_()))
def steps_of_an_optimizer_inside(run, model, x):
    """As in meta-learning of the first order: the region trains a copy."""

    def f(x):
        fast = nn.Linear(3, 3)
        with torch.no_grad():
            for p, q in zip(fast.parameters(), model.parameters(), strict=True):
                p.copy_(q)
        optimizer = torch.optim.SGD(fast.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            fast(x.detach()).sin().sum().backward()
            optimizer.step()
        return fast(x).sin() * model(x)

    return run(f, x)


@programs.starting_from(randn(4, 3))
def a_whole_training_step_in_a_scope(run, x):
    def f(x):
        y = (x * 2).sin().exp()
        backward([y])
        return x.grad * 2

    return run(f, x).requires_grad_(False)


# -- gradients off and on --------------------------------------------------------------------------


@programs.starting_from(randn(4, 3))
def without_gradients_inside(run, x):
    def f(x):
        with torch.no_grad():
            scale = (x * 2).sin().abs()
            scale += 1
        h = (x * scale).sin()
        with torch.no_grad():
            best = h.exp().max()
        return h / best * scale

    return run(f, x)


@programs.starting_from(randn(4, 3))
def inference_inside(run, x):
    def f(x):
        with torch.inference_mode():
            scale = (x * 2).sin().abs()
            scale += 1
            number = scale.max().item()
        h = x * number + scale
        return h.sin() * 2

    return run(f, x)


@programs.starting_from(randn(4, 3))
def inference_tensors_written_later(run, x):
    def f(x):
        with torch.inference_mode():
            c = torch.ones(3)
        y = (x + c).sin()
        with torch.inference_mode():
            c.add_(1)
        return y * 2, (x + c).exp()

    return run(f, x)


@programs.starting_from(randn(4, 3))
def a_vector_that_inference_mode_reads_first(run, x):
    def f(x):
        scale = torch.tensor([0.5, -0.5, 1.0])
        with torch.inference_mode():
            scale.sin()
        y = torch.where(scale > 0, scale, x)
        with torch.inference_mode():
            seen = y.sum()
        return y * scale, seen + x.sin()

    return run(f, x)


@programs.starting_from(randn(4, 3))
def detached_on_the_way(run, x):
    def f(x):
        h = (x * 2).sin()
        return h.detach() * x.exp(), h.detach() * 3, h.clone().detach_() * x

    return run(f, x)


@programs.starting_from(lambda: (*randn(4, 3)(), torch.randn(4, 3), nn.Linear(3, 3)))
def some_inputs_and_parameters_frozen(run, x, c, model):
    model.weight.requires_grad_(False)

    def f(x, c):
        return model((x * c).sin()).exp(), model(c.sin()).exp()

    y = run(f, x, c)
    model.weight.requires_grad_(True)
    return y


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


def test_a_graph_is_freed_by_its_pass() -> None:
    """As without remat: a second pass without retain_graph is an error, and says so."""
    x = torch.randn(3).requires_grad_()
    y = remat.checkpoint(lambda x: (x * 2).sin(), x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_pass_that_fails_can_be_done_again() -> None:
    """A hook raises in the middle of a pass; what follows is right."""
    x = torch.randn(4).requires_grad_()
    fail = [True]

    def hook(g):
        if fail[0]:
            raise ValueError("on purpose")

    def f(x):
        h = (x * 2).sin()
        h.register_hook(hook)
        return (h.exp() * x).cos()

    y = remat.checkpoint(f, x)
    with pytest.raises(ValueError, match="on purpose"):
        y.sum().backward(retain_graph=True)
    assert x.grad is None
    fail[0] = False
    y.sum().backward()
    found, x.grad = x.grad, None
    f(x).sum().backward()
    assert torch.equal(found, x.grad)


def test_what_a_node_saved_can_be_looked_at() -> None:
    x = torch.randn(4).requires_grad_()
    y = remat.checkpoint(lambda x: (x * 2).sin(), x)
    assert torch.equal(y.grad_fn._saved_self, x.detach() * 2)
    y.sum().backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)


def test_gradients_by_finite_differences() -> None:
    x = torch.randn(3, dtype=torch.float64).requires_grad_()
    w = torch.randn(3, 3, dtype=torch.float64).requires_grad_()

    def f(x, w):
        return remat.checkpoint(lambda x, w: ((x * 2).sin() @ w).tanh(), x, w)

    assert torch.autograd.gradcheck(f, (x, w))
    assert torch.autograd.gradgradcheck(f, (x, w))
