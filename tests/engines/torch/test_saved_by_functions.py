"""What custom autograd functions get back of the tensors that they save in a region."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import remat

from .oracles import APIS

SEEN: list[Tensor] = []


class Twice(Tensor):
    """A tensor whose transpose is twice what one expects."""

    def t(self):
        return super().t() * 2


class MatMul(Function):
    """Uses the class and an attribute of what it saves."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        SEEN.append(w)
        return grad @ w.t() * w.scale, None


class Counting(Function):
    """Counts its backward passes in a tensor that it saves."""

    @staticmethod
    def forward(ctx, x, counter):
        ctx.save_for_backward(counter)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors[0].add_(1)
        return grad * 2, None


def frozen_parameter():
    return torch.nn.Parameter(torch.ones(3, 3), requires_grad=False)


def of_a_subclass():
    return torch.ones(3, 3).as_subclass(Twice)


def of_plain_class():
    return torch.ones(3, 3)


def of_one_dimension():
    return torch.arange(9.0).as_strided((3, 3), (3, 1))


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "make", [frozen_parameter, of_a_subclass, of_plain_class, of_one_dimension]
)
def test_a_leaf_comes_back_as_itself(make, api) -> None:
    w = make()
    w.scale = 3.0

    def gradient_of(run) -> Tensor:
        SEEN.clear()
        x = torch.ones(3, 3, requires_grad=True)
        run(lambda x: MatMul.apply(x.exp(), w).sin(), x).sum().backward()
        return x.grad

    expected = gradient_of(lambda f, x: f(x))
    assert SEEN[0] is w
    assert torch.equal(gradient_of(APIS[api]), expected)
    assert SEEN[0] is w


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("size", [1, 20_000])
def test_a_backward_writes_to_the_tensor_that_it_saved(size, api) -> None:
    counter = torch.zeros(size)
    x = torch.ones(3, requires_grad=True)
    for passes in (1, 2):
        APIS[api](lambda x: Counting.apply(x.exp(), counter).sin(), x).sum().backward()
        assert counter[0] == passes


@pytest.mark.parametrize("api", APIS)
def test_what_hooks_would_lose_is_refused(api) -> None:
    """PyTorch's hooks return a tensor with a history as a bare one: the gradient would be wrong."""

    def f(x):
        w = x.exp().as_subclass(Twice)
        w.scale = 1.0
        return MatMul.apply(x.exp().sin(), w)

    x = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(remat.UnsupportedError, match=r"lose its class Twice.*as_subclass"):
        APIS[api](f, x).sum().backward()


@pytest.mark.parametrize("api", APIS)
def test_attributes_that_hooks_would_lose_are_refused(api) -> None:
    def f(x):
        w = x.exp()
        w.scale = 1.0
        return MatMul.apply(x.exp().sin(), w)

    x = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(remat.UnsupportedError, match=r"lose attributes.*keep the rest on ctx"):
        APIS[api](f, x).sum().backward()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", [Tensor, Twice])
def test_ops_of_pytorch_do_not_need_what_hooks_lose(kind, api) -> None:
    """Only a custom Function would miss the class and the attributes of what it saves."""
    leaf = torch.full((3, 3), 0.5).as_subclass(kind)
    leaf.scale = 3.0

    def f(x):
        w = x.exp().as_subclass(kind)
        w.scale = 3.0
        frozen = w.detach().sin().as_subclass(kind)
        frozen.scale = 3.0
        return (w.sin() * leaf * frozen).as_subclass(Tensor)

    def gradient_of(run) -> Tensor:
        x = torch.ones(3, 3, requires_grad=True)
        run(f, x).sum().backward()
        return x.grad

    assert torch.equal(gradient_of(APIS[api]), gradient_of(lambda f, x: f(x)))


@pytest.mark.parametrize("api", APIS)
def test_what_the_region_computed_without_grad_keeps_its_class(api) -> None:
    def f(x):
        w = x.detach().exp().as_subclass(Twice)
        w.scale = 2.0
        return MatMul.apply(x.exp().sin(), w)

    def gradient_of(run) -> Tensor:
        x = torch.ones(3, 3, requires_grad=True)
        run(f, x).sum().backward()
        return x.grad

    assert torch.equal(gradient_of(APIS[api]), gradient_of(lambda f, x: f(x)))


class ScalesWhatItSaved(Function):
    """Writes in place to what it saved: PyTorch allows that for a tensor that nobody else needs."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].mul_(3)


VIEWS = {
    "the same": lambda y: (y, y),
    "a row and all": lambda y: (y[0], y),
    "all and a row": lambda y: (y, y[0]),
    "two views": lambda y: (y.t(), y[:2]),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("views", VIEWS)
def test_a_backward_that_writes_to_a_saved_tensor_changes_no_other(views, api) -> None:
    """Plain autograd raises; a region computes the other one again, or raises."""

    def f(x):
        y = x.exp()
        one, other = VIEWS[views](y)
        return ScalesWhatItSaved.apply(one).sum() + ScalesWhatItSaved.apply(other).sum()

    def expected() -> Tensor:
        one, other = VIEWS[views](weight := torch.zeros(3, 3))
        y = torch.ones(3, 3).exp()
        for part, value in zip((one, other), VIEWS[views](y), strict=True):
            part.add_(value * 3)
        return weight * y

    x = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        f(x).backward()
    if raises_if(lambda: APIS[api](f, x).backward(), "modified by an inplace operation"):
        return
    assert torch.equal(x.grad, expected())


def raises_if(call, message: str) -> bool:
    """Call; return whether that is refused, with these words."""
    try:
        call()
    except remat.ModifiedInputError as error:
        assert message in str(error)  # noqa: PT017
        return True
    return False
