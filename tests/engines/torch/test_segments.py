"""The public functions of a segment: how it is called, what goes in and what comes out."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import remat

from .oracles import APIS, Programs, plain, randn, same

programs = Programs()


def layer(x, w, *, scale=2.0):
    return ((x * scale).sin() @ w).tanh()


def two() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3).requires_grad_(), torch.randn(3, 3).requires_grad_()


# -- every form ------------------------------------------------------------------------------------


@remat.checkpoint
def decorated(x, w):
    return layer(x, w)


@remat.checkpoint(preserve_rng_state=False)
def decorated_with_options(x, w):
    return layer(x, w)


@remat.adaptive_checkpoint(threshold="1B")
def decorated_adaptively(x, w):
    return layer(x, w)


@remat.CheckpointGroup("forms").checkpoint_fn
def decorated_by_a_group(x, w):
    return layer(x, w)


FORMS = {
    "call": lambda x, w: remat.checkpoint(layer, x, w),
    "keywords": lambda x, w: remat.checkpoint(layer, x, w=w, scale=2.0),
    "only keywords": lambda x, w: remat.checkpoint(layer, x=x, w=w),
    "wrapper": remat.checkpoint(layer),
    "decorator": decorated,
    "options": decorated_with_options,
    "as in torch": lambda x, w: remat.checkpoint(layer, x, w, use_reentrant=False),
    "partial": lambda x, w: remat.checkpoint(partial(layer, w=w, scale=2.0), x),
    "closure": lambda x, w: remat.checkpoint(lambda: layer(x, w))(),
    "sequence": lambda x, w: remat.checkpoint_segment(lambda xs: layer(*xs), [x, w]),
    "tuple": lambda x, w: remat.checkpoint_segment(lambda xs: layer(*xs), (x, w)),
    "adaptive": lambda x, w: remat.adaptive_checkpoint(layer, x, w, threshold="1B"),
    "adaptive decorator": decorated_adaptively,
    "group": lambda x, w: remat.CheckpointGroup().checkpoint_fn(layer, x, w),
    "group decorator": decorated_by_a_group,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form) -> None:
    same(lambda run, x, w: (layer if run is plain else FORMS[form])(x, w), two, remat.checkpoint)


def test_the_forms_really_forget() -> None:
    """Each form computes something again: the profiler sees it."""
    for name, form in FORMS.items():
        with remat.CheckpointProfiler() as profiler:
            form(*two()).sum().backward()
        assert profiler.recompute_count() > 0, name


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    @remat.checkpoint
    def forward(self, x):
        return layer(x, self.weight)


class PlainMethod(Method):
    def forward(self, x):
        return layer(x, self.weight)


def test_a_decorated_method() -> None:
    torch.manual_seed(0)
    a, b = Method(), PlainMethod()
    b.load_state_dict(a.state_dict())
    x = torch.randn(4, 3)
    a(x).sum().backward()
    b(x).sum().backward()
    assert torch.equal(a.weight.grad, b.weight.grad)


# -- what goes in and comes out --------------------------------------------------------------------


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Data:
    a: Any
    b: Any


class Own:
    """An object that nobody knows."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


