"""FSDP2 (`fully_shard`), and FSDP1 as far as it works: the same as without remat."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import remat
from remat.engines.torch.adapter import TORCH

from .networks import CHECKPOINTED, WIDTH, Block, Network
from .processes import expect_equal, main, results_of

STEPS = 3
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS = {
    "usual": {},
    "kept after forward": {"reshard_after_forward": False},
    "bfloat16": {"mp_policy": BFLOAT16},
}


def sharded(way: str, **options) -> Network:
    network = Network(way)
    del network.unused
    return sharded_blocks(network, **options)


def sharded_blocks(network: nn.Module, **options) -> nn.Module:
    for block in network.blocks:
        fully_shard(block, **options)
    return fully_shard(network, **options)


def train(network: nn.Module, rank: int, *, batches: int = 1, rows: int = 6) -> list[torch.Tensor]:
    """Train; return losses, gradients and weights of this rank."""
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        for batch in range(batches):
            if isinstance(network, FSDPModule):
                network.set_requires_gradient_sync(batch == batches - 1)
            loss = network(torch.randn(rows, 8)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [local(p.grad).clone() for p in network.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(local(p).detach().clone() for p in network.parameters())]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def trains_alike(rank, world, *, way, batches=1, **options) -> None:
    expected = train(sharded("plain", **options), rank, batches=batches)
    with remat.CheckpointProfiler() as profiler:
        found = train(sharded(way, **options), rank, batches=batches)
    assert profiler.recompute_count() > 0
    expect_equal(found, expected)


def smaller_groups(rank, world) -> None:
    """Parameters that are resharded to a part of the processes only."""
    trains_alike(rank, world, way="scope", reshard_after_forward=1 if world == 2 else 2)


class Counted:
    """Counts which modules have their parameters gathered at a time."""

    def __init__(self, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self.most = 0
        self._network = network
        names = {id(module): name for name, module in network.named_modules()}
        for verb in ("unshard", "reshard"):
            monkeypatch.setattr(FSDPModule, verb, self._counting(verb, names))

    def _counting(self, verb, names):
        original = getattr(FSDPModule, verb)

        def call(module, *args):
            out = original(module, *args)
            self.calls.append((verb, names[id(module)]))
            self.most = max(self.most, self.gathered())
            return out

        return call

    def gathered(self) -> int:
        return sum(
            block._get_fsdp_state()._fsdp_param_groups[0].is_unsharded
            for block in self._network.blocks
        )


def gathers_once_and_releases(rank, world) -> None:
    """The last block is gathered by FSDP itself, the others for the replay, one at a time."""
    network = sharded("scope")
    loss = network(torch.ones(6, 8)).square().mean()
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(network, patch)
        assert counted.gathered() == 0
        loss.backward()
    expected = []
    for n in range(3):
        expected += [("unshard", f"blocks.{n}"), ("reshard", f"blocks.{n}")]
    assert counted.calls == expected
    assert counted.most == 2  # with the last block, whose backward is about to run
    assert counted.gathered() == 0


class Fails(RuntimeError):
    pass


def releases_after_an_error(rank, world) -> None:
    """A replay that fails in the middle of a block leaves nothing gathered."""
    network = sharded("scope")
    loss = network(torch.ones(6, 8)).square().mean()
    run = TORCH.run

    def fail_at_gelu(op, *rest):
        if "gelu" in str(op.traits.func):
            raise Fails
        return run(op, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TORCH, "run", fail_at_gelu)
        with pytest.raises(Fails):
            loss.backward()
    # (FSDP itself has gathered the last one)
    state = [b._get_fsdp_state()._fsdp_param_groups[0].is_unsharded for b in network.blocks]
    assert state[:3] == [False, False, False]


def a_parameter_that_others_freed(rank, world) -> None:
    """Memory that is freed, and not by FSDP: an error, never a replay on nothing."""
    linear = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    out = remat.checkpoint(lambda x: linear(x).sin().exp(), x).sum()
    linear.weight.untyped_storage().resize_(0)
    with pytest.raises(remat.ModifiedInputError, match="freed"):
        out.backward()


def evaluation(rank, world) -> None:
    network = sharded("apply").eval()
    with torch.no_grad():
        found = network(torch.ones(2, 8))
        expected = sharded("plain").eval()
        torch.manual_seed(3)
        a = network(torch.ones(2, 8))
        torch.manual_seed(3)
        b = expected(torch.ones(2, 8))
    assert found.shape == b.shape
    expect_equal([a], [b])


def keeps_to_a_budget(rank, world, **options) -> None:
    """A budget around the whole model."""
    expected = train(sharded("plain", **options), rank, rows=128)
    network = without_unused()
    remat.auto_checkpoint(network, memory_budget=0.8)
    sharded_blocks(network, **options)
    expect_equal(train(network, rank, rows=128), expected)
    assert network.forward.budget.last.recomputed_ops > 0


# -- ranks of different shapes: no replay may gather ---------------------------------------------


class Views(nn.Module):
    """Returns a view of memory that no tensor of the program has any more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).sin().t().reshape(-1, WIDTH, 1).flatten(1).view(WIDTH, -1).t()


