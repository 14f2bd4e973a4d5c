"""Accelerate: models are checkpointed and then prepared."""

from __future__ import annotations

from functools import partial

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

import remat
from remat.integrations.accelerate import prepare

from .training import STEPS


@pytest.fixture(autouse=True)
def _without_memory():
    """Accelerators of one process share their state."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.2)


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), Block(), Block(), Block(), nn.Linear(8, 1))


def train(prepared_by, **options):
    """Train; return losses and weights, and how many regions were run."""
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(torch.linspace(-1, 1, STEPS * 16).view(-1, 4), 4)
    prepared, optimizer, data = prepared_by(accelerator, model, optimizer, data)
    torch.manual_seed(1)
    losses = []
    with remat.CheckpointProfiler() as profiler:
        for batch in data:
            with accelerator.accumulate(prepared):
                loss = prepared(batch).float().square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    weights = accelerator.unwrap_model(prepared).state_dict().values()
    return [*losses, *weights], profiler.checkpoint_count()


def plainly(accelerator, *objects):
    return accelerator.prepare(*objects)


@pytest.mark.parametrize(
    "options", [{}, {"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 2}]
)
def test_trains_as_without_remat(options) -> None:
    expected, none = train(plainly, **options)
    found, regions = train(prepare, **options)
    assert (none, regions) == (0, STEPS * 3)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}])
def test_a_budget(options) -> None:
    expected, _ = train(plainly, **options)
    found, _ = train(partial(prepare, memory_budget=0.9), **options)
    assert all(map(torch.equal, found, expected))


def test_unwrapped_it_is_still_checkpointed() -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = prepare(accelerator, Model(), layers=Block, every=2)
    assert remat.applied(accelerator.unwrap_model(model)) == ["1", "3"]


def test_bad_input_changes_nothing() -> None:
    accelerator, model = accelerate.Accelerator(cpu=True), Model()
    with pytest.raises(ValueError, match="'Other'"):
        prepare(accelerator, model, nn.Linear(2, 2), layers="Other")
    with pytest.raises(remat.UnsupportedError, match="no repeated blocks"):
        prepare(accelerator, model, nn.Linear(2, 2))
    assert remat.applied(model) == []
    with pytest.raises(ValueError, match=r"no torch.nn.Module"):
        prepare(accelerator)
    with pytest.raises(TypeError, match="got int"):
        prepare(3, model)


def test_hooks_in_front_are_named() -> None:
    model = remat.apply(Model())
    accelerate.hooks.add_hook_to_module(model[1], accelerate.hooks.ModelHook())
    with pytest.raises(remat.UnsupportedError, match="remove_hook_from_module"):
        remat.remove(model)
    accelerate.hooks.remove_hook_from_module(model[1])
    assert remat.applied(remat.remove(model)) == []
