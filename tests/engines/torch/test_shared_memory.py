"""Memory that is written to where PyTorch does not count: NumPy, DLPack, buffers, statistics.

Plain autograd does not see these writes either, so the programs add what is written to: then it
saves none of it. Where it does, what is right is the same program without the write.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize

import remat

from .oracles import APIS, Programs, randn, same

programs = Programs()
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning")
FORGETTING = ["segment", "scope", "nested", "group", "drawn"]
SIZES = {"small": 4, "large": 200}  # copied, or summed up


def of_bytes(tensor):
    return torch.frombuffer(tensor.detach().numpy().data.cast("B"), dtype=torch.float32).view(
        tensor.shape
    )


SHARED_COPIES = {
    "dlpack": lambda tensor: torch.from_dlpack(tensor.detach()),
    "numpy": lambda tensor: torch.from_numpy(tensor.detach().numpy()),
    "bytes": of_bytes,
}


# -- two tensors over one memory, each with a storage of its own ----------------------------------


def write_to_the_shared_tensor(shared_with):
    def program(run, x):
        def f(x):
            y = x.detach().sin()
            shared = shared_with(y)
            z = (x + y).sin()
            shared.mul_(2)
            return z * (x + y).cos()

        return run(f, x)

    return program


def write_to_the_tensor(shared_with):
    def program(run, x):
        def f(x):
            y = x.detach().sin()
            shared = shared_with(y)
            z = (x + shared).sin()
            y.mul_(2)
            return z * (x + shared).cos() + (x + y).exp()

        return run(f, x)

    return program


def write_from_one_to_the_other(shared_with):
    def program(run, x):
        def f(x):
            y = x.detach().sin()
            shared = shared_with(y)
            y.add_(shared)
            z = (x + shared).sin()
            shared.add_(y)
            return z * (x + y).cos()

        return run(f, x)

    return program


def write_to_the_shared_with_one_that_has_gone(shared_with):
    def program(run, x):
        def f(x):
            y = x.detach().sin().data  # the tensor that the op made is gone, its memory is not
            shared = shared_with(y)
            z = (x + y).sin()
            shared[0] = 2
            return z * (x + y).cos()

        return run(f, x)

    return program


def write_to_memory_from_outside(shared_with):
    def program(run, x):
        b = x.detach().exp()
        shared = shared_with(b)

        def f(x):
            z = (x + b).sin()
            shared.mul_(2)
            w = (x + b).cos()
            b.mul_(2)
            return z * w, (x + shared).sin()

        return run(f, x)

    return program


def statistics_with_shared_memory(shared_with):
    def program(run, x):
        norm = nn.BatchNorm1d(x.shape[1])
        shared = shared_with(norm.running_mean)

        def f(x):
            z = (x + shared).sin()
            return norm(z).exp() + (x + shared).cos()

        return run(f, x)

    return program


for make in (
    write_to_the_shared_tensor,
    write_to_the_tensor,
    write_from_one_to_the_other,
    write_to_the_shared_with_one_that_has_gone,
    write_to_memory_from_outside,
    statistics_with_shared_memory,
):
    for kind, shared_with in SHARED_COPIES.items():
        for size, n in SIZES.items():
            programs[f"{make.__name__}, {kind}, {size}"] = make(shared_with), randn(n, n)


@programs.starting_from(randn(4, 4))
def an_array_that_is_written_to_between_reads(run, x):
    array = np.ones((4, 4), np.float32)
    shared = torch.from_numpy(array)

    def f(x):
        z = (x + shared).sin()
        array[:] = 2
        return z * (x + shared).cos()

    return run(f, x)


@programs.starting_from(randn(4, 4))
def a_batch_in_an_array_that_is_filled_again(run, x):
    array = np.ones((4, 4), np.float32)
    y = run(lambda x, batch: (x + batch[1:]).sin().exp(), x[1:], torch.from_numpy(array))
    array[:] = 2
    return y


@programs.starting_from(randn(200, 200))
def an_array_that_nobody_writes_to(run, x):
    shared = torch.from_numpy(np.ones((200, 200), np.float32))
    return run(lambda x: (x + shared).sin().exp() * shared.t(), x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("api", FORGETTING)
def test_a_large_batch_that_is_filled_again_is_an_error(api, requires_grad) -> None:
    weight = torch.randn(200, 200, requires_grad=True)
    array = np.ones((200, 200), np.float32)
    batch = torch.from_numpy(array).requires_grad_(requires_grad)
    y = APIS[api](lambda batch: (batch[:100] + weight[:100]).sin().exp(), batch)
    array[99, 199] = 2
    with pytest.raises(RuntimeError, match=r"memory that it shares.*\[100, 200\].*\.clone\(\)"):
        y.sum().backward()


@pytest.mark.parametrize("api", FORGETTING)
def test_what_no_op_has_read_may_be_written_to(api) -> None:
    weight = torch.randn(100, 100, requires_grad=True)
    array = np.ones((200, 200), np.float32)
    columns = torch.from_numpy(array)[:, :100]
    y = APIS[api](lambda weight: (columns[:100] + weight).sin().exp(), weight)
    array[100:] = array[:, 100:] = 2
    (found,) = torch.autograd.grad(y.sum(), weight)
    (expected,) = torch.autograd.grad((1 + weight).sin().exp().sum(), weight)
    assert torch.equal(found, expected)


# -- statistics: what is right is the same without the later write --------------------------------


def gradient(run, read, write, x):
    y = run(read, x)
    write()
    return torch.autograd.grad(y.sum(), x)[0]


def channels():
    return FusedMovingAvgObsFakeQuantize(
        observer=torch.ao.quantization.MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


def by_tensor(observer):
    def read(x):
        scale, zero = observer.scale, observer.zero_point
        return torch.fake_quantize_per_tensor_affine(x.exp(), scale, zero, 0, 255).sin()

    return read


def by_channel(observer):
    def read(x):
        scale, zero = observer.scale, observer.zero_point
        return torch.fake_quantize_per_channel_affine(x.exp(), scale, zero, 0, -128, 127).sin()

    return read


def in_training(norm):
    return lambda: norm.train()(torch.randn(4, 4) * 7)


def statistics():
    observer, per_channel, norm = FusedMovingAvgObsFakeQuantize(), channels(), nn.BatchNorm1d(4)
    for module in (observer, per_channel, norm):
        module(torch.randn(4, 4))
    norm.eval()
    return {
        "scale": (lambda x: (x * observer.scale).sin(), lambda: observer(torch.randn(4, 4) * 9)),
        "one scale": (by_tensor(observer), lambda: observer(torch.randn(4, 4) * 9)),
        "channels": (by_channel(per_channel), lambda: per_channel(torch.randn(4, 4) * 9)),
        "norm": (lambda x: norm(x.exp()).sin(), in_training(norm)),
        "mean": (
            lambda x: ((x.exp() - norm.running_mean) / norm.running_var).sin(),
            in_training(norm),
        ),
    }


@pytest.mark.parametrize("api", FORGETTING)
@pytest.mark.parametrize("name", statistics())
def test_statistics_that_are_written_to_after_a_region(name, api) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    read, write = statistics()[name]
    expected = gradient(lambda f, x: f(x), read, lambda: None, x)
    found = gradient(APIS[api], read, write, x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("api", FORGETTING)
def test_statistics_that_a_loop_in_a_region_writes_to(api) -> None:
    """To the region around it, what a loop does is not to be seen."""

    def gradient_of(run, loop):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm1d(4), torch.randn(4, 4, requires_grad=True)

        def f(x):
            y = (x + norm.running_mean).sin()
            y = loop(norm, y)
            return (y + norm.running_mean).cos()

        return torch.autograd.grad(run(f, x).sum(), x)[0]

    def checkpointed(norm, y):
        return remat.checkpointed_loop(lambda s: norm(s).sin(), y, seq_length=2)[0]

    found = gradient_of(APIS[api], checkpointed)
    expected = gradient_of(lambda f, x: f(x), lambda norm, y: norm(norm(y).sin()).sin())
    assert torch.equal(found, expected)
