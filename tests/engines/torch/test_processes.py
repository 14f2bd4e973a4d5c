"""Two processes that train together: the same as without remat, on both of them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as differentiable
from torch.nn.parallel import DistributedDataParallel

import remat

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="there is no gloo here"
)
WORLD = 2
SECONDS = 600  # much more than it takes, however busy the machine is


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return x + nn.functional.dropout(self.norm(self.linear(x)).tanh(), 0.5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.run = None

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x


def plain(fn, *args):
    return fn(*args)


class Loop(nn.Module):
    """One block again and again, under a checkpointed loop if there is anything to run it with."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.run = None

    def forward(self, x):
        x = x.requires_grad_()
        if self.run is not plain:
            return remat.checkpointed_loop(self.block, x, 6, 2, schedule="revolve")[0]
        for _ in range(6):
            x = self.block(x)
        return x


def training(rank: int, run, kind=Model, **options) -> list[torch.Tensor]:
    """Train for some steps, each of two batches; return all that becomes of the model."""
    torch.manual_seed(0)
    model = kind()
    model.run = run
    together = DistributedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + rank)
    gradients = []
    for _ in range(3):
        # A static graph cannot begin with a batch that is kept to oneself.
        with nullcontext() if options.get("static_graph") else together.no_sync():
            together(torch.randn(5, 4)).square().sum().backward()
        together(torch.randn(5, 4)).square().sum().backward()
        gradients += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*gradients, *model.parameters(), *model.buffers()]


def sum_in_place(rank, x):
    h = x.detach() * (rank + 1)
    dist.all_reduce(h)
    return (h.exp() * x).sin() + h


def sum_in_place_without_waiting(rank, x):
    h = x.detach() * (rank + 1)
    work = dist.all_reduce(h, async_op=True)
    work.wait()
    return (h.exp() * x).sin() + h


def sum_of_what_was_read_before(rank, x):
    h = (x.detach() * (rank + 1)).sin()
    before = (h.exp() * x).sin()
    dist.all_reduce(h)
    return before, (h.exp() * x).sin()


def sum_of_a_function(rank, x):
    return differentiable.all_reduce((x * (rank + 1)).sin()).exp() * x


def functional_sum(rank, x):
    h = functional.all_reduce((x.detach() * (rank + 1)).sin(), "sum", dist.group.WORLD)
    return (h.exp() * x).sin() + h


def gather(rank, x):
    h = x.detach() * (rank + 1)
    parts = [torch.empty_like(h) for _ in range(WORLD)]
    dist.all_gather(parts, h)
    return (torch.stack(parts).prod(0).exp() * x).sin()


def gather_into_one(rank, x):
    h = x.detach() * (rank + 1)
    whole = torch.empty(WORLD * len(h))
    dist.all_gather_into_tensor(whole, h)
    return (whole.view(WORLD, -1).prod(0).exp() * x).sin()


def broadcast(rank, x):
    h = x.detach() * (rank + 1)
    dist.broadcast(h, 0)
    return (h.exp() * x).sin()


COLLECTIVES = [
    sum_in_place,
    sum_in_place_without_waiting,
    sum_of_what_was_read_before,
    sum_of_a_function,
    functional_sum,
    gather,
    gather_into_one,
    broadcast,
]


def collective(rank: int, run, program) -> list[torch.Tensor]:
    x = torch.linspace(0.1, 1, 4).requires_grad_()
    out = run(lambda x: program(rank, x * 2), x)
    out = out if isinstance(out, tuple) else (out,)
    return [*out, *torch.autograd.grad(sum(part.sum() for part in out), x)]


def compare(rank: int, cases) -> list[str]:
    """Return what differs with and without remat."""
    different = []
    for name, case in cases.items():
        expected, found = case(rank, plain), case(rank, remat.checkpoint)
        if not all(map(torch.equal, found, expected)):
            different.append(name)
    return different


def cases():
    found = {
        "training": training,
        "training with views of buckets": lambda rank, run: training(
            rank, run, gradient_as_bucket_view=True
        ),
        "training, parameters that may be unused": lambda rank, run: training(
            rank, run, find_unused_parameters=True
        ),
        "training, a static graph": lambda rank, run: training(rank, run, static_graph=True),
        "training of a loop": lambda rank, run: training(rank, run, Loop),
        "training of a loop, a static graph": lambda rank, run: training(
            rank, run, Loop, static_graph=True
        ),
    }
    for program in COLLECTIVES:
        found[program.__name__] = lambda rank, run, program=program: collective(rank, run, program)
    return found


def work(rank: int, store: str) -> list[str]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    different = compare(rank, cases())
    dist.destroy_process_group()
    return different


@pytest.mark.slow
def test_two_processes(tmp_path) -> None:
    store = (tmp_path / "store").as_uri()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), store],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        for process in processes:
            out, errors = process.communicate(timeout=SECONDS)
            assert (process.returncode, out.split("\n")) == (0, ["done", ""]), errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    for name in work(int(sys.argv[1]), sys.argv[2]):
        print("different:", name)
    print("done")