class Writes(nn.Module):
    """Writes to what sharded modules have made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(m for _ in range(3) for m in (Block(), Views()))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            before = x.tanh()
            x = block(x)
            doubled = x * 2
            x.mul_(1.1).add_(before)
            x = x + doubled.sin().cos()
        return x


def train_unlike(network: nn.Module, rank: int) -> list[torch.Tensor]:
    """Train with batches whose sizes differ from rank to rank and change; return gradients."""
    torch.manual_seed(1 + rank)
    found = []
    for step in range(3):
        network(torch.randn(512 + 256 * rank * step, 8)).square().mean().backward()
        found += [local(p.grad).clone() for p in network.parameters()]
    return found


def without_unused() -> Network:
    network = Network()
    del network.unused
    return network


def unlike_ranks_keep_to_a_budget(rank, world, *, make, budget) -> None:
    """Their plans differ, so none of them may gather parameters: the others would wait for it."""
    expected = train_unlike(sharded_blocks(make()), rank)
    network = remat.auto_checkpoint(make(), memory_budget=budget)
    sharded_blocks(network)
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(network, patch)
        found = train_unlike(network, rank)
    assert counted.calls == []
    expect_equal(found, expected)
    assert network.forward.budget.last.recomputed_ops > 0


def unlike_ranks_in_regions(rank, world, *, way) -> None:
    """They replay the same ops, and so gather the same parameters in the same order."""
    expect_equal(train_unlike(sharded(way), rank), train_unlike(sharded("plain"), rank))


def modules_in_sharded_modules(rank, world) -> None:
    def make():
        network = without_unused()
        for block in network.blocks:
            fully_shard(block.down)
        return network

    unlike_ranks_keep_to_a_budget(rank, world, make=make, budget=0.9)


def a_manager_around_training(rank, world) -> None:
    """With the step of an optimizer, which writes to parameters that are DTensors."""
    expected = train(sharded("plain"), rank, rows=128)
    with remat.CheckpointManager(memory_budget=0.8) as manager:
        found = train(sharded("plain"), rank, rows=128)
    expect_equal(found, expected)
    assert manager.last_pass.recomputed_ops > 0


def state_dicts(rank, world) -> None:
    assert list(sharded("apply").state_dict()) == list(sharded("plain").state_dict())


def removed(rank, world) -> None:
    network = sharded("apply")
    remat.remove(network)
    expect_equal(train(network, rank), train(sharded("plain"), rank))


# -- FSDP1 -----------------------------------------------------------------------------------------


def fsdp1(way: str, **options) -> nn.Module:
    network = Network(way)
    del network.unused
    return FullyShardedDataParallel(
        network,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        **options,
    )


def trains_alike_with_fsdp1(rank, world, *, way) -> None:
    expected = train_fsdp1(fsdp1("plain"), rank)
    with remat.CheckpointProfiler() as profiler:
        found = train_fsdp1(fsdp1(way), rank)
    assert profiler.recompute_count() > 0
    expect_equal(found, expected)


def train_fsdp1(network: nn.Module, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = network(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with FullyShardedDataParallel.summon_full_params(network):
        return [*losses, *(p.detach().clone() for p in network.parameters())]


def several_blocks_with_fsdp1(rank, world) -> None:
    """FSDP1 has no way to gather a module inside of backward: an error that says what to do."""
    network = fsdp1("scope")
    loss = network(torch.ones(6, 8)).square().mean()
    with pytest.raises(remat.ModifiedInputError, match="each sharded module by itself"):
        loss.backward()


CASES = {
    f"{way}, {name}": partial(trains_alike, way=way, **options)
    for way in CHECKPOINTED
    for name, options in OPTIONS.items()
}
CASES |= {
    "two batches before gradients are reduced": partial(trains_alike, way="scope", batches=2),
    "smaller groups": smaller_groups,
    "a budget": keeps_to_a_budget,
    "a budget, bfloat16": partial(keeps_to_a_budget, mp_policy=BFLOAT16),
    "a budget, unlike ranks": partial(
        unlike_ranks_keep_to_a_budget, make=without_unused, budget=0.45
    ),
    "a budget, unlike ranks, views and writes": partial(
        unlike_ranks_keep_to_a_budget, make=Writes, budget=0.6
    ),
    "a budget, unlike ranks, modules in modules": modules_in_sharded_modules,
    "a region, unlike ranks": partial(unlike_ranks_in_regions, way="two in one"),
    "a scope, unlike ranks": partial(unlike_ranks_in_regions, way="scope"),
    "a manager around training": a_manager_around_training,
    "gathers once and releases": gathers_once_and_releases,
    "releases after an error": releases_after_an_error,
    "a parameter that others freed": a_parameter_that_others_freed,
    "evaluation": evaluation,
    "state dicts": state_dicts,
    "removed": removed,
    "FSDP1, apply": partial(trains_alike_with_fsdp1, way="apply"),
    "FSDP1, block by block": partial(trains_alike_with_fsdp1, way="block by block"),
    "FSDP1, several blocks in one region": several_blocks_with_fsdp1,
}


# One test for all cases: whoever takes part runs them all, also if tests are spread over workers.
@pytest.mark.parametrize("world", [2, 4])
def test_sharded_data_parallel(world) -> None:
    results = results_of(__name__, world)
    assert list(results) == list(CASES)
    assert {name: problem for name, problem in results.items() if problem} == {}


if __name__ == "__main__":
    main(CASES)
