"""Five steps of training, and what became of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import remat
from remat.check.measure import peak_bytes

STEPS = 5
CPU = torch.device("cpu")
Loss = Callable[[nn.Module], torch.Tensor]


def train(model: nn.Module, loss_of: Loss) -> list[torch.Tensor]:
    """Train; return all losses and what all parameters and buffers are then."""
    model.train()
    torch.manual_seed(7)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        assert all(p.grad is not None for p in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(tensor.detach().clone() for tensor in model.state_dict().values())]


def regions_of_a_step(model: nn.Module, loss_of: Loss) -> int:
    """Return how many regions a step runs; each is computed again."""
    with remat.CheckpointProfiler() as profiler:
        loss_of(model).backward()
    assert profiler.recompute_count() == profiler.checkpoint_count()
    return profiler.checkpoint_count()


def peak_of_a_step(model: nn.Module, loss_of: Loss) -> int:
    """Return the peak memory of a step, by the allocator."""
    loss_of(model).backward()  # the gradients are there

    def step() -> None:
        loss_of(model).backward()

    peak = peak_bytes(step, CPU)
    assert peak is not None
    return peak


def check(
    make: Callable[[], nn.Module],
    enable: Callable[[nn.Module], object],
    loss_of: Loss,
    *,
    regions: int,
    share: float = 0.8,
) -> None:
    """Compare a model with checkpointing to one without: bits, regions, memory."""
    plain, model = make(), make()
    peak = peak_of_a_step(plain.train(), loss_of)
    plain.zero_grad()
    enable(model.train())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert regions_of_a_step(model, loss_of) == regions
    assert peak_of_a_step(model, loss_of) < share * peak
    model.zero_grad()
    assert all(map(torch.equal, train(model, loss_of), train(plain, loss_of)))
