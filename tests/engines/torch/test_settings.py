"""Autocast and other settings: a replay does what the forward pass did, whatever is set later."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat

from .oracles import APIS, Programs, assert_same, backward, outcome, plain, randn, same

programs = Programs()
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(1, 2, 3)

    def forward(self, x):
        h = self.norm(self.first(x).relu())
        h = self.conv(F.softmax(h, -1)[:, None]).mean(1)
        return self.first(F.pad(h, (0, 2))) @ self.first.weight  # the same weight: a cached cast


def model_and_input():
    return Mixed(), torch.randn(4, 8).requires_grad_()


# -- autocast --------------------------------------------------------------------------------------


@programs.starting_from(model_and_input)
def autocast_around_the_segment(run, model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return run(model, x)


@programs.starting_from(model_and_input)
def autocast_inside_of_the_segment(run, model, x):
    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            h = model(x)
        return h.float().sin() @ model.first.weight

    return run(f, x)


@programs.starting_from(model_and_input)
def several_segments_share_cached_casts(run, model, x):
    with torch.autocast("cpu", torch.bfloat16):
        outside = model.first(x)
        a = run(model, x)
        b = run(model, a.float() * 2)
        return outside, a, b, model(b.float())


@programs.starting_from(model_and_input)
def casts_made_without_grad_first(run, model, x):
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            scale = model(x).mean().abs()
        return run(lambda x: model(x) * scale, x)


@programs.starting_from(model_and_input)
def casts_without_a_cache(run, model, x):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return run(model, x), run(model, x.sin())


@programs.starting_from(model_and_input)
def autocast_switched_off_inside(run, model, x):
    def f(x):
        h = model.first(x)
        with torch.autocast("cpu", enabled=False):
            h = model.norm(h.float())
        return model.first(h)

    with torch.autocast("cpu", torch.bfloat16):
        return run(f, x)


@programs.starting_from(model_and_input)
def backward_inside_of_autocast(run, model, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = run(model, x)
        backward([y])
    return y.detach()


@programs.starting_from(model_and_input)
def half_precision_autocast(run, model, x):
    with torch.autocast("cpu", torch.float16):
        return run(lambda x: model.first(x.sin()).relu() @ model.first.weight, x)


@programs.starting_from(model_and_input)
def forward_in_autocast_and_backward_in_another(run, model, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = run(model, x)
    with torch.autocast("cpu", torch.float16):
        backward([y], retain_graph=True)
    return y


# -- settings that ops look at when they run -------------------------------------------------------


@programs.starting_from(randn(4, 3))
def another_default_type_for_the_forward_pass(run, x):
    def f(x):
        wide = torch.ones(4, 3) / 3 + torch.full((4, 3), 0.1)
        return (x * wide).sin() * torch.arange(3) / torch.tensor(7)

    torch.set_default_dtype(torch.float64)
    try:
        return run(f, x)
    finally:
        torch.set_default_dtype(torch.float32)


@programs.starting_from(lambda: (nn.LSTM(3, 4), torch.randn(5, 2, 3).requires_grad_()))
def a_segment_that_switches_gradients_on(run, rnn, x):
    with torch.no_grad():
        return run(lambda x: rnn((x * 2).sin())[0].exp(), x), _with_grad(run, rnn, x)


def _with_grad(run, rnn, x):
    with torch.enable_grad():
        return run(lambda x: rnn((x * 2).sin())[0].exp(), x)


@programs.starting_from(randn(4, 3))
def default_device_inside(run, x):
    def f(x):
        with torch.device("cpu"):
            return (x * torch.ones(4, 3).cumsum(0) * 2).sin()

    return run(f, x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", programs)
def test_as_without_remat(name, api) -> None:
    same(*programs[name], APIS[api])


@pytest.mark.xfail(strict=True, reason="a replay takes the kernels that are switched on then")
@pytest.mark.parametrize("api", ["segment", "scope", "nested", "group", "drawn"])
def test_other_kernels_for_the_forward_pass(api) -> None:
    def program(run, conv, x):
        def f(x):
            with torch.backends.mkldnn.flags(enabled=False):
                return conv(conv(x.sin())[:, :3].sin() * 3).exp()

        return run(f, x)

    make = lambda: (nn.Conv2d(3, 8, 3), torch.randn(2, 3, 20, 20).requires_grad_())  # noqa: E731
    same(program, make, APIS[api])


@pytest.mark.parametrize("api", APIS)
def test_deterministic_algorithms(api) -> None:
    def program(run, x):
        def f(x):
            h = torch.zeros(4, 3).index_put((torch.tensor([0, 0, 2]),), x[:3], accumulate=True)
            return h.sin() * torch.empty(4, 3).fill_(2.0)

        return run(f, x)

    torch.use_deterministic_algorithms(True)
    try:
        same(program, randn(4, 3), APIS[api])
    finally:
        torch.use_deterministic_algorithms(False)


def test_anomaly_detection() -> None:
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        same(lambda run, x: run(lambda x: (x * 2).sin().exp(), x), randn(3), remat.checkpoint)


def test_training_steps_with_a_scaler_and_an_optimizer() -> None:
    """Three steps of mixed precision: weights and optimiser end in the same bits."""

    def program(run, model, x):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = run(lambda x: model.first(x).sin() @ model.first.weight, x).float().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [*(p.detach() for p in model.parameters()), loss.detach()]

    same(program, model_and_input, remat.checkpoint)


def test_the_oracle_tells_casts_apart() -> None:
    """The helper of these tests would see it if autocast were forgotten."""
    torch.manual_seed(0)
    model, x = model_and_input()

    def without(run, model, x):
        return run(model, x).bfloat16()

    expected = outcome(autocast_around_the_segment, plain, (model, x))
    model.zero_grad()
    x.grad = None
    with pytest.raises(AssertionError):
        assert_same(outcome(without, plain, (model, x)), expected)
