"""A network of blocks, and the ways in which it is checkpointed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import remat

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2)


class Network(nn.Module):
    """`way` says how the blocks are run."""

    def __init__(self, way: str = "plain", blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(WIDTH, 1)
        self.way = way
        if way == "apply":
            remat.apply(self)

    def forward(self, x):
        x = WAYS[self.way](self, self.embed(x))
        return self.head(x)


def all_in(network, x):
    for block in network.blocks:
        x = block(x)
    return x


def block_by_block(network, x):
    for block in network.blocks:
        x = remat.checkpoint(block, x)
    return x


def two_in_one(network, x):
    blocks = network.blocks
    for n in range(0, len(blocks), 2):
        x = remat.checkpoint(lambda x, n=n: blocks[n + 1](blocks[n](x)), x)
    return x


def in_a_scope(network, x):
    with remat.CheckpointScope("blocks"):
        return all_in(network, x)


def nested(network, x):
    with remat.CheckpointScope("blocks"):
        return two_in_one(network, x)


WAYS = {
    "plain": all_in,
    "apply": all_in,
    "block by block": block_by_block,
    "two in one": two_in_one,
    "scope": in_a_scope,
    "nested": nested,
}
CHECKPOINTED = [way for way in WAYS if way != "plain"]
