"""Pipelines with the 1F1B schedule: regions, scopes and a budget per stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import remat

from .networks import WIDTH, Block
from .processes import expect_equal, main, results_of

MICROBATCHES = 6


class Stage(nn.Sequential):
    """Two blocks; every rank has its own."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        super().__init__(Block(), Block())


class InAScope(Stage):
    def forward(self, x):
        with remat.CheckpointScope("stage"):
            return super().forward(x)


def train(rank: int, world: int, stage: nn.Module) -> list[torch.Tensor]:
    """Train; return losses and gradients of this stage."""
    torch.manual_seed(10 + rank)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, world, torch.device("cpu")),
        MICROBATCHES,
        loss_fn=lambda out, target: (out - target).square().mean(),
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 2 * MICROBATCHES * WIDTH).view(-1, WIDTH)
    found = []
    for _ in range(3):
        losses: list[torch.Tensor] = []
        inputs = (x,) if rank == 0 else ()
        targets = {"target": x.cos(), "losses": losses} if rank == world - 1 else {}
        schedule.step(*inputs, **targets)
        found += [loss.detach() for loss in losses]
        found += [p.grad.clone() for p in stage.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def trains_alike(make):
    def case(rank, world):
        expected = train(rank, world, Stage(rank))
        with remat.CheckpointProfiler() as profiler:
            found = train(rank, world, make(rank))
        assert profiler.recompute_count() >= 3 * MICROBATCHES
        expect_equal(found, expected)

    return case


def budget_per_stage(rank, world) -> None:
    expected = train(rank, world, Stage(rank))
    stage = remat.auto_checkpoint(Stage(rank), memory_budget=0.9)
    expect_equal(train(rank, world, stage), expected)
    assert stage.forward.budget.last.recomputed_ops > 0


CASES = {
    "layers": trains_alike(lambda rank: remat.apply(Stage(rank))),
    "a whole stage": trains_alike(lambda rank: remat.apply(Stage(rank), Stage)),
    "a scope": trains_alike(InAScope),
    "a budget": budget_per_stage,
}


# One test for all cases: whoever takes part runs them all, also if tests are spread over workers.
@pytest.mark.parametrize("world", [2, 4])
def test_pipeline(world) -> None:
    results = results_of(__name__, world)
    assert list(results) == list(CASES)
    assert {name: problem for name, problem in results.items() if problem} == {}


if __name__ == "__main__":
    main(CASES)
