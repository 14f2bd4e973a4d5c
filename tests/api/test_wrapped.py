"""What `checkpoint(fn)` returns: it copies, pickles, binds and registers as `fn` itself would."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import remat
from remat.api.wrapped import CheckpointedFunction

pytestmark = pytest.mark.filterwarnings("ignore:checkpointing .* saved nothing")
X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)


@remat.checkpoint
def decorated(x, scale=2.0):
    """Scale the sine."""
    return x.exp().sin() * scale


def plain(x):
    return x.exp().sin()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @remat.checkpoint
    def forward(self, x):
        return self.linear(x.exp()).sin()

    @remat.checkpoint
    @staticmethod
    def static(x):
        return plain(x)

    @classmethod
    @remat.checkpoint
    def of_class(cls, x):
        assert cls is Net
        return plain(x)

    builtin = remat.checkpoint(torch.add)
    # (From Python 3.14 on a partial becomes a method, too.)
    partial = remat.checkpoint(staticmethod(functools.partial(torch.add, alpha=2)))


def gradient(fn) -> torch.Tensor:
    x = X.clone().requires_grad_()
    fn(x).sum().backward()
    return x.grad


# -- functions -------------------------------------------------------------------------------------


def test_it_looks_like_the_function() -> None:
    assert decorated.__name__ == "decorated"
    assert decorated.__doc__ == "Scale the sine."
    assert decorated.__module__ == __name__
    assert str(inspect.signature(decorated)) == "(x, scale=2.0)"
    assert "decorated" in repr(decorated)
    assert callable(decorated)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_a_decorated_function_is_itself_when_it_is_copied(how) -> None:
    assert how(decorated) is decorated


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_what_is_wrapped_elsewhere_is_wrapped_again(how) -> None:
    wrapped = remat.checkpoint(plain, preserve_rng_state=False)
    again = how(wrapped)
    assert isinstance(again, CheckpointedFunction)
    assert again == wrapped
    assert hash(again) == hash(wrapped)
    assert again != remat.checkpoint(plain)
    assert wrapped != plain
    assert torch.equal(gradient(again), gradient(plain))


def test_methods_are_bound() -> None:
    net = Net()
    expected = gradient(lambda x: net.linear(x.exp()).sin())
    assert torch.equal(gradient(net), expected)
    assert torch.equal(gradient(functools.partial(Net.forward, net)), expected)
    for method in (net.static, Net.static, net.of_class, Net.of_class):
        assert torch.equal(gradient(method), gradient(plain))
    assert torch.equal(net.builtin(X, X), 2 * X)
    assert torch.equal(net.partial(X, X), 3 * X)
    assert net.forward == net.forward
    assert Net.forward.__name__ == "forward"


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_module_runs_its_own_weights(how) -> None:
    module = nn.Linear(4, 4)
    module.forward = remat.checkpoint(module.forward)
    other = how(module)
    nn.init.zeros_(other.weight)
    nn.init.ones_(other.bias)
    assert torch.equal(other(X), torch.ones(2, 4))
    assert not torch.equal(module(X), other(X))


# -- modules ---------------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = wrap(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
        self.norm = wrap(nn.BatchNorm1d(4))

    def forward(self, x):
        return self.norm(self.block(x)).sin()


def chain() -> Chain:
    return Chain(remat.checkpoint)


def test_a_wrapped_module_registers_as_itself() -> None:
    ours, theirs = chain(), Chain(lambda m: m)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert repr(ours) == repr(theirs)
    assert isinstance(ours.block, nn.Sequential)
    assert isinstance(ours.norm, nn.BatchNorm1d)
    assert len(ours.block) == 3
    ours.load_state_dict(theirs.state_dict())


def test_its_calls_are_checkpointed_and_right() -> None:
    with remat.CheckpointProfiler() as profiler:
        ours = chain()
        found = gradient(ours)
    theirs = Chain(lambda m: m)
    assert torch.equal(found, gradient(theirs))
    assert profiler.checkpoint_count() == 2
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(one, other)


def test_it_shares_all_with_the_module_that_was_wrapped() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    wrapped = remat.checkpoint(module)
    wrapped.eval()
    assert not module.training
    assert not module[1].training
    module.register_buffer("extra", torch.ones(1))
    assert "extra" in wrapped.state_dict()
    wrapped.to(torch.float64)
    assert module[0].weight.dtype is torch.float64


def by_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_torch_save]
)
def test_copies_of_a_wrapped_module_are_checkpointed_too(how) -> None:
    ours = chain()
    other = how(ours)
    nn.init.zeros_(other.block[0].weight)
    assert not torch.equal(ours.block[0].weight, other.block[0].weight)
    with remat.CheckpointProfiler() as profiler:
        gradient(other)
    assert profiler.checkpoint_count() == 2
    assert list(other.state_dict()) == list(ours.state_dict())


def test_hooks_of_a_wrapped_module_are_called() -> None:
    seen = []
    module = remat.checkpoint(nn.Linear(4, 4))
    module.register_forward_hook(lambda *_: seen.append("forward"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    gradient(lambda x: module(x.exp()).sin())
    assert seen == ["forward", "backward"]


# -- with no inputs: run, or wrap ------------------------------------------------------------------


def test_a_partial_with_everything_bound_is_run() -> None:
    """So Hugging Face calls its layers."""
    x = X.clone().requires_grad_()
    layer = Chain(lambda m: m)
    remat.checkpoint(functools.partial(plain, x)).sum().backward()
    assert torch.equal(x.grad, gradient(plain))
    assert isinstance(remat.checkpoint(functools.partial(layer.__call__, x=x)), torch.Tensor)
    assert isinstance(remat.checkpoint(functools.partial(layer, x)), torch.Tensor)
    threshold = {"threshold": "1KB"}
    assert isinstance(
        remat.adaptive_checkpoint(functools.partial(layer, x), **threshold), torch.Tensor
    )


def test_a_partial_that_lacks_arguments_is_wrapped() -> None:
    scaled = remat.checkpoint(functools.partial(decorated.__wrapped__, scale=3.0))
    assert torch.equal(gradient(scaled), gradient(lambda x: plain(x) * 3.0))
    assert callable(remat.checkpoint(functools.partial(nn.Linear(4, 4))))


def test_a_call_with_an_option_of_torch_is_run() -> None:
    assert remat.checkpoint(lambda: 3, use_reentrant=False) == 3
    assert remat.adaptive_checkpoint(lambda: 3, threshold=1, use_reentrant=False) == 3
    assert remat.checkpoint(lambda: 3)() == 3


def test_a_decorator_with_an_option_of_torch_wraps() -> None:
    @remat.checkpoint(use_reentrant=False)
    def f(x):
        return plain(x)

    assert torch.equal(gradient(f), gradient(plain))
