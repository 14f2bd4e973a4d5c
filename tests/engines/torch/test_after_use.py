"""Nothing of remat sticks to tensors, modules, or torch."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat

from .oracles import APIS, plain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        h = self.norm(self.linear(x))
        h += x
        return F.dropout(h.sin())


def used(api):
    """Return a model, its input and its output; a backward pass is still to come."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.RematWarning)
        return model, x, APIS[api](model, x) if api else plain(model, x)


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("api", APIS)
def test_state_dicts_and_files_are_as_without_remat(api) -> None:
    model, x, y = used(api)
    expected, expected_x, expected_y = used(None)
    assert list(model.state_dict()) == list(expected.state_dict())
    assert saved(model.state_dict()) == saved(expected.state_dict())
    assert saved((x, y.detach())) == saved((expected_x, expected_y.detach()))
    assert len(pickle.dumps(model)) == len(pickle.dumps(expected))
    assert torch.equal(pickle.loads(pickle.dumps(y.detach())), expected_y)


@pytest.mark.parametrize("api", APIS)
def test_objects_have_no_new_attributes(api) -> None:
    model, x, y = used(api)
    expected, expected_x, expected_y = used(None)
    assert vars(model).keys() == vars(expected).keys()
    assert vars(x) == vars(expected_x) == {}
    assert vars(y) == vars(expected_y) == {}
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert type(one) is type(other)
        assert vars(one) == vars(other)
        assert vars(one.untyped_storage()) == vars(other.untyped_storage()) == {}
    assert type(y) is torch.Tensor
    assert y.grad_fn.name() == expected_y.grad_fn.name()
    assert y._version == expected_y._version


@pytest.mark.parametrize("api", APIS)
def test_copies_work_and_are_independent(api) -> None:
    model, x, y = used(api)
    copied, x2 = copy.deepcopy(model), copy.deepcopy(x)
    y.sum().backward()
    assert copied.linear.weight.grad is None
    torch.manual_seed(3)
    found = APIS[api](copied, x2)
    found.sum().backward()
    other = Net()
    other.load_state_dict(model.state_dict())
    torch.manual_seed(3)
    expected = plain(other, x)
    expected.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(copied.linear.weight.grad, other.linear.weight.grad)


@pytest.mark.parametrize("api", APIS)
def test_a_copy_made_inside_of_a_region(api) -> None:
    """deepcopy and clone of what the region made: other memory, the same values."""
    x = torch.randn(4, 3).requires_grad_()

    def f(x):
        h = x.detach() * 2
        copied = copy.deepcopy(h)
        back = pickle.loads(pickle.dumps(h))
        h.add_(1)
        return (x * copied.abs()).sin() + (x * h.abs()).cos() + (x * back.abs()).exp()

    (found,) = torch.autograd.grad(APIS[api](f, x).sum(), x)
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("api", APIS)
def test_a_plain_program_afterwards_is_untouched(api) -> None:
    model, x, _ = used(api)
    (found,) = torch.autograd.grad(model(x).square().sum(), model.linear.weight)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.linear.weight.add_(1)
        model.linear.weight.sub_(1)
    assert found.shape == copied.linear.weight.shape
    torch.nn.init.ones_(model.linear.weight)
    h = (x * 2).requires_grad_()
    y = h.exp()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_requires_grad_can_be_switched_between_calls() -> None:
    model, x = Net().eval(), torch.randn(4, 3)
    for trains in (True, False, True):
        model.linear.requires_grad_(trains)
        model.zero_grad()
        remat.checkpoint(lambda x: model.norm(model.linear(x).sin()).exp(), x).sum().backward()
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        assert (found[0] is None) is not trains
        model.zero_grad()
        model.norm(model.linear(x).sin()).exp().sum().backward()
        for one, p in zip(found, model.parameters(), strict=True):
            assert (one is None and p.grad is None) or torch.equal(one, p.grad)


def test_shared_memory_of_other_processes() -> None:
    """Parameters that were used can be put into shared memory."""
    model, _, y = used("segment")
    y.sum().backward()
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    assert multiprocessing.current_process().name == "MainProcess"


@pytest.mark.parametrize("api", APIS)
def test_training_ends_in_the_same_bits(api) -> None:
    """Ten steps of training, with momentum, running statistics and dropout."""

    def train(run):
        torch.manual_seed(0)
        model = nn.ModuleList(Net() for _ in range(2))
        optimizer = torch.optim.Adam(model.parameters(), 0.01, foreach=True)
        for _ in range(10):
            h = torch.randn(4, 3)
            for layer in model:
                h = run(layer, h)
            optimizer.zero_grad()
            F.cross_entropy(h, torch.tensor([0, 1, 2, 0])).backward()
            optimizer.step()
        return saved((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))

    assert train(APIS[api]) == train(plain)
