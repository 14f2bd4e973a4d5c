"""Small random programs of NumPy statements, many of them in place, as source text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

import remat

NAMES = ("x", "a", "b", "c", "d", "e")
_HEAD = """def program(x):
    a = np.sin(x) * 1.0
    b = np.cos(x).reshape(2, 3) * 1.0
    c = d = e = 0.1
"""

# {v} and {w} are arrays, {n} is any name, {i} an index that fits {v}.
OUT_OF_PLACE = (
    "{n} = np.sin({v})",
    "{n} = np.tanh({v}) * 1.5",
    "{n} = {v} * 0.7 + {w}",
    "{n} = {v} * {w}",
    "{n} = np.exp(-({v} ** 2))",
    "{n} = {v}.copy()",
    "{n} = np.concatenate([{v}, {w}])",
    "{n} = np.stack([{v}, {v} * 0.5])",
    "{n} = np.where({v} > 0.1, {v}, 0.5 * {v})",
    "{n} = {v} - np.mean({v}, axis=0)",
    "{n} = np.cumsum({v}, axis=0)",
    "{n} = {v}[[0, 1, 0]]",
)
IN_PLACE = (
    "{v} += 0.3",
    "{v} *= 0.8",
    "{v} += 0.3 * {w}",
    "{v} -= {w}",
    "{v} /= 2.0 + {w} ** 2",
    "{v} **= 2",
    "{v}[{i}] = 0.25",
    "{v}[{i}] = np.sin({v}[{i}])",
    "{v}[{i}] += 0.5",
    "{v}[{i}] *= {w}",
    "{v}[{i}] = {w}",
    "{v}[{i}] = {v}[{j}]",
    "{v}[[0, 1]] += 0.1",
    "{v}[[0, 0]] = {v}[[1, 0]] * 0.9",
    "{v}[{v} > 0.2] *= 0.5",
    "np.add({v}, {w}, out={v})",
    "np.sin({v}, out={v})",
    "{v}[1:].fill(0.1)",
    "{v}[0][...] = {v}[-1] * 0.3",
    "for row in {v}: row *= 0.9",
    "{v}.T[0] = 0.3 * {v}.T[-1]",
    "np.ravel({v})[1:] *= 0.9",
    "{v}.reshape(-1)[::2] += 0.2",
    "np.swapaxes({v}, 0, -1)[{i}] -= 0.1 * {w}",
    "np.split({v}, 2)[1][...] *= 1.1",
    "np.squeeze({v})[{i}] = {w}",
    "np.multiply({v}[{i}], {w}, out={v}[{i}])",
)
VIEWS = (
    "{n} = {v}",
    "{n} = {v}[{i}]",
    "{n} = {v}[1:][:2]",
    "{n} = {v}[::-1]",
    "{n} = {v}.T",
    "{n} = {v}.reshape(-1)",
    "{n} = np.ravel({v})",
    "{n} = {v}[None]",
    "{n} = {v}[..., 0]",
    "{n} = {v}[{i}][{j}]",
    "{n} = {v}.swapaxes(0, -1)",
    "{n} = np.squeeze({v})",
    "{n} = np.expand_dims({v}, 1)",
    "{n} = np.split({v}, 2)[0]",
    "{n} = np.array_split({v}, 3)[1]",
    "{n} = {v}.reshape(3, -1)",
    "{n} = np.diagonal({v})",
    "{n} = np.flip({v})",
    "{n} = np.atleast_2d({v})",
    "{n} = np.broadcast_to({v}, (2, *np.shape({v})))",
    "{n} = np.real({v})",
)
SCALARS = (
    "{n} = {v}[0]",
    "{n} = np.sum({v})",
    "{n} = {v}.mean()",
    "{v} += np.sum({w})",
    "{v} *= 0.5",
)
COMPLEX = (
    "{n} = {v} * (0.4 + 1j)",
    "{n} = np.real(({v} + 0.3j) ** 2)",
    "{n} = ({v} * 1j + 1.5) ** 0.5",
    "{n} = 1 / ({v} + 2j) ** 2",
    "{n} = np.abs({v} + 1j * {w}) ** 2",
    "{n} = np.fft.fft({v})",
    "{n} = np.imag({v} * (1 - 1j))",
    "{n} = np.cumprod({v} + 0.5j, axis=0)",
    "{n} = np.vecdot({v}, {w} * 1j)",
    "{n} = np.prod({v}.T)",
    "{v}.real = {w}",
    "{v} **= 2",
)
SINGLE = (
    "{n} = {v}.astype(np.float32)",
    "{n} = np.float32(0.7) * {v}",
    "{n} = np.average({v}, axis=0, weights={v} * 0 + np.float32(0.3))",
    "{n} = np.nanmean({v}, axis=0)",
    "{n} = np.median({v}, axis=0)",
)
_INDICES = ("1:", ":2", "0", "-1", "::2", "1:3", "...", "0:1", ":")


def draw(seed: int, statements: tuple[str, ...]) -> str:
    """Return the source of `program(x)`; every statement of it runs on plain arrays."""
    rng = random.Random(seed)
    lines: list[str] = []
    wanted = rng.randint(5, 25)
    for _ in range(8 * wanted):
        if len(lines) == wanted:
            break
        names = NAMES[: 3 + min(3, len(lines))]
        line = rng.choice(statements).format(
            v=rng.choice(names),
            w=rng.choice(names),
            n=rng.choice(names[1:]),
            i=rng.choice(_INDICES),
            j=rng.choice(_INDICES),
        )
        if _runs([*lines, line]):
            lines.append(line)
    return _source(lines)


def compiled(source: str) -> Callable[[Any], Any]:
    scope: dict[str, Any] = {"np": np, "remat": remat}
    exec(source, scope)
    return scope["program"]


def with_scopes(seed: int, source: str) -> str:
    """Return a program with scopes, some nested, around some of its statements, and with marks."""
    rng = random.Random(seed)
    head, *body = source.splitlines()
    opened: list[str] = []  # the options of the scopes that are open
    lines = [head]
    for line in body[:-1]:
        while opened and rng.random() < 0.3:
            opened.pop()
        if len(opened) < 3 and rng.random() < 0.3:
            options = rng.choice(_SCOPE_OPTIONS)
            lines.append("    " * (len(opened) + 1) + f"with remat.CheckpointScope('s'{options}):")
            opened.append(options)
        lines.append("    " * len(opened) + line)
        name = line.strip().partition(" = ")[0]
        if name in NAMES and rng.random() < 0.2:
            in_scope = any("enabled" not in options for options in opened)
            marked = rng.choice(_MARKS if in_scope else _MARKS[:1]).format(n=name)
            lines.append("    " * (len(opened) + 1) + f"if hasattr({name}, '_node'): {marked}")
    return "\n".join([*lines, body[-1], ""])


_SCOPE_OPTIONS = (
    *("", "", "", ", use_recomputation=False", ", enabled=False"),
    ", policy=remat.policies.save_ops('numpy.sin', 'numpy.multiply')",
    ", policy=remat.policies.save_below(40)",
)
_MARKS = (  # the first outside of scopes, too
    "{n} = remat.mark_checkpoint({n})",
    "{n} = remat.checkpoint({n})",
    "{n} = remat.adaptive_checkpoint({n}, threshold=20)",
)


def _source(lines: list[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    parts = " + ".join(
        f"np.sum(np.real(np.sin({name})) * {0.3 + 0.2 * i:.1f})" for i, name in enumerate(NAMES)
    )
    return f"{_HEAD}{body}    return {parts}\n"


def _runs(lines: list[str]) -> bool:
    try:
        with np.errstate(all="raise"):
            value = compiled(_source(lines))(np.linspace(-0.7, 0.9, 6))
    except Exception:
        return False
    return bool(np.isfinite(value))
