"""Errors and warnings: what they say, and that they leave nothing behind."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import remat

from .oracles import APIS

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
FORGETTING = ["segment", "scope", "nested", "group", "drawn"]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape or (3,)).requires_grad_()


# -- writes between the forward and the backward pass ----------------------------------------------


def one(x, w):
    return (x * w).sin() * 2


def two(x, w):
    return (x.abs() * w).sin() * 2  # here autograd does not need x itself, but a replay does


@pytest.mark.parametrize("f", [one, two])
@pytest.mark.parametrize("which", ["input", "parameter"])
@pytest.mark.parametrize("api", FORGETTING)
def test_inputs_and_parameters_written_before_the_backward_pass(api, which, f) -> None:
    x, w = torch.randn(4, 3), nn.Parameter(torch.randn(3))
    y = APIS[api](f, x, w)
    with torch.no_grad():
        (x if which == "input" else w).add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version"):
        y.sum().backward()


@pytest.mark.parametrize("f", [one, two])
@pytest.mark.parametrize("make", ["view", "detached", "a part", "with a history", "reshaped"])
@pytest.mark.parametrize("api", FORGETTING)
def test_other_tensors_over_the_input_written_before_the_backward_pass(api, make, f) -> None:
    base = torch.randn(4, 3)
    x, other = {
        "view": lambda: (base, base.view(-1)),
        "detached": lambda: (base, base.detach()),
        "a part": lambda: (base[1:], base[0]),
        "with a history": lambda: (h := leaf(4, 3) * 2, h.detach()),
        "reshaped": lambda: (base.view(4, 3), base),
    }[make]()
    y = APIS[api](f, x, leaf())
    other.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_writes_to_flattened_parameters() -> None:
    """Tensors over one storage may count their versions each for itself."""
    flat = torch.randn(6)
    first, second = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
    first.data, second.data = flat[:3], flat[3:]
    y = remat.checkpoint(lambda x: (x * first) * second, leaf())
    with torch.no_grad():
        second.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("api", APIS)
def test_writes_after_the_backward_pass_are_free(api) -> None:
    x, w = torch.randn(4, 3), leaf()
    APIS[api](two, x, w).sum().backward()
    before = w.grad.clone()
    with torch.no_grad():
        x.add_(1)
        w.add_(1)
    APIS[api](two, x, w).sum().backward()
    assert not torch.equal(w.grad, before)


def test_parameters_that_get_other_memory() -> None:
    """As model.half() or an average of weights does: the gradient is of what was computed."""
    p, x = nn.Parameter(torch.ones(3)), torch.ones(3)
    y = remat.checkpoint(lambda x: (x * p).sin(), x)
    p.data = torch.zeros(3)
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert "needed for gradient computation" in str(error)  # noqa: PT017
    else:
        assert torch.equal(p.grad, torch.ones(3).cos())


@pytest.mark.parametrize("api", APIS)
def test_a_tracer_is_told_to_do_without(api) -> None:
    def gradient(x):
        return torch.autograd.grad(APIS[api](lambda x: x.sin().exp(), x).sum(), x)[0]

    with pytest.raises(remat.UnsupportedError, match=r"make_fx.*torch\.compile"):
        make_fx(gradient)(torch.ones(2, requires_grad=True))


# -- replays that give something else --------------------------------------------------------------


class Select(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.tensor([[True, False, True]]))

    def forward(self, x):
        return torch.masked_select(self.linear(x), self.mask).sin()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), Select()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("api", FORGETTING)
def test_another_shape_names_op_module_and_line(api) -> None:
    model = Stack()
    y = APIS[api](model, torch.randn(2, 3))
    model.blocks[1].mask.data[0, 1] = True
    with pytest.raises(remat.RecomputeMismatchError) as caught:
        y.sum().backward()
    message = str(caught.value)
    for part in ("masked_select", "[4]", "[6]", "blocks.1", "Select", __file__, "self.linear(x)"):
        assert part in message


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return torch.tanh(x @ self.inner.weight).exp()


@pytest.mark.parametrize("depth", [1, 3, 12])
@pytest.mark.parametrize("api", FORGETTING)
def test_an_error_in_nested_sequentials_names_the_line_of_the_user(api, depth: int) -> None:
    table = nn.Embedding(5, 4)
    model: nn.Module = table
    for _ in range(depth):
        model = nn.Sequential(model, nn.Sigmoid())

    def call(numbers):
        return model(numbers)  # here

    y = APIS[api](call, torch.tensor([1, 2]))
    table.weight.data = table.weight.data[:, :2]
    with pytest.raises(RuntimeError, match="another shape over it") as caught:
        y.sum().backward()
    (note,) = caught.value.__notes__
    for part in ("aten.embedding", "Embedding", __file__, "# here"):
        assert part in note
    assert "remat/engines" not in note.replace(__file__, "")


@pytest.mark.parametrize("part_of", [lambda w: w[:, :2], lambda w: w[:2], lambda w: w.t()])
@pytest.mark.parametrize("api", FORGETTING)
def test_another_shape_of_a_parameter_names_op_module_and_line(api, part_of) -> None:
    model = nn.Sequential(nn.Tanh(), Product())
    y = APIS[api](model, torch.randn(2, 4))
    weight = model[1].inner.weight
    weight.data = part_of(weight.data)
    with pytest.raises(RuntimeError, match=r"another shape over it.*assign after") as caught:
        y.sum().backward()
    (note,) = caught.value.__notes__
    for part in ("aten.mm", "backward pass", "1 (Product)", __file__, "torch.tanh(x @ self"):
        assert part in note


def test_a_usual_op_of_the_library_is_named_by_the_line_of_the_user() -> None:
    table = nn.Embedding(5, 4)
    y = remat.checkpoint(lambda n: torch.sin(table(n)).exp(), torch.tensor([1, 2]))
    table.weight.data = table.weight.data[:, :2]
    with pytest.raises(RuntimeError, match="another shape over it") as caught:
        y.sum().backward()
    (note,) = caught.value.__notes__
    for part in ("aten.embedding", "Embedding", __file__, "torch.sin(table(n))"):
        assert part in note


@pytest.mark.parametrize("api", FORGETTING)
def test_an_op_that_fails_when_it_is_run_again_is_named(api) -> None:
    """It reads an index that was changed in a way that PyTorch does not count."""
    index = torch.zeros(2, 2, dtype=torch.int64)
    x = torch.randn(2, 2, requires_grad=True)
    y = APIS[api](lambda x: x.sin().gather(0, index).exp(), x)
    index.data.fill_(7)
    with pytest.raises(RuntimeError, match="out of bounds") as caught:
        y.sum().backward()
    (note,) = caught.value.__notes__
    for part in ("aten.gather", "backward pass", __file__, "x.sin().gather"):
        assert part in note


@pytest.mark.parametrize(
    "ask", [lambda n: n / 3, lambda n: n * 0.1, lambda n: torch.full((3,), 0.1), torch.sin]
)
@pytest.mark.parametrize("api", FORGETTING)
def test_a_default_dtype_that_changes_in_the_middle(api, ask) -> None:
    n = torch.arange(3)

    def f(x):
        torch.set_default_dtype(torch.float64)
        try:
            h = ask(n)
        finally:
            torch.set_default_dtype(torch.float32)
        return (h.exp() * x).sin()

    x = torch.randn(3, requires_grad=True)
    y = APIS[api](f, x)
    with pytest.raises(
        remat.RecomputeMismatchError, match=r"float64.*float32.*set_default_dtype"
    ) as caught:
        y.sum().backward()
    assert __file__ in str(caught.value)


# -- errors inside of a region ---------------------------------------------------------------------


def fail(x):
    h = (x * 2).sin()
    h += 1
    raise KeyError("on purpose")


@pytest.mark.parametrize("api", APIS)
def test_an_error_passes_through_and_leaves_nothing_switched_on(api) -> None:
    with pytest.raises(KeyError, match="on purpose"):
        APIS[api](fail, leaf())
    assert _get_current_dispatch_mode_stack() == []
    x = leaf()
    assert torch.equal(torch.autograd.grad((x * 2).sin().sum(), x)[0], (x * 2).cos() * 2)


@pytest.mark.parametrize("inner", APIS)
@pytest.mark.parametrize("outer", APIS)
def test_an_error_in_an_inner_region(outer, inner) -> None:
    """The outer one catches it, goes on, and is right."""

    def f(x):
        h = (x * 2).sin()
        with pytest.raises(KeyError):
            APIS[inner](fail, h)
        return (h * 2).exp()

    x = leaf()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.RematWarning)
        y = APIS[outer](f, x)
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(((x * 2).sin() * 2).exp().sum(), x)
    assert torch.equal(found, expected)


def test_an_error_of_an_op() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        remat.checkpoint(lambda x: x.sin() * torch.ones(4), leaf())


def test_an_interrupt() -> None:
    def f(x):
        x.sin()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), remat.CheckpointScope("scope"):
        f(leaf())


def test_hooks_that_are_not_allowed() -> None:
    """Where torch allows no hooks on saved tensors, it says so and nothing stays on."""
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with pytest.raises((RuntimeError, remat.UnsupportedError)):
            remat.checkpoint(torch.sin, leaf())
        assert _get_current_dispatch_mode_stack() == []
        leaf().sin()
    x = leaf()
    remat.checkpoint(lambda x: (x * 2).sin(), x).sum().backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)


# -- generators ------------------------------------------------------------------------------------


def test_a_generator_that_leaves_a_scope_open() -> None:
    """The scope is open as long as the generator is: what the caller does meanwhile is right."""

    def values(x):
        with remat.CheckpointScope("generator"):
            for _ in range(3):
                x = (x * 2).sin()
                yield x

    x = leaf()
    total = torch.zeros(3)
    for value in values(x):
        total = total + value.exp()
        if value.requires_grad and total.requires_grad:
            break
    total.sum().backward()
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
    assert torch.equal(x.grad, expected)


def test_an_outer_region_that_ends_before_an_inner_one() -> None:
    def values(x):
        with remat.CheckpointScope("inner"):
            yield (x * 2).sin()
            yield (x * 3).sin()

    x = leaf()
    with remat.CheckpointScope("outer"):
        generator = values(x)
        first = next(generator).exp()
    assert _get_current_dispatch_mode_stack() == []
    second = next(generator).cos()
    generator.close()
    (first * second).sum().backward()
    (expected,) = torch.autograd.grad(((x * 2).sin().exp() * (x * 3).sin().cos()).sum(), x)
    assert torch.equal(x.grad, expected)


def test_an_inner_region_that_begins_first() -> None:
    def values(x):
        with remat.CheckpointScope("first"):
            yield (x * 2).sin()

    x = leaf()
    generator = values(x)
    first = next(generator)
    with remat.CheckpointScope("second"):
        h = (first * 2).exp()
        generator.close()
        h = (h * 2).cos()
    assert _get_current_dispatch_mode_stack() == []
    h.sum().backward()
    (expected,) = torch.autograd.grad(((((x * 2).sin() * 2).exp()) * 2).cos().sum(), x)
    assert torch.equal(x.grad, expected)


# -- bad arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            remat.checkpoint,
            remat.UnsupportedError,
            "CheckpointScope.*remat.checkpoint",
        ),
        (lambda x: remat.adaptive_checkpoint(x, threshold=1), remat.UnsupportedError, "Scope"),
        (lambda x: remat.checkpoint(torch.sin, x, use_reentrant=True), ValueError, "use_reentrant"),
        (lambda x: remat.checkpoint_segment(lambda xs: xs, []), ValueError, "empty"),
        (lambda x: remat.checkpoint_segment(lambda xs: xs, x), TypeError, "inputs"),
        (lambda x: remat.mark_checkpoint(3), TypeError, "int"),
        (lambda x: remat.CheckpointScope(3), TypeError, "name"),
        (lambda x: remat.checkpoint(x, x), TypeError, "fn must be a function"),
        (lambda x: remat.adaptive_checkpoint(torch.sin, x, threshold=-1), ValueError, "threshold"),
    ],
)
def test_bad_arguments(call, error, match) -> None:
    with pytest.raises(error, match=match):
        call(leaf())


# -- transforms ------------------------------------------------------------------------------------


def by_segment(x):
    return remat.checkpoint(lambda x: (x * 2).sin(), x).sum()


def by_scope(x):
    with remat.CheckpointScope("scope"):
        return (x * 2).sin().sum()


@pytest.mark.parametrize("f", [by_segment, by_scope])
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "jacrev", "hessian"])
def test_transforms_of_functions_are_right_or_refused(transform, f) -> None:
    x = torch.randn(3)

    def apply(f):
        match transform:
            case "vjp":
                return torch.func.vjp(f, x)[1](torch.tensor(1.0))[0]
            case "jvp":
                return torch.func.jvp(f, (x,), (x,))[1]
            case "vmap":
                return torch.func.vmap(f)(x[None])
            case _:
                return getattr(torch.func, transform)(f)(x)

    try:
        found = apply(f)
    except remat.UnsupportedError as error:
        assert "torch.func" in str(error)  # noqa: PT017
    else:
        assert torch.equal(found, apply(lambda x: (x * 2).sin().sum()))


@pytest.mark.parametrize("transform", ["jvp", "vmap"])
@pytest.mark.parametrize("api", APIS)
def test_transforms_inside_of_a_region(transform, api) -> None:
    def f(x):
        if transform == "vmap":
            return torch.func.vmap(lambda v: (v * 2).sin() * v.sum())((x * 2).view(1, 3)) * x
        return torch.func.jvp(lambda v: (v * 2).sin(), (x,), (x.exp(),))[1] * x

    x = leaf()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (expected,) = torch.autograd.grad(f(x).sum(), x)
        (found,) = torch.autograd.grad(APIS[api](f, x).sum(), x)
    assert torch.equal(found, expected)


# -- warnings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("api", FORGETTING)
def test_no_warning_when_gradients_are_off(api, off) -> None:
    """The same code trains and evaluates: that it saves nothing here is as it should be."""
    with off(), warnings.catch_warnings():
        warnings.simplefilter("error")
        APIS[api](lambda x: (x * 2).sin(), leaf())


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m.forward, remat.checkpoint])
def test_no_warning_in_eval_mode(wrap) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remat.checkpoint(wrap(module.eval()), torch.randn(3))


def test_a_warning_when_nothing_requires_grad() -> None:
    def of_constants(x):
        return (x * 2).sin()

    with pytest.warns(remat.RematWarning, match="of_constants.*requires grad"):
        remat.checkpoint(of_constants, torch.randn(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remat.checkpoint(of_constants, torch.randn(3))  # once is enough


def test_a_warning_when_nothing_is_held_inside() -> None:
    def sums(x):
        return x + x.sum()

    with pytest.warns(remat.RematWarning, match="sums.*nothing"):
        remat.checkpoint(sums, leaf())


def test_a_warning_when_all_is_marked() -> None:
    def marking(x):
        return remat.mark_checkpoint(x * 2).sin()

    with pytest.warns(remat.RematWarning, match="marking.*mark_checkpoint"):
        remat.checkpoint(marking, leaf())


def test_a_warning_names_the_scope_and_the_line() -> None:
    with pytest.warns(remat.RematWarning, match="'idle scope'") as caught:  # noqa: SIM117
        with remat.CheckpointScope("idle scope"):
            torch.randn(3).sin()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("api", FORGETTING)
def test_no_warning_when_it_works(api) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        APIS[api](lambda x: F.dropout((x * 2).sin()).exp(), leaf()).sum().backward()
