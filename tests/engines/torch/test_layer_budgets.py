"""Chains of unlike layers within a memory budget: `checkpoint_sequential(memory_budget=...)`."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

import remat
from remat.api import layer_budgets

WIDTHS = [64, 256, 32, 128, 512, 16, 64, 64]


def unlike_layers(*, dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for narrow, wide in pairwise(WIDTHS):
        layers += [nn.Linear(narrow, wide), nn.Sequential(nn.GELU(), nn.Dropout(dropout))]
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTHS[-1]), nn.ReLU(inplace=True))


INPUT = torch.randn(256, WIDTHS[0], generator=torch.Generator().manual_seed(1))


def passes(model: nn.Sequential, call, count: int = 3) -> list[list[torch.Tensor]]:
    found = []
    for step in range(count):
        torch.manual_seed(step)
        model.zero_grad()
        x = INPUT.clone().requires_grad_()
        result = call(model, x)
        result.square().sum().backward()
        buffers = [buffer.clone() for buffer in model.buffers()]
        found.append([result.detach(), x.grad, *(p.grad for p in model.parameters()), *buffers])
    return found


def last_record():
    return next(reversed(layer_budgets._threads.chains.values()))._budget.last


@pytest.mark.parametrize("budget", [0.7, 0.9, 1.0, "1GB"])
def test_outputs_gradients_and_buffers_of_the_plain_layers(budget) -> None:
    expected = passes(unlike_layers(), lambda model, x: model(x))
    found = passes(
        unlike_layers(), lambda m, x: remat.checkpoint_sequential(m, x, memory_budget=budget)
    )
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_less_memory_by_recomputation() -> None:
    peaks, recomputed = [], []
    for budget in (1.0, 0.8, 0.7):
        model = unlike_layers()
        passes(model, lambda m, x, b=budget: remat.checkpoint_sequential(m, x, memory_budget=b))
        record = last_record()
        assert record.followed
        assert record.measured_peak <= 1.05 * record.budget
        peaks.append(record.measured_peak)
        recomputed.append(record.recomputed_ops)
    assert peaks[0] > max(peaks[1:])
    assert recomputed[0] == 0 < min(recomputed[1:])


def test_a_budget_that_is_too_small_says_which_is_not() -> None:
    model = unlike_layers()
    with pytest.raises(remat.BudgetTooSmallError, match="chain of 16 layers needs at") as caught:
        remat.checkpoint_sequential(model, INPUT, memory_budget="10KB")
    smallest = caught.value.smallest
    assert str(smallest) in str(caught.value)
    remat.checkpoint_sequential(model, INPUT, memory_budget=smallest).sum().backward()
    with pytest.raises(remat.BudgetTooSmallError):
        remat.checkpoint_sequential(model, INPUT, memory_budget=int(0.9 * smallest))


def test_functions_and_other_shapes_get_plans_of_their_own() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    for rows in (32, 64, 32):
        x = INPUT[:rows]
        layers = [lambda x: torch.tanh(x @ weight), torch.sin, lambda x: (x @ weight).exp()] * 2
        loss = remat.checkpoint_sequential(layers, x, memory_budget=0.9).sum()
        (found,) = torch.autograd.grad(loss, weight)
        for layer in layers:
            x = layer(x)
        assert torch.equal(found, torch.autograd.grad(x.sum(), weight)[0])


def test_layers_of_another_kind_of_pass() -> None:
    model = unlike_layers()
    with torch.no_grad():
        assert not remat.checkpoint_sequential(model, INPUT, memory_budget="1MB").requires_grad
    torch.manual_seed(0)
    found = remat.checkpoint_sequential(model, input=INPUT, memory_budget=0.9)
    found.sum().backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    found.sum().backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_inside_of_a_manager_its_budget_counts() -> None:
    model = unlike_layers()
    with (
        remat.CheckpointManager(memory_budget=0.9) as manager,
        pytest.warns(remat.RematWarning, match="memory_budget of checkpoint_sequential is ignored"),
    ):
        remat.checkpoint_sequential(model, INPUT, memory_budget="1MB").sum().backward()
    assert manager.last_pass is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_inside_of_compiled_code_the_graph_ends() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    layers = [lambda x: torch.tanh(x @ weight), torch.sin]

    def f(x):
        return remat.checkpoint_sequential(layers, x * 2, memory_budget="1MB").sum()

    (found,) = torch.autograd.grad(torch.compile(f, backend="eager")(INPUT), weight)
    plain = torch.sin(torch.tanh((INPUT * 2) @ weight)).sum()
    assert torch.equal(found, torch.autograd.grad(plain, weight)[0])
    assert last_record().budget == 10**6


def test_models_are_not_kept_alive() -> None:
    model = unlike_layers()
    remat.checkpoint_sequential(model, INPUT, memory_budget=0.9).sum().backward()
    gone = weakref.ref(model[0])
    del model
    assert gone() is None


_PROCESS = """
import torch, remat, scipy.optimize, scipy.sparse  # which bounds of plans would import late
from torch import nn

torch.set_num_threads(1)

def level(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def layers(rows):
    shapes = [(64, 256), (256, 64), (64, 512), (512, 128), (128, 128), (128, 256), (256, 64)]
    parts = [nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Tanh()) for a, b in shapes * 2]
    return nn.Sequential(*parts), torch.randn(rows, 64)

model, x = layers(8)
remat.checkpoint_sequential(model, x, memory_budget="1GB").sum().backward()
model, x = layers(8192)
budget = {budget}
for step in range(4):
    model.zero_grad(set_to_none=False)  # so that gradients of parameters are there before
    if step < 1:
        model(x[:8]).sum().backward()
        continue
    open("/proc/self/clear_refs", "w").write("5")
    before = level("VmHWM")
    if budget is None:
        loss = model(x).sum()
    else:
        loss = remat.checkpoint_sequential(model, x, memory_budget=budget).sum()
    loss.backward()
    del loss
    print(level("VmHWM") - before)
"""


def measured(budget: int | None) -> list[int]:
    code = _PROCESS.format(budget=budget)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", code]
    found = subprocess.run(run, check=True, capture_output=True, text=True, env=environment)
    return [int(line) for line in found.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs /proc")
def test_the_operating_system_sees_no_more_than_the_budget() -> None:
    plain = measured(None)[-1]
    budget = int(0.4 * plain)
    first, *later = measured(budget)
    assert first <= 1.15 * budget
    assert 0.5 * budget < max(later) <= 1.05 * budget
