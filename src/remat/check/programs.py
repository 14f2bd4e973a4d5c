"""Random programs: ops, views, in-place writes, random numbers and nested regions.

A program is its seed: what it does next is drawn from a generator of Python as it runs. It runs the
same with and without checkpointing, because remat runs Python code once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import remat

__all__ = ["compare", "result_of"]

Run = Callable[..., Any]
_ROWS, _COLUMNS = 6, 8
_LENGTH = 8


def _same_shape(a: Tensor, b: Tensor) -> Tensor:
    return b if b.shape == a.shape else b.mean().expand(a.shape)


def _attention(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.unsqueeze(0), _same_shape(a, b).unsqueeze(0)
    return F.scaled_dot_product_attention(a, b, a + b).squeeze(0)


MAKING: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a.sin(),
    lambda a, b: a.exp().clamp(max=3),
    lambda a, b: a * _same_shape(a, b),
    lambda a, b: a + _same_shape(a, b),
    lambda a, b: (a @ _same_shape(a, b).transpose(0, 1)) @ a / 8,
    lambda a, b: a.softmax(-1),
    lambda a, b: F.layer_norm(a, a.shape[-1:]),
    lambda a, b: F.gelu(a),
    lambda a, b: torch.where(a > 0, a, _same_shape(a, b)),
    lambda a, b: a.cumsum(0).sigmoid(),
    lambda a, b: torch.cat([a, _same_shape(a, b)])[: len(a)],
    lambda a, b: a.index_select(0, torch.arange(len(a), device=a.device).flip(0)),
    _attention,
    lambda a, b: a * (a.detach().sum().item() > 0),  # a decision that the host takes
)
VIEWS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a[1:] if len(a) > 2 else a,
    lambda a, b: a.transpose(0, 1).transpose(0, 1),
    lambda a, b: a.view_as(a),
    lambda a, b: a.unsqueeze(0)[0],
    lambda a, b: a.detach(),
)
WRITING: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a.mul_(1.5),
    lambda a, b: a.add_(_same_shape(a, b)),
    lambda a, b: a.clamp_(-1, 1),
    lambda a, b: a[:1].zero_(),
    lambda a, b: a.copy_(_same_shape(a, b).clone()),
)
DRAWING: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: F.dropout(a, 0.3),
    lambda a, b: a * torch.rand(a.shape, device=a.device),
    lambda a, b: a + torch.empty_like(a).normal_(),
    lambda a, b: F.dropout(a, 0.5, training=False),
)
KINDS, WEIGHTS = (MAKING, VIEWS, WRITING, DRAWING), (9, 3, 3, 2)


def _plain(function: Callable[..., Any], tensors: list[Tensor]) -> Any:
    return function(tensors)


def _scope(function: Callable[..., Any], tensors: list[Tensor]) -> Any:
    with remat.CheckpointScope("check"):
        return function(tensors)


def _with_policy(function: Callable[..., Any], tensors: list[Tensor]) -> Any:
    return remat.checkpoint(function, tensors, policy=remat.policies.save_matmuls)


def _keeps_random(function: Callable[..., Any], tensors: list[Tensor]) -> Any:
    return remat.checkpoint(function, tensors, preserve_rng_state=False)


APIS: tuple[Run, ...] = (remat.checkpoint, _scope, _with_policy, _keeps_random)


def result_of(seed: int, device: torch.device, run: Run) -> list[Tensor]:
    """Run a program; return its results, its gradient and a random number drawn after it."""
    torch.manual_seed(seed)
    leaf = torch.linspace(-1, 1, _ROWS * _COLUMNS).view(_ROWS, _COLUMNS).to(device)
    leaf.requires_grad_()
    rng = random.Random(seed)
    tensors = _statements(rng, [leaf * 1, leaf.sin()], run, depth=0)
    results = [tensor for tensor in tensors if tensor.requires_grad]
    total = sum(((tensor * tensor).mean() for tensor in results), leaf.sum() * 0)
    total.backward()
    assert leaf.grad is not None
    return [*(tensor.detach() for tensor in results), leaf.grad, torch.rand(2, device=device)]


def _statements(rng: random.Random, tensors: list[Tensor], run: Run, depth: int) -> list[Tensor]:
    tensors = list(tensors)
    for _ in range(_LENGTH if depth == 0 else rng.randint(2, 5)):
        if depth < 3 and rng.random() < (0.5 if depth == 0 else 0.2):
            inner = random.Random(rng.random())
            tensors = run(lambda v, r=inner: _statements(r, v, run, depth + 1), tensors)
        else:
            _statement(rng, tensors)
    return tensors


def _statement(rng: random.Random, tensors: list[Tensor]) -> None:
    (kind,) = rng.choices(KINDS, WEIGHTS)
    a, b = (tensors[rng.randrange(len(tensors))] for _ in range(2))
    if kind is WRITING and rng.random() < 0.8:
        a = a * 0.9  # memory that autograd has not saved: most writes are valid then
        tensors.append(a)
    made = rng.choice(kind)(a, b)
    if kind is not WRITING:
        tensors.append(made)


def compare(seed: int, device: torch.device) -> str | None:
    """Return what differs with checkpointing, "" if nothing does; None if the program is invalid.

    Invalid is what plain autograd or a region refuses because of a write to what it needs, and what
    does not repeat itself on this device.
    """
    try:
        expected = result_of(seed, device, _plain)
        again = result_of(seed, device, _plain)
    except RuntimeError:
        return None
    if not _equal(expected, again):
        return None
    api = APIS[seed % len(APIS)]
    try:
        found = result_of(seed, device, api)
    except remat.ModifiedInputError:
        return None
    except RuntimeError as error:
        return f"program {seed}: {type(error).__name__}: {error}"
    if _equal(found, expected):
        return ""
    return f"program {seed}: results or gradients differ"


def _equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(found, expected, strict=True)
    )
