"""Random programs on tensors, as source text: ops, views, writes, draws, aliases, nested regions.

A program is a function of `run`, a leaf `w` that requires grad and a constant `c`. Its statements
work on a list `v` of matrices with float entries, or views and parts of such. Regions are functions
of the list that are called through `run`.

There is no `.data` in them: autograd does not count what is written through it, and its own
gradients are wrong then.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import remat

__all__ = ["compare", "compiled", "draw", "result_of"]

Run = Callable[..., Any]

MAKING = [
    "{a}.sin()",
    "{a}.exp().clamp(max=3)",
    "{a}.tanh() * 2",
    "{a} * {b}.mean()",
    "{a} + fit({b}, {a})",
    "{a} * fit({b}, {a})",
    "{a}.abs()",
    "({a} @ fit({b}, {a}).transpose(0, 1)) @ {a} / 8",
    "torch.where({a} > 0, {a}, fit({b}, {a}))",
    "torch.cat([{a}, fit({b}, {a})])[: len({a})]",
    "torch.full_like({a}, 0.5) * {b}.sum()",
    "{a}.index_select(0, torch.arange(len({a}), device={a}.device).flip(0))",
    "{a}.cumsum(0).sigmoid()",
    "{a}.clone()",
    "{a}.sort(0).values",
    "{a}.softmax(-1)",
    "F.gelu({a})",
    "F.layer_norm({a}, {a}.shape[-1:])",
    "F.scaled_dot_product_attention({a}[None], fit({b}, {a})[None], {a}[None] + 1)[0]",
    "{a} * ({a}.detach().sum().item() > 0)",  # a decision that the host takes
]
VIEWS = [
    "{a}[1:3]",
    "{a}[:, 1:]",
    "{a}.t().t()",
    "{a}.view_as({a})",
    "{a}.detach()",
    "{a}[::2]",
    "{a}.unsqueeze(0)[0]",
    "{a}.narrow(0, 0, 1)",
]
WRITES = [
    "{a}.mul_(1.5)",
    "{a}.add_(fit({b}, {a}))",
    "{a}.sin_()",
    "{a}.zero_()",
    "{a}[0] = {b}[0, 0] * 2",
    "{a}[1:].copy_(fit({b}, {a})[1:])",
    "{a}.clamp_(-1, 1)",
    "{a}.masked_fill_({b}.sum() > 0, 0.25)",
    "{a}.copy_(fit({b}, {a}))",
    "{a}.index_add_(0, torch.tensor([0], device={a}.device), fit({b}, {a})[:1])",
    "{a} += 0.5",
    "torch._foreach_add_([{a}, {b}], 1.0)",
    "{a}.unsqueeze_(0).squeeze_(0)",
    "{a}.detach().mul_(0.9)",
]
RANDOM = [
    "F.dropout({a}, 0.3)",
    "F.dropout({a}, 0.5, training=False)",
    "{a} * torch.rand({a}.shape, device={a}.device)",
    "{a} * torch.empty({a}.shape, device={a}.device).bernoulli_(0.5)",
]
RANDOM_WRITES = ["{a}.uniform_()", "{a}.normal_()", "{a}.bernoulli_(0.5)"]
MARKS = ["remat.mark_checkpoint({a})", "drop({a})"]


def draw(seed: int, *, length: int = 9) -> str:
    """Return the source of a program."""
    rng = random.Random(seed)
    lines = ["def program(run, w, c):", "    v = [w * 1, c, w * 2]"]
    lines += _block(rng, length, indent="    ", depth=0)
    lines += ["    return [t for t in v if t.requires_grad], w"]
    return "\n".join(lines)


def _block(rng: random.Random, length: int, *, indent: str, depth: int) -> list[str]:
    lines: list[str] = []
    for _ in range(length):
        chance = rng.random()
        if chance < 0.18 and depth < 3:
            lines.append(f"{indent}def region{depth}(v):")
            inner = _block(rng, rng.randint(2, 6), indent=indent + "    ", depth=depth + 1)
            lines += [*inner, f"{indent}    return v"]
            lines.append(f"{indent}v = run(region{depth}, v)")
        elif chance < 0.24:
            lines.append(f"{indent}with torch.no_grad():")
            lines += [indent + "    " + _statement(rng) for _ in range(rng.randint(1, 2))]
        elif chance < 0.28:
            lines.append(f"{indent}v.pop(0) if len(v) > 3 else None")
        else:
            lines.append(indent + _statement(rng))
    return lines


def _statement(rng: random.Random) -> str:
    a, b = (f"v[{rng.randrange(-3, 3)}]" for _ in range(2))
    kinds = [MAKING, VIEWS, WRITES, RANDOM, RANDOM_WRITES, MARKS]
    (kind,) = rng.choices(kinds, [9, 4, 6, 1.5, 1, 1])
    text = rng.choice(kind).format(a=a, b=b)
    return text if kind in (WRITES, RANDOM_WRITES, MARKS) else f"v.append({text})"


def compiled(source: str) -> Run:
    names = {"torch": torch, "F": F, "remat": remat, "fit": _fit, "drop": _drop}
    scope: dict[str, Any] = dict(names)
    exec(compile(source, "<random program>", "exec"), scope)
    program: Run = scope["program"]
    return program


def _fit(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor, or a number made of it if it has not the shape of the other."""
    return tensor if tensor.shape == other.shape else tensor.mean().expand(other.shape)


def _drop(tensor: Tensor) -> Tensor:
    """Drop a tensor where that means anything."""
    try:
        dropped: Tensor = remat.checkpoint(tensor)
    except remat.UnsupportedError:
        return tensor
    return dropped


# -- with and without remat ------------------------------------------------------------------------


def _plain(function: Run, tensors: list[Tensor]) -> Any:
    return function(tensors)


def _scope(function: Run, tensors: list[Tensor]) -> Any:
    with remat.CheckpointScope("check"):
        return function(tensors)


def _with_policy(function: Run, tensors: list[Tensor]) -> Any:
    return remat.checkpoint(function, tensors, policy=remat.policies.save_matmuls)


def _keeps_random(function: Run, tensors: list[Tensor]) -> Any:
    return remat.checkpoint(function, tensors, preserve_rng_state=False)


APIS: tuple[Run, ...] = (remat.checkpoint, _scope, _with_policy, _keeps_random)


def result_of(seed: int, device: torch.device, run: Run) -> list[Tensor]:
    """Run a program; return its results, its gradient and a random number drawn after it."""
    torch.manual_seed(seed)
    w = torch.linspace(-1, 1, 48).view(6, 8).to(device).requires_grad_()
    results, _ = compiled(draw(seed))(run, w, torch.full((6, 8), 0.3, device=device))
    total = sum(((tensor * tensor).mean() for tensor in results), w.sum() * 0)
    total.backward()
    assert w.grad is not None
    return [*(tensor.detach() for tensor in results), w.grad, torch.rand(2, device=device)]


def compare(seed: int, device: torch.device) -> str | None:
    """Return what differs with checkpointing, "" if nothing does; None if the program is invalid.

    Invalid is what plain autograd or a region refuses because of a write to what it needs, and what
    does not repeat itself on this device.
    """
    try:
        expected = result_of(seed, device, _plain)
        again = result_of(seed, device, _plain)
    except (RuntimeError, IndexError):
        return None
    if not _equal(expected, again):
        return None
    api = APIS[seed % len(APIS)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.RematWarning)
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
