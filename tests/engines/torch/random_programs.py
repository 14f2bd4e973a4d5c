"""Random programs on tensors, as source text: ops, views, writes, draws, aliases, nested regions.

A program is a function of an api `run`, a leaf `w` that requires grad and a constant `c`. Its
statements work on a list `v` of tensors that all have float entries and the shape (4, 3), or are
views and parts of such. Regions are functions on the list that are called through `run`.

There is no `.data` in them: autograd does not count what is written through it, and its own
gradients are wrong then.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

MAKING = [
    "{a}.sin()",
    "{a}.exp().clamp(max=3)",
    "{a}.tanh() * 2",
    "{a} * {b}.mean()",
    "{a} + fit({b}, {a})",
    "{a} * fit({b}, {a})",
    "{a}.abs()",
    "torch.where({a} > 0, {a}, fit({b}, {a}))",
    "{a}.cumsum(0).sigmoid()",
    "torch.full_like({a}, 0.5) * {b}.sum()",
    "{a}.clone()",
    "{a}.sort(0).values",
    "{a}.softmax(-1)",
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
    "{a}.index_add_(0, torch.tensor([0]), fit({b}, {a})[:1])",
    "{a} += 0.5",
    "torch._foreach_add_([{a}, {b}], 1.0)",
    "{a}.unsqueeze_(0).squeeze_(0)",
    "{a}.detach().mul_(0.9)",
]
RANDOM = [
    "F.dropout({a}, 0.3)",
    "{a} * torch.rand({a}.shape)",
    "{a} * torch.empty({a}.shape).bernoulli_(0.5)",
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
    kind = rng.choices([MAKING, VIEWS, WRITES, RANDOM, RANDOM_WRITES, MARKS], [9, 4, 6, 1.5, 1, 1])[
        0
    ]
    text = rng.choice(kind).format(a=a, b=b)
    return text if kind in (WRITES, RANDOM_WRITES, MARKS) else f"v.append({text})"


def fit(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a number made of it if it has not the shape of the other."""
    return tensor if tensor.shape == other.shape else tensor.mean().expand(other.shape)


def compiled(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "fit": fit, **names}
    exec(compile(source, "<random program>", "exec"), scope)
    program: Callable[..., Any] = scope["program"]
    return program
