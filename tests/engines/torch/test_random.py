"""Random numbers: what was drawn is drawn again, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.engines.torch.loop import side_effects
from remat.engines.torch.randomness import generator_of
from remat.engines.torch.recording import recorder
from remat.engines.torch.schema import traits_of

from .oracles import APIS, Programs, randn, same

pytestmark = pytest.mark.usefixtures("another_thread")

programs = Programs()


# Sizes on both sides of the generator's state, 5056 bytes: what is smaller is held, not redrawn.
@programs.starting_from(randn(4, 6))
def dropout(run, x):
    def f(x):
        h = F.dropout(x * 2, 0.3).sin()
        return F.dropout(h * 3, 0.5).exp()

    return run(f, x)


@programs.starting_from(randn(40, 60))
def large_dropout(run, x):
    return dropout(run, x)


@programs.starting_from(randn(2, 30, 9, 9))
def dropout_of_channels_last(run, x):
    def f(x):
        h = x.to(memory_format=torch.channels_last) * 2
        return F.dropout(F.dropout2d(h, 0.3).sin(), 0.5).exp()

    return run(f, x)


@programs.starting_from(randn(40, 60))
def every_dropout(run, x):
    def f(x):
        h = F.alpha_dropout(x * 2, 0.3, training=True).sin()
        h = F.feature_alpha_dropout(h[None], 0.3, training=True)[0].sin()
        h = F.dropout1d(h, 0.2).sin()
        h = F.dropout(h.clone(), 0.1, inplace=True).sin()
        h = F.dropout(h, 0.0).sin()
        return F.dropout(h, 1.0) + F.dropout(h.sin(), 0.9, training=False).sin()

    return run(f, x)


@programs.starting_from(randn(40, 60))
def leaky_slopes(run, x):
    return run(lambda x: F.rrelu(x * 2, 0.1, 0.4, training=True).sin(), x)


@programs.starting_from(randn(4, 6))
def few_leaky_slopes_in_place(run, x):
    return run(lambda x: F.rrelu(x * 2, 0.1, 0.4, training=True, inplace=True).sin(), x)


@programs.starting_from(randn(30, 50))
def factories(run, x):
    def f(x):
        noise = torch.rand(30, 50) + torch.randn(30, 50) + torch.randint(5, (30, 50))
        h = (x * noise).sin()
        h = h * torch.rand_like(x) * torch.randn_like(x, dtype=torch.float64).float()
        h = h[torch.randperm(30)] + torch.randint_like(x, 3)
        return h.exp() * torch.normal(x.detach(), 0.5) + torch.normal(0.0, 1.0, (30, 50))

    return run(f, x)


@programs.starting_from(randn(30, 50))
def in_place(run, x):
    def f(x):
        noise = torch.zeros(30, 50)
        total = 0.0
        for name in ("uniform_", "normal_", "exponential_", "bernoulli_", "log_normal_"):
            total = total + (x * getattr(noise, name)().abs()).sin()
        noise.geometric_(0.3).add_(torch.empty(30, 50).cauchy_().clamp_(-1, 1)).random_(7)
        return total, (x * noise).cos()

    return run(f, x)


@programs.starting_from(randn(30, 50))
def samples(run, x):
    def f(x):
        weights = x.softmax(1)
        picked = x.gather(1, torch.multinomial(weights, 3))
        coin = torch.bernoulli(weights)
        counts = torch.poisson(weights * 9)
        counts = counts + torch.binomial(torch.full((30, 50), 9.0), weights.detach())
        return (
            picked.sin(),
            (x * coin).exp(),
            (x * counts).cos(),
            F.gumbel_softmax(x * 2, hard=True),
        )

    return run(f, x)


@programs.starting_from(randn(30, 50))
def distributions(run, x):
    def f(x):
        normal = torch.distributions.Normal(x, x.exp())
        gamma = torch.distributions.Gamma(x.exp() + 1, torch.ones(30, 50))
        beta = torch.distributions.Beta(x.exp(), x.exp() + 1)
        return normal.rsample().sin(), gamma.rsample().sin(), beta.rsample().sin()

    return run(f, x)


@programs.starting_from(randn(30, 50))
def numbers_into_a_part(run, x):
    def f(x):
        noise = torch.zeros(30, 50)
        noise[3:20].uniform_()
        noise[:, 1:4].normal_()
        noise.t()[7:].bernoulli_(0.5)
        return (x * noise).sin()

    return run(f, x)


@programs.starting_from(lambda: (*randn(30, 50)(), torch.zeros(30, 50)))
def numbers_into_memory_of_the_caller(run, x, noise):
    def f(x, noise):
        torch.randn(30, 50, out=noise)
        a = (x * noise.abs()).sin()
        noise.uniform_()
        return a, (x * noise.abs()).sin()

    return run(f, x, noise)


@programs.starting_from(randn(4, 3))
def numbers_after_a_change_of_shape(run, x):
    def f(x):
        noise = torch.zeros(4, 3)
        noise.unsqueeze_(0).uniform_()
        return (x * noise).sin()

    return run(f, x)


@programs.starting_from(randn(30, 50))
def own_generator(run, x):
    mine = torch.Generator().manual_seed(7)

    def f(x):
        noise = torch.rand(30, 50, generator=mine)
        mask = torch.empty(30, 50).bernoulli_(0.4, generator=mine)
        h = F.dropout((x * noise).sin(), 0.2) * mask
        return h.exp(), x * torch.randperm(50, generator=mine)

    result = run(f, x)
    return *result, mine.get_state(), torch.rand(3, generator=mine)


@programs.starting_from(randn(30, 50))
def seeds_set_inside(run, x):
    def f(x):
        torch.manual_seed(5)
        a = F.dropout(x * 2).sin()
        with torch.random.fork_rng(devices=[]):
            b = F.dropout(x * 3).exp()
        state = torch.get_rng_state()
        c = F.dropout(x.sin()).cos()
        torch.set_rng_state(state)
        return a, b, c, F.dropout(x.cos()).exp()

    return run(f, x)


@programs.starting_from(randn(30, 50))
def other_sources(run, x):
    def f(x):
        h = x * random.random()
        return (h * torch.from_numpy(np.random.rand(30, 50).astype(np.float32))).sin()

    random.seed(3)
    np.random.seed(3)
    return run(f, x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(40, 40), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Dropout(0.1)
            )
            for _ in range(3)
        )

    def forward(self, run, x):
        for layer in self.layers:
            x = run(layer, x)
        return F.dropout(x, 0.2)


@pytest.mark.parametrize("api", APIS)
def test_draws_between_and_after_the_segments(api) -> None:
    def program(run, model, x):
        y = model(run, x)
        after = torch.rand(3)
        return y, after

    same(program, lambda: (Drop(), torch.randn(50, 40)), APIS[api])


@pytest.mark.parametrize("api", APIS)
def test_draws_during_the_backward_pass(api) -> None:
    """A hook that draws gets the numbers that it gets without remat."""

    def program(run, x):
        y = run(lambda x: F.dropout(F.dropout(x * 2).sin()).exp(), x)
        y.register_hook(lambda g: g * torch.rand_like(g))
        x.register_hook(lambda g: g + torch.rand_like(g))
        return y

    same(program, randn(30, 50), APIS[api])


@pytest.mark.parametrize("preserve", [True, False])
def test_a_partly_replayed_region(preserve) -> None:
    """Only one of two branches is differentiated: its numbers are those that it drew."""

    def program(run, x, w):
        def f(x, w):
            a = F.dropout(x * 2).sin()
            b = F.dropout(w * 3).exp()
            return a, b

        _, b = run(f, x, w)
        return b

    same(
        program,
        lambda: (torch.randn(40, 50).requires_grad_(), torch.randn(40, 50).requires_grad_()),
        lambda f, *args: remat.checkpoint(f, *args, preserve_rng_state=preserve),
    )


def test_the_generator_stays_where_the_program_left_it() -> None:
    """Draws between forward and backward pass are not repeated or skipped by a replay."""
    x = torch.randn(40, 50).requires_grad_()
    torch.manual_seed(3)
    y = remat.checkpoint(lambda x: F.dropout(x * 2).sin(), x)
    torch.rand(10)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_every_op_that_takes_a_generator_is_known_to_draw() -> None:
    """Or it would be run again with other numbers: ops that take one are tagged as random."""
    takes = [
        overload
        for name in dir(torch.ops.aten)
        if isinstance(packet := getattr(torch.ops.aten, name), torch._ops.OpOverloadPacket)
        for overload in (getattr(packet, o) for o in packet.overloads())
        if any("Generator" in str(a.type) for a in overload._schema.arguments)
    ]
    assert len(takes) > 50
    untagged = [str(op) for op in takes if torch.Tag.nondeterministic_seeded not in op.tags]
    assert untagged == []


def drawn_and_written_to(size: int):
    """Return a result, its input and the gradient it ought to have; what was drawn is changed."""
    drawn = []

    def f(x):
        drawn.append(torch.rand(size, size))
        return torch.sin(x * drawn[-1])

    x = torch.randn(size, size, requires_grad=True)
    torch.manual_seed(0)
    y = remat.checkpoint(f, x)
    drawn[0].add_(1)
    torch.manual_seed(0)
    return y, x, torch.autograd.grad(f(x).sum(), x)[0]


def test_a_few_numbers_from_a_factory_are_held_and_written_to_after_the_region() -> None:
    """They reach the program as another tensor over the same memory; its writes count, too."""
    y, x, _ = drawn_and_written_to(4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)


def test_many_numbers_from_a_factory_are_drawn_again_whatever_was_written_to_them() -> None:
    y, x, expected = drawn_and_written_to(400)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


# Devices whose generators are not known, and kernels that draw from elsewhere. There is none here,
# so the CPU stands for one: its ops draw from the default generator, and remat is told of another.


class IdleGenerator:
    """The generator of a device, from which its kernels do not draw."""

    device = torch.device("cuda", 0)

    def get_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        raise AssertionError("it has not moved, so nothing is drawn again")


def drawn_from_elsewhere(run, x):
    def f(x):
        a = F.dropout(x * 2, 0.3).sin()
        noise = torch.rand_like(x)
        noise.uniform_()
        b = torch.rrelu(a * noise, training=True) + torch.normal(a.detach(), 0.1)
        return b * torch.bernoulli(torch.full_like(x, 0.5)) * b

    return run(f, x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("generator", [None, IdleGenerator()])
def test_numbers_that_no_known_generator_gave_are_kept(api, generator, monkeypatch) -> None:
    monkeypatch.setattr(recorder, "generator_of", lambda args, kwargs: generator)
    for shape in [(4, 6), (40, 60)]:
        same(
            drawn_from_elsewhere,
            lambda shape=shape: (torch.randn(shape).requires_grad_(),),
            APIS[api],
        )


def test_a_loop_refuses_numbers_that_no_known_generator_gave(monkeypatch) -> None:
    monkeypatch.setattr(side_effects, "generator_of", lambda args, kwargs: None)
    with pytest.raises(remat.UnsupportedError, match="cannot be drawn again"):
        remat.checkpointed_loop(F.dropout, torch.ones(3, requires_grad=True), 5, 2)


class Device:
    """A device module of a backend, as far as it knows generators."""

    def __init__(self, **attributes) -> None:
        vars(self).update(attributes)


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Device(), None),
        (Device(current_device=lambda: 1), None),
        (Device(current_device=lambda: 1, default_generators=()), None),
        (Device(current_device=lambda: 1, default_generators=(None, GENERATOR)), GENERATOR),
    ],
)
def test_the_generator_of_a_device(module, found, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert generator_of((), {"device": "xpu"}) is found


def test_a_device_without_a_module_has_no_generator() -> None:
    assert generator_of((), {"device": "privateuseone"}) is None


def test_the_lstm_of_cudnn_counts_as_random_with_dropout_only() -> None:
    traits = traits_of(torch.ops.aten._cudnn_rnn.default)
    arguments = [argument.name for argument in traits.func._schema.arguments]
    call = [None] * len(arguments)
    for chance in (0.0, 0.5):
        call[arguments.index("dropout")] = chance
        assert traits.draws(tuple(call), {}) == bool(chance)
