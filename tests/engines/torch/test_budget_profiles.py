"""`CheckpointProfiler` around passes under a budget: it sees what they hold and recompute."""

from __future__ import annotations

import copy
import gc
import importlib

import pytest
import torch
from torch import nn

import remat

from .networks import GPT, ResNet

NETWORKS = {"gpt": GPT, "resnet": ResNet}


def train(model: nn.Module, inputs, count: int = 1) -> None:
    for _ in range(count):
        model.zero_grad()
        model(*inputs).backward()


def plain_peak(model: nn.Module, inputs) -> int:
    """Return the peak of what is allocated, where nothing is checkpointed."""
    train(model, inputs)
    model.zero_grad()
    with remat.CheckpointProfiler() as profiler:
        model(*inputs).backward()
    assert profiler.checkpoint_count() == 0
    return profiler.peak_bytes()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("budget", [0.7, 0.85])
def test_a_manager_is_seen_as_it_is(network, budget) -> None:
    torch.manual_seed(0)
    model, inputs = NETWORKS[network](), NETWORKS[network].inputs()
    expected = plain_peak(copy.deepcopy(model), inputs)
    with remat.CheckpointManager(memory_budget=budget) as manager:
        train(model, inputs, 2)
        model.zero_grad()
        with remat.CheckpointProfiler() as profiler:
            model(*inputs).backward()
    record = manager.last_pass
    assert profiler.checkpoint_count() == 1
    assert profiler.recompute_count() > 0
    (totals,) = profiler.regions
    assert totals.name == "memory budget"
    assert totals.ops == record.recomputed_ops > 0
    assert totals.seconds == profiler.recompute_seconds() == record.recompute_seconds
    assert profiler.peak_bytes() + profiler.memory_saved() == pytest.approx(expected, rel=0.02)
    assert profiler.peak_bytes() <= 1.05 * record.budget + parameter_bytes(model)
    assert 0 < totals.held_bytes < totals.plain_bytes


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of gradients, which a profiler counts and a budget does not."""
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("budget", [0.7, 0.85])
def test_auto_checkpoint_is_seen_as_it_is(budget) -> None:
    torch.manual_seed(0)
    plain, inputs = GPT(4, 64, 0.0), GPT.inputs(4, 64)
    model = remat.auto_checkpoint(copy.deepcopy(plain), memory_budget=budget)
    train(model, inputs, 2)
    model.zero_grad()
    with remat.CheckpointProfiler() as profiler:
        model(*inputs).backward()
    record = model.forward.budget.last
    assert profiler.checkpoint_count() == 1
    assert profiler.regions[0].ops == record.recomputed_ops > 0
    assert profiler.recompute_seconds() == record.recompute_seconds
    peak = plain_peak(plain, inputs)
    assert profiler.peak_bytes() + profiler.memory_saved() == pytest.approx(peak, rel=0.02)
    assert profiler.memory_saved() > 0.1 * peak
    assert "memory budget" in profiler.report()
    (trace,) = profiler.traces
    assert trace.saved_bytes == pytest.approx(record.trace.saved_bytes, rel=0.05)


def test_a_training_loop_inside_of_a_profiler() -> None:
    model, inputs = GPT(2, 32, 0.0), GPT.inputs(2, 32)
    with remat.CheckpointProfiler() as profiler, remat.CheckpointManager(memory_budget=0.9) as m:
        for step in range(3):
            train(model, inputs)
            assert profiler.checkpoint_count() == step + 1
    assert m.last_pass.followed


def test_a_profiler_that_begins_within_a_pass_sees_the_next_one() -> None:
    x = torch.ones(64, requires_grad=True)
    with remat.CheckpointManager(memory_budget="1MB"):
        h = x.sin()
        with remat.CheckpointProfiler() as profiler:
            h.exp().sum().backward()
            assert profiler.checkpoint_count() == 0
            x.sin().exp().sum().backward()
            assert profiler.checkpoint_count() == 1


def test_gradients_are_the_same_under_a_profiler() -> None:
    torch.manual_seed(0)
    plain, inputs = ResNet(), ResNet.inputs()
    model = remat.auto_checkpoint(copy.deepcopy(plain), memory_budget=0.8)
    for _ in range(3):
        train(plain, inputs)
        with remat.CheckpointProfiler():
            train(model, inputs)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_nothing_counts_as_held_after_a_pass_without_backward() -> None:
    model, inputs = GPT(2, 32, 0.0), GPT.inputs(2, 32)
    remat.auto_checkpoint(model, memory_budget=0.9)
    train(model, inputs, 2)
    with remat.CheckpointProfiler() as profiler:
        loss = model(*inputs)
        assert profiler._accounting._held.live > loss.nbytes
        del loss
        gc.collect()
        assert profiler._accounting._plain.live == profiler._accounting._held.live == 0


def test_a_pass_that_fails_is_seen_up_to_there() -> None:
    def f(x):
        (x.sin().exp() * x).tanh()
        raise KeyError("in the pass")

    x = torch.ones(8, requires_grad=True)
    with remat.CheckpointProfiler() as profiler:
        with pytest.raises(KeyError), remat.CheckpointManager(memory_budget="1MB"):
            f(x)
        gc.collect()
        assert profiler._accounting._plain.live == profiler._accounting._held.live == 0
    assert profiler.checkpoint_count() == 1
    assert profiler.recompute_count() == 0


def test_a_profiler_that_begins_when_a_part_of_the_step_has_been_differentiated() -> None:
    x = torch.linspace(0.1, 1.0, 8, requires_grad=True)
    with remat.CheckpointManager(memory_budget="1MB"):
        h = x * x
        torch.autograd.grad(x.sin().sum(), x)
        with remat.CheckpointProfiler():
            h.sin().sum().backward()
    (expected,) = torch.autograd.grad((x * x).sin().sum(), x)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("manager", [False, True])
def test_what_is_saved_belongs_to_the_op_that_needs_it(manager) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with remat.CheckpointProfiler() as profiler:
        if manager:
            with remat.CheckpointManager(memory_budget="1MB"):
                x.sin().cos().sin().sum().backward()
        else:
            remat.checkpoint(lambda x: x.sin().cos().sin(), x).sum().backward()
        remat.checkpoint(lambda x: x.exp().cos().tanh(), x).sum().backward()
    first, second = profiler.traces
    # `sin` and `cos` need what they read, `exp` and `tanh` what they have made.
    assert [op.saves == op.reads for op in first.ops[:3]] == [True] * 3
    exp, cos, tanh = second.ops
    assert (exp.saves, cos.saves, tanh.saves) == (exp.makes, cos.reads, tanh.makes)


def test_the_peak_of_a_plain_pass_is_not_simulated_in_every_step(monkeypatch) -> None:
    simulate = importlib.import_module("remat.plans.simulate")
    count, run = [], simulate.simulate_plain
    monkeypatch.setattr(simulate, "simulate_plain", lambda trace: count.append(1) or run(trace))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with remat.CheckpointManager(memory_budget=1.0):
        for number in range(8):
            model(torch.ones(4, 8)).sum().backward()
            if number == 3:
                known = len(count)
    assert len(count) == known
