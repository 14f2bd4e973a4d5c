"""Reuse of region outputs: what the next region holds as its input is not recomputed."""

from __future__ import annotations

import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.profiler import profile

import remat

from .oracles import APIS, Programs, backward, plain, randn, same

programs = Programs()


def layer(x):
    return (x.sin() * 2).tanh_()


@programs.starting_from(randn(4, 3))
def a_chain(run, x):
    for _ in range(3):
        x = run(layer, x)
    return x


@programs.starting_from(randn(4, 3))
def a_chain_back_and_forth(run, x):
    y = run(layer, run(layer, x))
    backward([y], retain_graph=True)
    return y


@programs.starting_from(randn(4, 3))
def derivatives_of_derivatives(run, x):
    y = run(layer, run(layer, x))
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return g, y


@programs.starting_from(randn(4, 3))
def branches_that_join(run, x):
    a, b = run(layer, x), run(layer, x + 1)
    return run(lambda a, b: (a * b).tanh(), a, b) + run(layer, a)


@programs.starting_from(randn(4, 4))
def parts_of_the_output(run, x):
    y = run(layer, x)
    return run(lambda a, b: (a * b).sin(), y[1:], y.mT[:3]), y


@programs.starting_from(randn(4, 4))
def an_output_that_the_next_region_writes_to(run, x):
    def writes(y):
        y += 1
        return y.sin()

    return run(writes, run(lambda x: (x * 3).sin(), x))


@programs.starting_from(randn(4, 4))
def an_output_with_other_memory(run, x):
    """What autograd has saved stays what it was."""
    y = run(layer, x)
    y.data = torch.ones(4, 4)
    return run(layer, y)


@programs.starting_from(randn(4, 4))
def an_output_with_the_memory_of_another(run, x):
    y, z = run(lambda x: (x.tanh(), x.sigmoid()), x)
    y.data = z.data
    return run(layer, y), z


@programs.starting_from(
    lambda: (nn.LayerNorm(6), *(nn.Linear(6, 6) for _ in range(3)), *randn(5, 6)())
)
def one_norm_for_three(run, norm, a, b, c, x):
    def attend(x):
        y = norm(x * 2)
        return (a(y).sigmoid() * b(y) + c(y[:1])).tanh()

    return run(attend, run(attend, x))


@programs.starting_from(
    lambda: (nn.BatchNorm1d(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), nn.Linear(6, 6), *randn(5, 6)())
)
def norms_of_norms(run, batch, group, root, linear, x):
    def layers(x):
        x = linear(batch(x.sin()))
        return linear(group(root(linear(group(x)))))

    y = run(layers, run(layers, x))
    backward([y], retain_graph=True)
    return y


@programs.starting_from(lambda: (nn.LayerNorm(6), nn.Linear(6, 6), *randn(5, 6)()))
def a_norm_whose_input_is_asked_for_first(run, norm, linear, x):
    def layers(x):
        h = x.sin()
        y = norm(h)
        z = linear(y)
        return z, h.exp() * h

    a, b = run(layers, x)
    backward([b], retain_graph=True)
    backward([a], retain_graph=True)
    return a, b


@pytest.mark.parametrize("name", programs)
@pytest.mark.parametrize("api", APIS)
def test_programs(name, api) -> None:
    program, make_inputs = programs[name]
    same(program, make_inputs, APIS[api])


def counts(run) -> Counter[str]:
    """Return how often which op was run; below any mode, so the profiler counts them."""
    with profile() as found:
        run()
    return Counter({event.key: event.count for event in found.key_averages()})


def seen_twice(calls: int) -> int:
    """Return what calls under a mode add: the profiler sees them above and below it."""
    return calls


def test_what_the_next_region_holds_is_not_computed_again() -> None:
    x, w = torch.randn(50, 50).requires_grad_(), torch.randn(50, 50).requires_grad_()

    def train(call) -> None:
        y = x
        for _ in range(5):
            y = call(lambda y: torch.tanh(y @ w), y)
        y.sum().backward()

    once, ours = counts(lambda: train(plain)), counts(lambda: train(remat.checkpoint))
    # Only the last output is held by nobody; its region has to compute it.
    assert ours["aten::tanh"] - seen_twice(5) - once["aten::tanh"] == 1


def test_statistics_of_a_batch_norm_are_held() -> None:
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    x = torch.randn(4, 8, 32, 32)

    def train(call) -> None:
        call(block, call(block, x)).sum().backward()

    def norms(call) -> int:
        return counts(lambda: train(call))["aten::native_batch_norm"]

    # For the activation behind it, the norm of the second block is run again, not the other.
    assert norms(remat.checkpoint) - seen_twice(2) - norms(plain) == 1


def same_gradient(program) -> None:
    """Compare `program(call, x)`, a loss, with and without remat, for one matrix."""
    gradients = []
    for call in plain, remat.checkpoint:
        torch.manual_seed(0)
        x = (torch.eye(40) + torch.randn(40, 40) / 10).requires_grad_()
        torch.autograd.backward(out := program(call, x), torch.ones_like(out))
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_write_in_the_middle_of_a_pass() -> None:
    """A region that has got its output back sees that it was written to since."""
    outputs = []

    def program(call, x):
        y = call(lambda x: torch.tanh(x * 2), x)
        if call is not plain:  # which would raise
            outputs.append(y)
            y.register_hook(spoil)
        return call(lambda y: torch.sin(y * 3), y)

    @torch.no_grad()
    def spoil(_) -> None:
        outputs[0].zero_()

    same_gradient(program)
    assert not outputs[0].any()


