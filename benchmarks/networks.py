"""The networks that budgets are measured on; each returns its loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from tests.engines.torch.networks import Block
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["NETWORKS", "build"]


class GPT(nn.Module):
    """24 blocks of width 256, 8 x 256 tokens."""

    def __init__(self, blocks: int = 24, width: int = 256, words: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(blocks))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    def inputs(self) -> tuple[Tensor]:
        return (torch.randint(0, self.head.out_features, (8, 256)),)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaBlock(nn.Module):
    """Rotary embeddings, grouped queries, a gated MLP, norms in plain ops."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        hidden = 8 * width // 3 // 32 * 32
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            part(h).view(batch, length, -1, self.size).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = self.heads // self.groups
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Llama(nn.Module):
    """12 blocks of width 256 as in Llama, 8 x 256 tokens."""

    def __init__(self, blocks: int = 12, width: int = 256, words: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, 8, 2) for _ in range(blocks))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, words, bias=False)
        angles = torch.outer(torch.arange(256.0), 1e4 ** (-torch.arange(0, 32, 2) / 32))
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())

    def inputs(self) -> tuple[Tensor]:
        return (torch.randint(0, self.head.out_features, (8, 256)),)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(x + y)


class ResNet(nn.Module):
    """31 convolutions of 32 channels with BatchNorm, 16 images of 64 x 64."""

    def __init__(self, blocks: int = 15, channels: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.arange(len(images)) % 10)

    def inputs(self) -> tuple[Tensor]:
        return (torch.randn(16, 3, 64, 64),)


class Twice(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Four levels with long skips, 4 images of 128 x 128."""

    def __init__(self, channels: int = 16, levels: int = 4) -> None:
        super().__init__()
        sizes = [channels * 2**n for n in range(levels + 1)]
        pairs = list(itertools.pairwise(sizes))
        self.stem = Twice(3, channels)
        self.down = nn.ModuleList(Twice(a, b) for a, b in pairs)
        self.up = nn.ModuleList(Twice(a + b, a) for a, b in reversed(pairs))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        skips = []
        for part in self.down:
            skips.append(x)
            x = part(F.max_pool2d(x, 2))
        for part in self.up:
            x = part(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return x.square().mean()

    def inputs(self) -> tuple[Tensor]:
        return (torch.randn(4, 3, 128, 128),)


class Chain(nn.Module):
    """200 unlike layers on 2048 rows: widths from 64 to 512, some norms and activations."""

    def __init__(self, layers: int = 200) -> None:
        super().__init__()
        widths = [64 * 2 ** round(1.5 + 1.5 * math.sin(0.7 * n)) for n in range(layers + 1)]
        kinds = [nn.Identity, nn.GELU, nn.Tanh, nn.SiLU]
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(a, b),
                nn.LayerNorm(b) if n % 3 == 0 else nn.Identity(),
                kinds[n % len(kinds)](),
            )
            for n, (a, b) in enumerate(itertools.pairwise(widths))
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def inputs(self) -> tuple[Tensor]:
        return (torch.randn(2048, self.layers[0][0].in_features),)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "resnet": ResNet,
    "unet": UNet,
    "llama": Llama,
    "chain": Chain,
}


def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a network with fixed weights, and its inputs."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    return model, model.inputs()
