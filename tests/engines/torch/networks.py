"""Small networks of the kinds that people train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "Block", "ResNet", "UNet"]


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(batch, length, width))
        x = x + (F.dropout(y, self.dropout, self.training) if self.dropout else y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, 50), tokens.view(-1))

    @staticmethod
    def inputs(batch: int = 2, length: int = 8) -> tuple[Tensor]:
        return (torch.arange(batch * length).view(batch, length) % 50,)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)), inplace=True)


class ResNet(nn.Module):
    def __init__(self, blocks: int = 3, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*[Residual(channels) for _ in range(blocks)])

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks(self.stem(images)).square().mean()

    @staticmethod
    def inputs(batch: int = 2, size: int = 8) -> tuple[Tensor]:
        return (torch.linspace(-1, 1, batch * 3 * size * size).view(batch, 3, size, size),)


class UNet(nn.Module):
    """Long skips, concatenations, pooling."""

    def __init__(self, channels: int = 4, depth: int = 3) -> None:
        super().__init__()
        sizes = [channels * 2**n for n in range(depth)]
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(c, 2 * c, 3, padding=1) for c in sizes)
        self.up = nn.ModuleList(nn.Conv2d(3 * c, c, 3, padding=1) for c in reversed(sizes))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        skips = []
        for conv in self.down:
            skips.append(x)
            x = F.max_pool2d(F.silu(conv(x)), 2)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = F.silu(conv(torch.cat([x, skips.pop()], 1)))
        return x.square().mean()

    inputs = staticmethod(ResNet.inputs)