def test_nothing_is_borrowed_for_longer_than_a_pass() -> None:
    x = torch.randn(50, 50).requires_grad_()
    y = remat.checkpoint(lambda x: torch.tanh(x * 2), x)
    z = remat.checkpoint(lambda y: torch.sin(y * 3), y)
    memory, node = weakref.ref(y.untyped_storage()), y.grad_fn
    torch.autograd.grad(z.sum(), y)  # which does not come to the first region
    del y, z
    assert memory() is None
    assert node is not None


def test_nothing_is_held_for_a_region_that_nobody_asks() -> None:
    x = torch.randn(50, 50).requires_grad_()
    y = remat.checkpoint(lambda x: torch.tanh(x * 2), x)
    memory, node = weakref.ref(y.untyped_storage()), y.grad_fn
    z = remat.checkpoint(lambda y: torch.sin(y * 3), y)
    del y
    assert memory() is not None  # the second region starts from it
    del z
    assert memory() is None
    assert node is not None


def test_the_profiler_sees_what_is_borrowed() -> None:
    """What both passes hold falls to nothing, and the peak is no more than one input per region."""
    regions, nbytes = 8, 64 * 64 * 4
    w = torch.randn(64, 64).requires_grad_()
    with remat.CheckpointProfiler() as profiler:
        y = torch.randn(64, 64)
        for _ in range(regions):
            y = remat.checkpoint(lambda y: torch.tanh(torch.tanh(torch.tanh(y @ w))), y)
        y.sum().backward()
    # Plain holds 3 results of each, checkpointing the last of each, and one region in full.
    assert profiler.memory_saved() == pytest.approx((2 * regions - 3) * nbytes, abs=2 * nbytes)


def test_another_layout_over_the_same_memory() -> None:
    """Assigned to .data, which nobody counts: autograd has saved what was there before."""

    def program(call, x):
        y = call(lambda x: torch.tanh(x * 2), x)
        y.data = y.data.t()
        return call(lambda y: torch.sin(y * 3), y)

    same_gradient(program)


class WritesToWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, x.mul_(gradient)


def test_a_norm_whose_input_is_overwritten_in_the_pass() -> None:
    weights = [torch.randn(6, 6).requires_grad_() for _ in range(3)]

    def block(x):
        h = x.sin()  # without a history
        a = h * weights[0]
        n = nn.functional.layer_norm(h, (6,))
        return (a + n * weights[1]).sum() + (WritesToWhatItSaved.apply(h, weights[2]) * 3).sum()

    x = torch.randn(6, 6)
    expected = torch.autograd.grad(block(x), weights[1:])
    found = torch.autograd.grad(remat.checkpoint(block, x), weights[1:])
    assert all(map(torch.equal, found, expected))


def test_a_by_product_that_is_written_to_is_computed_again() -> None:
    def f(x):
        size = torch.linalg.slogdet(x).logabsdet
        return torch.sin(torch.exp(size / 100)), size

    @torch.no_grad()
    def program(call, x):
        with torch.enable_grad():
            y, size = call(f, x)
        size.mul_(2)
        return y

    same_gradient(program)


def test_an_outer_region_is_computed_once_for_a_norm_inside() -> None:
    w = torch.randn(64, 64).requires_grad_()

    def inner(x, n):
        return torch.sin(x * w[0]) + torch.sin(n @ w)

    def outer(x):
        for _ in range(5):
            x = torch.tanh(x)
        return remat.checkpoint(inner, x, nn.functional.layer_norm(x, (64,)))

    with remat.CheckpointProfiler() as profiler:
        remat.checkpoint(outer, torch.randn(32, 64).requires_grad_()).sum().backward()
    assert profiler.recompute_count() == profiler.checkpoint_count() == 2


def test_after_a_pass_that_failed() -> None:
    """What it has borrowed is given back by the next one."""
    x = torch.randn(50, 50).requires_grad_()
    y = remat.checkpoint(lambda x: torch.tanh(x * 2), x)
    z = remat.checkpoint(lambda y: torch.sin(y * 3), y)
    fails = [True]

    def fail(_) -> None:
        if fails:
            raise ArithmeticError

    y.register_hook(fail)
    with pytest.raises(ArithmeticError):
        z.sum().backward(retain_graph=True)
    fails.clear()
    torch.autograd.grad(z.sum(), y, retain_graph=True)
    z.sum().backward(retain_graph=True)
    memory, node = weakref.ref(y.untyped_storage()), y.grad_fn
    del y, z
    assert memory() is None
    assert node is not None


def test_threads_over_one_graph() -> None:
    """What one pass has borrowed, another may give back while a third one wants it."""
    x = torch.randn(8, 8).requires_grad_()
    w = torch.randn(8, 8).requires_grad_()

    def first(x):
        t = torch.tanh(x @ w)
        return t, torch.tanh(t * 2)

    def graph(call):
        t, u = call(first, x)
        return (call(lambda t: torch.sin(t @ w).tanh(), t) + u).sum()

    (expected,) = torch.autograd.grad(graph(plain), x)
    loss = graph(remat.checkpoint)

    def passes(_) -> bool:
        found = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(150))
        return all(torch.equal(gradient, expected) for gradient in found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(passes, range(4)))


def test_a_look_at_what_was_saved_hands_nothing_back() -> None:
    x, w = torch.randn(50, 50).requires_grad_(), torch.randn(50, 50).requires_grad_()
    y = remat.checkpoint(lambda x: torch.tanh(x * 2), x)
    z = remat.checkpoint(lambda y: torch.tanh(y @ w), y)
    product = z.grad_fn.next_functions[0][0]
    assert torch.equal(product._saved_self, y)  # outside of any pass
    memory, node = weakref.ref(y.untyped_storage()), y.grad_fn
    del y, z, product
    assert memory() is None
    assert node is not None