TREES = {
    "nested": (lambda a, b: (a, [b, None]), lambda t: (t[0], t[1][0])),
    "dict": (lambda a, b: {"b": b, "a": a}, lambda t: (t["a"], t["b"])),
    "ordered": (lambda a, b: OrderedDict(b=b, a=a), lambda t: (t["a"], t["b"])),
    "named": (Pair, lambda t: (t.a, t.b)),
    "dataclass": (Data, lambda t: (t.a, t.b)),
    "object": (Own, lambda t: (t.a, t.b)),
    "mixed": (lambda a, b: [a, None, b, 3, "text", True, {1, 2}], lambda t: (t[0], t[2])),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("tree", TREES)
def test_trees(tree, api) -> None:
    make, take = TREES[tree]

    def program(run, x, w):
        def f(first, *, second):
            a, b = take(first)
            c, _ = take(second)
            return make((a * 2).sin() * b.sum(), (b * c.sum()).exp())

        out = run(f, make(x, w), second=make(w, x))
        assert type(out) is type(make(x, w))
        return take(out)

    same(program, two, APIS[api])


@programs.starting_from(two)
def closed_over(run, x, w):
    h = w * 2
    return run(lambda x: (x.sin() @ h).exp() @ w, x)


@programs.starting_from(two)
def nothing_but_closed_over(run, x, w):
    return run(lambda _: (x.sin() @ w).exp(), None)


@programs.starting_from(two)
def the_same_twice(run, x, w):
    def f(a, b):
        h = (a * b).sin()
        return h, h, a

    return run(f, x, x)


@programs.starting_from(two)
def inputs_returned(run, x, w):
    a, b, c = run(lambda x, w: (x, w.t(), x.view(-1)), x, w)
    return a * 2, b * 3, c.sin()


@programs.starting_from(two)
def results_that_are_not_used(run, x, w):
    a, _, _ = run(lambda x, w: (x.sin(), (w * 2).exp(), 3), x, w)
    return a


@programs.starting_from(two)
def results_without_gradients(run, x, w):
    def f(x, w):
        h = (x * 2).sin()
        return h.exp(), h.argmax(), h.detach(), h > 0, h.sum().item(), None, "text"

    out = run(f, x, w)
    assert isinstance(out[4], float)
    return out[:4]


@programs.starting_from(lambda: (torch.randn(4, 3), torch.randn(3, 3).requires_grad_()))
def frozen_inputs(run, x, w):
    return run(layer, run(layer, x, w), w)


@programs.starting_from(lambda: (nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(4, 3)))
def modules_as_functions(run, model, x):
    return run(model, run(model.forward, x))


@programs.starting_from(two)
def functions_of_torch(run, x, w):
    return run(torch.sin, run(torch.matmul, x, w)), run(Tensor.exp, x)


@programs.starting_from(two)
def results_joined_outside(run, x, w):
    parts = [run(layer, x * n, w) for n in range(3)]
    return torch.cat(parts).sin(), torch.stack(parts[::-1]).exp()


@programs.starting_from(
    lambda: (nn.ModuleList(nn.Linear(3, 3) for _ in range(40)), torch.randn(2, 3))
)
def many_layers(run, model, x):
    for part in model:
        x = run(lambda x, part=part: part(x).tanh(), x)
    return x


@programs.starting_from(two)
def a_long_region(run, x, w):
    def f(x, w):
        for n in range(200):
            x = (x * 1.01).sin() if n % 2 else (x @ w).tanh()
        return x

    return run(f, x, w)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


def test_the_function_runs_once() -> None:
    calls = []

    def f(x):
        calls.append(1)
        return (x * 2).sin()

    remat.checkpoint(f, torch.randn(3).requires_grad_()).sum().backward()
    assert calls == [1]


def test_a_call_without_inputs_that_only_refers_to_torch() -> None:
    def inner():
        return torch.linspace(-1, 1, 5, requires_grad=True).sin().exp()

    def outer():
        made = remat.checkpoint(inner)()
        return made, remat.adaptive_checkpoint(made * made, threshold=0).tanh()

    made, result = remat.checkpoint(outer)()
    (gradient,) = torch.autograd.grad(result.sum(), made)
    expected = made.detach().requires_grad_()
    ((expected * expected).tanh()).sum().backward()
    assert torch.equal(gradient, expected.grad)


def test_a_very_long_region_needs_no_deep_stack() -> None:
    def program(run, x):
        def f(x):
            for _ in range(3000):
                x = x.sin()
            return x

        return run(f, x)

    same(program, randn(2), remat.checkpoint)


# -- marks, nodes and groups -----------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
def test_marks_change_no_result(api) -> None:
    def program(run, x, w):
        hold = (lambda t: t) if run is plain else remat.mark_checkpoint
        drop = (lambda t: t) if run is plain else remat.checkpoint

        def f(x, w):
            h = hold((x * 2).sin())
            k = drop(drop(h.exp() @ w).sin())
            view = hold(k[1:])
            k = hold(k) * 2
            k.add_(1)
            return h * k, view.cos() * view, drop(hold(k.exp())), hold(x) * 2

        return run(f, x, w)

    same(program, two, APIS[api])


def test_marks_are_known_by_their_tensor() -> None:
    x = torch.randn(3)
    y = x.clone()
    assert not remat.is_checkpoint(x)
    assert remat.mark_checkpoint(x) is x
    assert remat.is_checkpoint(x)
    assert not remat.is_checkpoint(y)
    assert not remat.is_checkpoint(3)


def test_checkpoint_takes_a_mark_back() -> None:
    x = torch.randn(3).requires_grad_()
    with remat.CheckpointScope("scope"):
        h = remat.mark_checkpoint(x * 2)
        assert remat.checkpoint(h) is h
        assert not remat.is_checkpoint(h)
        h.sin().exp()  # (a scope that saves nothing would warn)


def test_nodes_show_what_a_scope_holds() -> None:
    x = torch.randn(3).requires_grad_()
    scope = remat.CheckpointScope("scope")
    with scope:
        h = remat.mark_checkpoint((x * 2).sin())
        y = (h.exp() * 3).cos()
    (node,) = scope.nodes
    assert node.is_checkpoint
    assert [t.tolist() for t in node.saved_activations] == [h.tolist()]
    again = node.recompute()
    expected = {tuple(t.tolist()) for t in ((x * 2), h.exp(), h.exp() * 3)}
    assert {tuple(t.tolist()) for t in again} == expected
    node.clear_saved_activations()
    assert node.saved_activations == []
    y.sum().backward()
    (found,) = torch.autograd.grad((((x * 2).sin().exp()) * 3).cos().sum(), x)
    assert torch.equal(x.grad, found)
    del y, h
    assert scope.nodes == [] or scope.nodes[0].recompute_functions == []


def test_a_holding_scope_shows_what_plain_autograd_holds() -> None:
    x = torch.randn(3).requires_grad_()
    scope = remat.CheckpointScope("scope", use_recomputation=False)
    with scope:
        y = (x * 2).sin()
    (node,) = scope.nodes
    assert not node.is_checkpoint
    assert [t.tolist() for t in node.saved_activations] == [(x * 2).tolist()]
    assert node.recompute() == []
    y.sum().backward()


def test_a_group_counts() -> None:
    group = remat.CheckpointGroup("counted")
    x = torch.randn(30, 30).requires_grad_()
    for _ in range(2):
        a, b = group.checkpoint_fn(lambda x: (x.sin().sin().sin(), x.exp()), x)
        (a + b).sum().backward()
    assert group.calls == 2
    assert group.recompute_count() == 2
    assert group.recompute_seconds() > 0
