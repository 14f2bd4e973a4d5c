"""A small program of a user, for type checkers: what remat wraps keeps its signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_type

import torch
from torch import Tensor

import remat


@remat.checkpoint
def layer(x: Tensor, scale: float = 1.0) -> Tensor:
    return x.exp() * scale


@remat.checkpoint(preserve_rng_state=False)
def noisy(x: Tensor) -> tuple[Tensor, int]:
    return x.exp(), 3


def mean(inputs: object) -> float:
    return 1.0


x = torch.ones(3)
assert_type(layer(x), Tensor)
assert_type(layer(x, scale=2.0), Tensor)
assert_type(noisy(x), tuple[Tensor, int])
assert_type(remat.checkpoint(noisy, x), tuple[Tensor, int])
assert_type(remat.checkpoint(layer, x, scale=2.0, use_reentrant=False), Tensor)
assert_type(remat.checkpoint_segment(mean, [x]), float)
named: Callable[[Tensor, float], Tensor] = layer
policy: remat.policies.Policy = remat.policies.either(
    remat.policies.save_matmuls, lambda op, shapes, nbytes, name: nbytes < 10
)

with remat.CheckpointScope("scope", policy=policy) as scope:
    y = layer(x)
assert_type(scope, remat.CheckpointScope)

layer("text")  # type: ignore[arg-type]
noisy(x, 3)  # type: ignore[call-arg]
remat.checkpoint_segment(3, [x])  # type: ignore[arg-type]
