"""DistributedDataParallel: regions, scopes, loops and budgets give what they give without remat."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.core.tracing import Tracer
from remat.engines.torch.adapter import TORCH

from .networks import CHECKPOINTED, WIDTH, Block, Network
from .processes import expect_equal, main, results_of

OPTIONS = {
    "usual": {},
    "many buckets": {"bucket_cap_mb": 0.001},
    "views of buckets": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "a static graph": {"static_graph": True},
}


class Loop(nn.Module):
    """One block again and again."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Linear(8, WIDTH), Block()
        self.way = way

    def forward(self, x):
        x = self.embed(x)
        if self.way == "loop":
            return remat.checkpointed_loop(self.block, x, 6, 2, schedule="revolve")[0]
        for _ in range(6):
            x = self.block(x)
        return x


def train(model: nn.Module, rank: int, *, by_rank: bool = False, **options) -> list[torch.Tensor]:
    """Train with two batches a step, the first of them kept to oneself; return all there is."""
    together = DistributedDataParallel(model, **options)
    if by_rank:
        together.register_comm_hook(None, mean_in_order_of_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    found = []
    for _ in range(3):
        # A static graph cannot begin with a batch that is kept to oneself.
        with nullcontext() if options.get("static_graph") else together.no_sync():
            together(torch.randn(6, 8)).square().mean().backward()
        loss = together(torch.randn(6, 8)).square().mean()
        loss.backward()
        found += [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def network(way: str, options) -> Network:
    made = Network(way)
    if not options.get("find_unused_parameters") and not options.get("static_graph"):
        del made.unused
    return made


def trains_alike(rank, world, *, way, **options) -> None:
    expected = train(network("plain", options), rank, **options)
    with remat.CheckpointProfiler() as profiler:
        found = train(network(way, options), rank, **options)
    assert profiler.recompute_count() > 0
    expect_equal(found, expected)


def loops_train_alike(rank, world, **options) -> None:
    """Gradients of a loop are ready in another order, so that DDP fills its buckets in another one.

    What more than two ranks have, gloo adds in an order that depends on the place in a bucket.
    """
    expected = train(Loop("plain"), rank, by_rank=True, **options)
    expect_equal(train(Loop("loop"), rank, by_rank=True, **options), expected)


def mean_in_order_of_ranks(_, bucket):  # DDP reads annotations: not as strings
    """Average the gradients of a bucket in the same order everywhere in it."""
    mine = bucket.buffer()
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(sum(all_ranks[1:], all_ranks[0]) / len(all_ranks))
    return done


def budgets_train_alike(rank, world, **options) -> None:
    expected = train(network("plain", options), rank, **options)
    model = remat.auto_checkpoint(network("plain", options), memory_budget=0.8)
    expect_equal(train(model, rank, **options), expected)
    assert model.forward.budget.last.recomputed_ops > 0


def a_manager_around_all(rank, world) -> None:
    expected = train(network("plain", {}), rank)
    with remat.CheckpointManager(memory_budget="1MB") as manager:
        found = train(network("plain", {}), rank)
    expect_equal(found, expected)
    assert manager.last_pass is not None


# -- plans of several ranks ------------------------------------------------------------------------


def plans_of(rank: int, rows: int) -> list:
    """Return the plans that all ranks follow after some passes."""
    model = remat.auto_checkpoint(network("plain", {}), memory_budget=0.75)
    together = DistributedDataParallel(model)
    for _ in range(3):
        together(torch.ones(rows, 8)).square().mean().backward()
    plan = model.forward.budget.planned[0].plan
    plans: list = [None] * dist.get_world_size()
    dist.all_gather_object(plans, repr((sorted(plan.keep), plan.stages)))
    return plans


class OfOtherSpeed:
    """Lets ops seem to take other times on each rank: dear is what is cheap elsewhere."""

    def __init__(self, rank: int, patch: pytest.MonkeyPatch) -> None:
        ran = Tracer.ran

        def ran_slowly(tracer, op, made, seconds, key, **facts):
            is_matmul = "addmm" in str(op.traits.func)
            ran(tracer, op, made, 1e-3 if is_matmul == bool(rank) else 1e-6, key, **facts)

        patch.setattr(Tracer, "ran", ran_slowly)


def ranks_of_different_speed_follow_one_plan(rank, world) -> None:
    with pytest.MonkeyPatch.context() as patch:
        OfOtherSpeed(rank, patch)
        time.sleep(0.2 * rank)
        plans = plans_of(rank, 16)
        assert len(set(plans)) == 1
        # The test can fail: with plans of their own they differ.
        patch.setattr("remat.engines.torch.budget.manager.agreed_seconds", lambda keys, s, about: s)
        assert len(set(plans_of(rank, 16))) > 1


def ranks_of_different_shapes_plan_for_themselves(rank, world) -> None:
    """Nobody waits for a rank that plans at another time, or not at all."""
    expected = train_shapes(network("plain", {}), rank)
    model = remat.auto_checkpoint(network("plain", {}), memory_budget=0.9)
    expect_equal(train_shapes(model, rank), expected)
    assert len(model.forward.budget.planned) == (1 if rank == 0 else 3)


def train_shapes(model: nn.Module, rank: int) -> list[torch.Tensor]:
    together = DistributedDataParallel(model)
    torch.manual_seed(rank)
    for step in range(3):
        together(torch.randn(8 + rank * step, 8)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


# -- collectives -----------------------------------------------------------------------------------


def collectives_are_never_replayed(rank, world) -> None:
    """What a collective gave is kept; only what is around it is run again."""
    replayed = []
    run = TORCH.run

    def noted(op, *rest):
        replayed.append(str(op.traits.func))
        return run(op, *rest)

    def layer(x):
        h = (x * 2).sin()
        h = functional.all_reduce(h.detach(), "sum", dist.group.WORLD) + h
        parts = [torch.empty_like(h) for _ in range(world)]
        dist.all_gather(parts, h.detach().exp())
        return (torch.stack(parts).sum(0) * h).cos()

    def run_both(region):
        x = torch.linspace(0.1, 1, 8).requires_grad_()
        out = region(layer, region(layer, x))
        return [out.detach(), *torch.autograd.grad(out.sum(), x)]

    expected = run_both(lambda fn, x: fn(x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TORCH, "run", noted)
        expect_equal(run_both(remat.checkpoint), expected)
    assert replayed
    assert not [name for name in replayed if "c10d" in name or "wait_tensor" in name]


CASES = {
    f"{way}, {name}": partial(trains_alike, way=way, **options)
    for way in CHECKPOINTED
    for name, options in OPTIONS.items()
}
CASES |= {
    "a loop": loops_train_alike,
    "a loop, a static graph": partial(loops_train_alike, static_graph=True),
    "a budget": budgets_train_alike,
    "a budget, unused parameters": partial(budgets_train_alike, find_unused_parameters=True),
    "a budget, a static graph": partial(budgets_train_alike, static_graph=True),
    "a manager around all": a_manager_around_all,
    "different speed": ranks_of_different_speed_follow_one_plan,
    "different shapes": ranks_of_different_shapes_plan_for_themselves,
    "collectives": collectives_are_never_replayed,
}


# One test for all cases: whoever takes part runs them all, also if tests are spread over workers.
@pytest.mark.parametrize("world", [2, 4])
def test_distributed_data_parallel(world) -> None:
    results = results_of(__name__, world)
    assert list(results) == list(CASES)
    assert {name: problem for name, problem in results.items() if problem} == {}


if __name__ == "__main__":
    main(CASES)
