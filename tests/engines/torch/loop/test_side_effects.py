"""Random numbers and buffers in the steps of loops: each true step counts once, and in order."""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat

from .oracles import SCHEDULES, Plain, Remat, same

ALL = pytest.mark.parametrize("schedule", SCHEDULES)


def inputs(module=None):
    return torch.randn(6, 4).requires_grad_(), module if module is None else module()


# -- random numbers --------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("steps", [1, 2, 13])
def test_dropout(schedule, steps) -> None:
    def program(run, x, linear):
        return run.loop(lambda s: F.dropout(torch.tanh(linear(s)), 0.4), x, steps)

    same(program, partial(inputs, lambda: nn.Linear(4, 4)), Remat(schedule=schedule))


@ALL
def test_a_generator_of_ones_own(schedule) -> None:
    states = []

    def program(run, x, _):
        generator = torch.Generator().manual_seed(5)
        y = run.loop(lambda s: s.sin() + torch.rand(4, generator=generator), x, 9)
        y.sum().backward(retain_graph=True)
        states.append(generator.get_state())
        return y

    same(program, inputs, Remat(schedule=schedule))
    assert torch.equal(*states)


@ALL
def test_random_numbers_of_some_steps_only(schedule) -> None:
    def program(run, x, _):
        def step(s):
            h, k = s
            return (F.dropout(h) if k in (2, 3, 7) else h.sin()), k + 1

        return run.loop(step, (x, 0), 9)

    same(program, inputs, Remat(schedule=schedule))


@ALL
def test_random_numbers_between_loop_and_backward_pass(schedule) -> None:
    def program(run, x, _):
        y = run.loop(lambda s: F.dropout(s.sin()), x, 9)
        noise = torch.rand(4)
        y.sum().backward(retain_graph=True)
        return y * noise, torch.rand(4)

    same(program, inputs, Remat(schedule=schedule))


@ALL
def test_random_numbers_of_a_loop_inside_a_loop(schedule) -> None:
    def program(run, x, linear):
        def outer(s):
            return run.loop(lambda h: F.dropout(torch.tanh(h)) + h, F.dropout(s), 4)

        return run.loop(outer, x, 5)

    same(program, partial(inputs, lambda: nn.Linear(4, 4)), Remat(schedule=schedule))


# -- buffers ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return x + self.norm(self.linear(x)).tanh()


class Counter(nn.Module):
    """Counts its calls in a buffer, and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return torch.sin(x * self.weight + self.count)


class Slices(nn.Module):
    """Writes to parts of a buffer, each time by other views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen[0] += 1
        self.seen[1:].mul_(0.5).add_(x.detach().mean())
        return torch.sin(x * self.weight + self.seen)


class Ring(nn.Module):
    """Writes to another entry of a buffer in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("ring", torch.zeros(3, 4))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.ring[self.at] = x.detach().mean(0)
        self.at.add_(1).remainder_(3)
        return torch.sin(x * self.weight + self.ring.sum(0))


class Replaced(nn.Module):
    """Puts another tensor into the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("later", None)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.later = self.mean * 2 if self.later is None else self.later + self.mean
        return torch.sin(x * self.weight + self.later)


class Data(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.full((4,), 0.3))

    def forward(self, x):
        with torch.no_grad():
            self.mean.data.lerp_(x.mean(0), 0.1)
            torch.add(self.mean, 1.0, out=self.mean)
        return torch.sin(x * self.weight + self.mean)


@ALL
@pytest.mark.parametrize("steps", [1, 11])
@pytest.mark.parametrize("module", [Block, Counter, Slices, Ring, Replaced, Data])
def test_buffers_are_updated_once_per_step(module, schedule, steps) -> None:
    same(lambda run, x, m: run.loop(m, x, steps), partial(inputs, module), Remat(schedule=schedule))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("module", [Block, Counter, Slices, Ring, Replaced, Data])
def test_buffers_without_gradients(module, mode) -> None:
    torch.manual_seed(0)
    x, one, other = torch.randn(6, 4), module(), None
    other = copy.deepcopy(one)
    with mode():
        found, expected = Remat().loop(one, x, 7), Plain().loop(other, x, 7)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@ALL
@pytest.mark.parametrize("module", [Block, Counter, Slices])
def test_a_list_of_modules_by_step(module, schedule) -> None:
    def program(run, x, layers):
        def step(s):
            h, k = s
            return layers[k](h), k + 1

        return run.loop(step, (x, 0), 5)

    def make():
        return nn.ModuleList(module() for _ in range(5))

    same(program, partial(inputs, make), Remat(schedule=schedule))


@ALL
@pytest.mark.parametrize("module", [Block, Counter, Slices, Ring, Replaced, Data])
def test_two_ways_back_leave_buffers_alone(module, schedule) -> None:
    def program(run, x, m):
        y = run.loop(m, x, 7)
        y.sum().backward(retain_graph=True)
        return y

    same(program, partial(inputs, module), Remat(schedule=schedule))


