"""Several processes train one model: DDP with checkpointed layers, FSDP2 with a memory budget.

    torchrun --nproc-per-node 2 examples/distributed.py

It runs on the CPU, through gloo; started without torchrun it is a group of one process.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat

WIDTH, ROWS, STEPS = 64, 256, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)), nn.Linear(WIDTH, 1))


def train(model: nn.Module) -> list[float]:
    """Train on data of this rank; return the mean losses of all ranks."""
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def sharded(model: nn.Sequential) -> nn.Module:
    for block in model[:-1]:
        fully_shard(block)
    return fully_shard(model)


def main() -> None:
    plain = train(DistributedDataParallel(make_model()))
    layers = train(DistributedDataParallel(remat.apply(make_model())))
    # The budget comes first: FSDP is to see a model that keeps to it.
    budget = train(sharded(remat.auto_checkpoint(make_model(), memory_budget=0.6)))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} process(es), losses of {STEPS} steps")
        print("DDP, plain:              ", *(f"{loss:.6f}" for loss in plain))
        print("DDP, checkpointed layers:", *(f"{loss:.6f}" for loss in layers))
        print("FSDP2, 60% of the memory:", *(f"{loss:.6f}" for loss in budget))
    assert layers == plain


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun says who we are
        dist.init_process_group("gloo")
        main()
        dist.barrier()  # a rank that leaves early may take the others' connections with it
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "store").as_uri()
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
            main()
            dist.destroy_process_group()
