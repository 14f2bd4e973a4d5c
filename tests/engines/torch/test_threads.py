"""Scopes in several threads, and backward passes in other threads than the forward pass."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import remat
from remat.engines.torch.randomness import draw, draw_again

from .oracles import APIS, in_a_scope, plain


def model_and_input(number: int):
    generator = torch.Generator().manual_seed(number)
    weight = torch.randn(8, 8, generator=generator).requires_grad_()
    return weight, torch.randn(4, 8, generator=generator)


def gradient(run, number: int, *, wait=lambda: None) -> torch.Tensor:
    """Return a gradient; `wait` is called in the middle of the region."""
    weight, x = model_and_input(number)
    generator = torch.Generator().manual_seed(number)

    def f(x):
        for n in range(5):
            mask = torch.empty(4, 8).bernoulli_(0.7, generator=generator)
            x = (x @ weight).sin() * mask
            if n == 2:
                wait()
            x += 0.1
        return x

    run(f, x).sum().backward()
    return weight.grad


@pytest.mark.parametrize("api", APIS)
def test_regions_in_several_threads(api) -> None:
    """All are open at the same time, and each is right."""
    count = 4
    barrier = threading.Barrier(count, timeout=600)
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda n: gradient(APIS[api], n, wait=barrier.wait), range(count)))
    for number, one in enumerate(found):
        assert torch.equal(one, gradient(plain, number))


def test_one_scope_object_in_several_threads() -> None:
    scope = remat.CheckpointScope("shared")
    barrier = threading.Barrier(3, timeout=600)

    def run(f, x):
        with scope:
            return f(x)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda n: gradient(run, n, wait=barrier.wait), range(3)))
    for number, one in enumerate(found):
        assert torch.equal(one, gradient(plain, number))


def test_shared_parameters_in_several_threads() -> None:
    """Threads read the same weights at the same time, as in inference servers and data parallel."""
    layer = nn.Linear(8, 8)
    inputs = [torch.randn(4, 8) for _ in range(4)]
    barrier = threading.Barrier(4, timeout=600)

    def one(x):
        def f(x):
            h = layer(x).sin()
            barrier.wait()
            return layer(h).tanh()

        y = remat.checkpoint(f, x)
        barrier.wait()
        return torch.autograd.grad(y.sum(), list(layer.parameters()))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, inputs))
    for x, grads in zip(inputs, found, strict=True):
        expected = torch.autograd.grad(layer(layer(x).sin()).tanh().sum(), list(layer.parameters()))
        for a, b in zip(grads, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("api", APIS)
def test_backward_in_another_thread(api) -> None:
    weight, x = model_and_input(0)
    torch.manual_seed(5)
    y = APIS[api](lambda x: F.dropout((x @ weight).sin()).exp(), x)
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join(20)
    found, weight.grad = weight.grad, None
    torch.manual_seed(5)
    F.dropout((x @ weight).sin()).exp().sum().backward()
    assert torch.equal(found, weight.grad)


@pytest.mark.parametrize("api", APIS)
def test_two_threads_walk_back_through_one_region(api) -> None:
    weight, x = model_and_input(1)
    a, b = APIS[api](lambda x: ((x @ weight).sin().exp(), (x @ weight).cos().tanh()), x)
    c = (a * b).sin()
    barrier = threading.Barrier(4, timeout=600)

    def one(_):
        barrier.wait()
        return [torch.autograd.grad(c.sum(), weight, retain_graph=True)[0] for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        found = [g for gs in pool.map(one, range(4)) for g in gs]
    h = x @ weight
    (expected,) = torch.autograd.grad(
        (h.sin().exp() * (x @ weight).cos().tanh()).sin().sum(), weight
    )
    assert all(torch.equal(g, expected) for g in found)


def test_another_thread_is_not_recorded() -> None:
    stacks = []
    with remat.CheckpointScope("here"):
        torch.ones(2).sin()
        thread = threading.Thread(target=lambda: stacks.append(_get_current_dispatch_mode_stack()))
        thread.start()
        thread.join(20)
        x = torch.ones(2).requires_grad_()
        y = (x * 2).sin()
    y.sum().backward()
    assert stacks == [[]]


def test_a_tensor_made_by_another_thread_in_the_middle() -> None:
    """What another thread writes to memory of the region is seen by its version."""
    x = torch.randn(4).requires_grad_()
    h_was = []

    def f(x):
        h = x.detach() * 2
        a = (h.abs() * x).sin()
        thread = threading.Thread(target=lambda: h.add_(1))
        thread.start()
        thread.join(20)
        h_was.append(h.clone())
        return a, (h.abs() * x).sin()

    a, b = remat.checkpoint(f, x)
    (a.sum() + b.sum()).backward()
    h = x.detach() * 2
    expected = (h.abs() * x).sin().sum() + (h_was[0].abs() * x).sin().sum()
    (g,) = torch.autograd.grad(expected, x)
    assert torch.equal(x.grad, g)


def dropped(x):
    """Return what dropout gave, and something whose gradient needs it."""
    kept = torch.nn.functional.dropout(x * 1, 0.5)
    return kept, kept.sin()


def is_right(run) -> bool:
    """Return whether a gradient belongs to the random numbers of its own forward pass."""
    x = torch.ones(2000, requires_grad=True)
    kept, out = run(dropped, x)
    out.sum().backward()
    return torch.equal(x.grad, kept.detach().cos() * kept.detach())  # a half is 2, a half is 0


@pytest.mark.parametrize("run", [remat.checkpoint, in_a_scope], ids=["segment", "scope"])
def test_threads_that_draw_random_numbers_in_regions(run) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: is_right(run), range(400)))
    assert all(found)


def test_a_thread_that_draws_at_the_same_time_is_noticed() -> None:
    """What it disturbs in the forward pass is an error; what it disturbs later is repaired."""
    stop = threading.Event()

    def prefetch() -> None:
        while not stop.is_set():
            torch.rand(10)

    thread = threading.Thread(target=prefetch)
    thread.start()
    try:
        results = [right_or_error() for _ in range(300)]
    finally:
        stop.set()
        thread.join()
    assert "wrong" not in results
    assert results.count("right") > 0


def right_or_error() -> str:
    try:
        return "right" if is_right(remat.checkpoint) else "wrong"
    except remat.RecomputeMismatchError as error:
        assert "another thread drew from the same generator" in str(error)  # noqa: PT017
        return "error"


class Disturbed:
    """A generator from which another thread draws whenever its state is read."""

    device = torch.device("cpu")

    def __init__(self, times: int) -> None:
        self.generator = torch.Generator()
        self.times = times

    def get_state(self) -> torch.Tensor:
        state = self.generator.get_state()
        if self.times:
            self.times -= 1
            torch.rand(1, generator=self.generator)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)


def test_a_draw_that_was_disturbed_is_an_error() -> None:
    disturbed = Disturbed(times=1)
    _, drawn = draw(disturbed, lambda: torch.rand(3, generator=disturbed.generator))
    with pytest.raises(remat.RecomputeMismatchError, match="a generator of its own"):
        draw_again(drawn, lambda: torch.rand(3, generator=disturbed.generator), repeatable=True)


def test_a_draw_and_its_replay_that_were_disturbed_alike_are_noticed() -> None:
    """The generator ends in the same state, but the numbers differ."""
    disturbed = Disturbed(times=1)
    generator = disturbed.generator
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)  # some other thread
    thread.start()
    try:
        _, drawn = draw(disturbed, lambda: torch.rand(3, generator=generator))
    finally:
        waiting.set()
        thread.join()

    def draw_and_be_disturbed() -> torch.Tensor:
        numbers = torch.rand(3, generator=generator)
        torch.rand(1, generator=generator)  # by another thread
        return numbers

    with pytest.raises(remat.RecomputeMismatchError, match="a generator of its own"):
        draw_again(drawn, draw_and_be_disturbed, repeatable=True)


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_replay_that_was_disturbed_is_repeated(repeatable) -> None:
    disturbed = Disturbed(times=0)
    calls = 0

    def call() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            torch.rand(1, generator=disturbed.generator)  # by another thread
        return torch.rand(3, generator=disturbed.generator)

    first, drawn = draw(disturbed, call)
    if repeatable:
        assert torch.equal(draw_again(drawn, call, repeatable=True), first)
        assert calls == 3
    else:
        with pytest.raises(remat.RecomputeMismatchError):
            draw_again(drawn, call, repeatable=False)
