"""Tensor parallel layers (DTensor) in regions, scopes and budgets."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import remat
from remat.engines.torch.adapter import TORCH

from .networks import WAYS, Network
from .processes import expect_equal, main, results_of


def parallel(way: str, world: int) -> Network:
    network = Network(way)
    del network.unused
    mesh = init_device_mesh("cpu", (world,))
    for block in network.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return network


def train(network: nn.Module) -> list[torch.Tensor]:
    """Train on the same data on all ranks; return losses, gradients and weights of this one."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        loss = network(torch.randn(6, 8)).square().mean()
        loss.backward()
        found += [loss.detach(), *(local(p.grad).clone() for p in network.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def trains_alike(way):
    def case(rank, world):
        expected = train(parallel("plain", world))
        replayed = []
        run = TORCH.run

        def noted(op, *rest):
            replayed.append(str(op.traits.func))
            return run(op, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TORCH, "run", noted)
            expect_equal(train(parallel(way, world)), expected)
        assert replayed
        assert not [name for name in replayed if "c10d" in name or "wait_tensor" in name]

    return case


def keeps_to_a_budget(rank, world) -> None:
    expected = train(parallel("plain", world))
    network = remat.auto_checkpoint(parallel("plain", world), memory_budget="1MB")
    expect_equal(train(network), expected)


CASES = {way: trains_alike(way) for way in WAYS if way != "plain"}
CASES["budget"] = keeps_to_a_budget


# One test for all cases: whoever takes part runs them all, also if tests are spread over workers.
@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel(world) -> None:
    results = results_of(__name__, world)
    assert list(results) == list(CASES)
    assert {name: problem for name, problem in results.items() if problem} == {}


if __name__ == "__main__":
    main(CASES)