@ALL
@pytest.mark.parametrize("module", [Block, Counter, Slices, Ring, Replaced, Data])
def test_buffers_of_loops_inside_loops_and_scans_and_whiles(module, schedule) -> None:
    def program(run, x, m):
        def inner(s):
            return run.loop(m, s, 3)

        y = run.loop(inner, x, 4)
        y, _ = run.scan(lambda s, x: (m(s) * x, None), y.detach(), torch.linspace(1, 2, 5))
        return run.until(lambda s: torch.rand(()) < 0.8, m, y.detach())

    same(program, partial(inputs, module), Remat(schedule=schedule))


@ALL
def test_a_buffer_is_used_after_the_loop_as_well(schedule) -> None:
    """Running steps again is no write that other code has to see."""

    def program(run, x, m):
        y = run.loop(m, x, 7)
        z = (y * m.count).sin()
        z.sum().backward(retain_graph=True)
        return z

    same(program, partial(inputs, Counter), Remat(schedule=schedule))


@ALL
def test_a_tensor_that_is_no_buffer_and_is_written_to(schedule) -> None:
    def program(run, x, memory):
        def step(s):
            with torch.no_grad():
                memory.mul_(0.5).add_(s.mean(0))
            return torch.sin(s + memory)

        return run.loop(step, x, 9)

    same(
        program,
        lambda: (torch.randn(6, 4).requires_grad_(), torch.ones(4)),
        Remat(schedule=schedule),
    )


def test_a_tensor_that_only_later_steps_write_to_is_refused() -> None:
    memory = torch.zeros(4)

    def step(s):
        h, k = s
        if k > 2:
            memory.add_(1)
        return h.sin(), k + 1

    with pytest.raises(remat.UnsupportedError, match="wrote to a tensor"):
        Remat().loop(step, (torch.ones(4, requires_grad=True), 0), 6)


# -- steps that do not repeat themselves -----------------------------------------------------------


class Drifting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return torch.sin(x + self.calls)


@pytest.mark.parametrize("schedule", ["revolve", "uniform"])
@pytest.mark.parametrize("slots", [0, 1, 3])
def test_a_step_that_does_not_repeat_itself_is_caught(schedule, slots) -> None:
    x = torch.ones(3, requires_grad=True)
    y = Remat(slots, schedule=schedule).loop(Drifting(), x, 9)
    with pytest.raises(remat.RecomputeMismatchError, match="does not repeat itself"):
        y.sum().backward()


def test_a_step_that_does_not_repeat_itself_is_caught_under_auto() -> None:
    x = torch.ones(3, requires_grad=True)
    y = Remat(2).loop(Drifting(), x, 60)
    with pytest.raises(remat.RecomputeMismatchError, match="does not repeat itself"):
        y.sum().backward()


def test_a_while_that_does_not_repeat_itself_is_caught() -> None:
    x, step = torch.ones(3, requires_grad=True), Drifting()
    y = Remat(2).until(lambda s: step.calls < 20, step, x)
    with pytest.raises(remat.RecomputeMismatchError, match="does not repeat itself"):
        y.sum().backward()


def test_outputs_that_do_not_repeat_themselves_are_caught() -> None:
    calls = []

    def step(s, x):
        calls.append(x)
        return s.sin(), s * len(calls)

    _, ys = Remat(2, schedule="revolve").scan(
        step, torch.ones(3, requires_grad=True), torch.ones(9)
    )
    with pytest.raises(remat.RecomputeMismatchError, match="output"):
        ys.sum().backward()


def test_a_whole_loop_that_does_not_repeat_itself_is_caught() -> None:
    """With all tapes held no step runs twice; going back a second time shows it."""
    x = torch.ones(3, requires_grad=True)
    y = Remat(schedule="all").loop(Drifting(), x, 9)
    y.sum().backward(retain_graph=True)
    with pytest.raises(remat.RecomputeMismatchError, match="whole loop"):
        y.sum().backward()


def test_a_switch_between_the_passes_is_caught() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    y = Remat(schedule="revolve").loop(module, torch.randn(2, 4), 9)
    module.eval()
    with pytest.raises(remat.RecomputeMismatchError):
        y.sum().backward()


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])
def test_a_number_that_changes_where_states_are_zeros_is_caught(schedule) -> None:
    calls = [0]

    def step(s):
        calls[0] += 1
        return s * calls[0]

    y = Remat(schedule=schedule).loop(step, torch.zeros(3, requires_grad=True), 9)
    with pytest.raises(remat.RecomputeMismatchError):
        y.sum().backward()


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_random_numbers_of_python_and_of_numpy(draw) -> None:
    def program(run, x, _):
        random.seed(0)
        np.random.seed(0)
        return run.loop(lambda s: s * (1 + draw()), x, 9)

    same(program, inputs, Remat(schedule="revolve"))


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_random_numbers_times_zeros(draw) -> None:
    """States of zeros agree whatever was drawn, so it has to be drawn again."""

    def gradient(loop) -> torch.Tensor:
        random.seed(0)
        np.random.seed(0)
        start = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(loop(lambda s: s * (1 + draw()), start).sum(), start)[0]

    def plain(step, state):
        for _ in range(9):
            state = step(state)
        return state

    found = gradient(lambda step, s: remat.checkpointed_loop(step, s, 9, 2, schedule="revolve")[0])
    assert torch.equal(found, gradient(plain))
