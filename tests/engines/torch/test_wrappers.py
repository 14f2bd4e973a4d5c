"""torch's own wrappers of modules, with remat's function in place of torch's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import remat


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0):
        return x + nn.functional.dropout(self.linear(x).tanh() * scale, 0.3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def wrapper(module):
    return checkpoint_wrapper(
        module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, checkpoint_fn=remat.checkpoint
    )


def by_hand(model):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = wrapper(block)


def by_torch(model):
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=wrapper,
        check_fn=lambda module: isinstance(module, Block),
    )


def with_a_policy(model):
    wrap = partial(
        checkpoint_wrapper,
        checkpoint_fn=remat.checkpoint,
        policy=remat.policies.save_matmuls,
        preserve_rng_state=True,
    )
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, Block)
    )


def gradients(model):
    torch.manual_seed(1)
    out = model(torch.linspace(-1, 1, 8).view(2, 4))
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("wrap", [by_hand, by_torch, with_a_policy])
def test_a_wrapper_of_torch_calls_remat(wrap) -> None:
    plain, model = Model(), Model()
    keys = list(plain.state_dict())
    wrap(model)
    with remat.CheckpointProfiler() as profiler:
        found = gradients(model)
    assert profiler.checkpoint_count() == profiler.recompute_count() == 3
    assert all(map(torch.equal, found, gradients(plain)))
    assert list(model.state_dict()) == keys
