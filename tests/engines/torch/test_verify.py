"""verify: what it compares, what it finds, and that it leaves everything as it was."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import remat
from remat.engines.torch.referenced_tensors import referenced_tensors


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


class Mixed(nn.Module):
    """Statistics, random numbers, writes, views, and kernels that make several results."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu_(self.norm(self.convolution(x))) * 2
        h += 1
        h = h.flatten(2).transpose(1, 2)
        h = self.dropout(h + self.attention(h, h, h)[0])
        first, second = self.recurrent(h)[0].chunk(2, -1)
        return torch.cat([first * second, second], -1)


def test_it_counts_what_it_compared() -> None:
    model = Mixed()
    found = remat.verify(model, torch.randn(2, 3, 4, 4))
    assert found
    assert found.function == "Mixed"
    assert found.outputs == 1
    assert found.gradients == len(list(model.parameters()))
    assert found.buffers == 3  # mean, variance and counter of the batch norm
    assert found.ops >= 5
    assert found.random_state


def test_inputs_and_outputs_in_trees() -> None:
    weight = leaf(3, 3)

    def function(pair, *, scale):
        return {"a": pair["x"] @ weight * scale, "b": [pair["y"].exp().sin(), 7]}

    found = remat.verify(function, {"x": leaf(3), "y": leaf(2)}, scale=2.0)
    assert (found.outputs, found.gradients) == (3, 3)


def test_everything_is_left_as_it_was_found() -> None:
    model = Mixed()
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    model(x).sum().backward()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    input_gradient, values, state = x.grad.clone(), x.detach().clone(), torch.get_rng_state()
    remat.verify(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))
    assert torch.equal(x.grad, input_gradient)
    assert torch.equal(x, values)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_function_that_writes_to_its_input(requires_grad) -> None:
    weight = leaf(4, 4)
    x = leaf(4).exp() if requires_grad else torch.randn(4)
    before = x.detach().clone()
    assert remat.verify(lambda x: (x.mul_(2).add_(1) @ weight).exp(), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("autocast", [False, True])
def test_memory_that_nobody_has_written_to_is_not_compared(autocast) -> None:
    def function(x):
        torch.full_like(x, float(torch.rand(())))  # leaves its bytes behind
        noise = torch.empty_like(x).bernoulli_(0.5)
        return (x * noise).sin() * torch.empty(x.shape).fill_(2.0)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for size in (10, 1000, 20_000):
            for _ in range(10):
                assert remat.verify(function, leaf(size))


def test_dropout_in_attention() -> None:
    attention = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
    x = torch.randn(3, 7, 16, requires_grad=True)
    for _ in range(10):
        assert remat.verify(lambda x: attention(x, x, x)[0], x)


def test_a_function_that_does_not_repeat_itself() -> None:
    calls = []

    def counts(x):
        calls.append(None)
        return x.sin() * len(calls)  # here

    with pytest.raises(remat.RecomputeMismatchError, match=r"outputs differ.*output 0") as caught:
        remat.verify(counts, leaf(3))
    assert "aten.mul" in str(caught.value)
    assert "# here" in str(caught.value)


def test_random_numbers_that_nobody_sees() -> None:
    with pytest.raises(remat.RecomputeMismatchError, match="is not deterministic"):
        remat.verify(lambda x: (x * random.random()).exp(), leaf(3))


def test_another_number_of_ops() -> None:
    calls = []

    def grows(x):
        calls.append(None)
        for _ in calls:
            x = x + 0.0
        return (*([x] * len(calls)),)

    with pytest.raises(remat.RecomputeMismatchError, match=r"it ran \d+ ops, then \d+"):
        remat.verify(grows, leaf(3))


class Trap(nn.Module):
    """Changes its weight in a way that PyTorch does not count, before anything is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200, 200))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight).tanh().exp()  # there
        y.register_hook(self.spring)
        return y

    def spring(self, _: Tensor) -> None:
        self.weight.data.add_(1)


def test_an_op_that_gives_another_value_when_it_is_run_again_is_named() -> None:
    outer = nn.Sequential()
    outer.add_module("trap", Trap())
    with pytest.raises(remat.RecomputeMismatchError, match="gave another value") as caught:
        remat.verify(outer, leaf(4, 200))
    text = str(caught.value)
    assert "aten.mm" in text
    assert "module trap (Trap)" in text
    assert "# there" in text
    assert _get_current_dispatch_mode_stack() == []


def test_an_error_in_the_function_leaves_nothing_switched_on() -> None:
    model = Mixed()
    x = torch.randn(2, 3, 4, 4)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    calls = []

    def fails_when_checkpointed(x):
        calls.append(None)
        y = model(x)
        if len(calls) == 2:
            raise KeyError("mine")
        return y

    with pytest.raises(KeyError, match="mine"):
        remat.verify(fails_when_checkpointed, x)
    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match=r"no gradient to compare.*requires_grad_"):
        remat.verify(torch.sin, torch.ones(3))


def test_a_wrapped_function_is_compared_without_its_wrapper() -> None:
    found = remat.verify(remat.checkpoint(lambda x: x.sin().exp()), leaf(3))
    assert found.ops >= 1


class Plain:
    def __init__(self) -> None:
        self.weight = torch.ones(3, requires_grad=True)


PLAIN = Plain()


def has_a_default(x, weight=torch.ones(3, requires_grad=True)):  # noqa: B008  (what this is about)
    return x * weight


def refers_to_an_object(x):
    return x * PLAIN.weight


@pytest.mark.parametrize("function", [has_a_default, refers_to_an_object, Plain.__init__])
def test_gradients_of_every_tensor_that_a_function_refers_to(function) -> None:
    found = referenced_tensors(function)
    expected = {
        has_a_default: [has_a_default.__defaults__[0]],
        refers_to_an_object: [PLAIN.weight],
        Plain.__init__: [],
    }[function]
    assert [id(tensor) for tensor in found.sources.values()] == [id(t) for t in expected]
    assert not found.buffers


def test_the_copies_of_inputs_are_no_ops_of_the_function() -> None:
    found = remat.verify(lambda x: x.sin().exp(), torch.ones(3, requires_grad=True))
    assert found.ops == 2
