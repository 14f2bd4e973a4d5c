"""How parts of a random program are wrapped: checkpoints of every kind, and torch's contexts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

__all__ = ["Wrapping", "draw"]


@dataclass(frozen=True)
class Wrapping:
    """The header of a block, or the way in which its function is called."""

    kind: Literal["with", "leave", "call"]
    text: str
    is_region: bool = True


_CALLS = (
    "remat.checkpoint({fn}, {args})",
    "remat.checkpoint({fn}, {args})",
    "remat.checkpoint({fn}, **{args})",
    "remat.checkpoint({fn}, {args}, preserve_rng_state=False)",
    "remat.checkpoint({fn}, {args}, use_reentrant=False)",
    "remat.checkpoint({fn})({args})",
    "{fn}({args})",  # the function is decorated
    "remat.checkpoint_segment({fn}, [{args}])",
    "remat.checkpoint_segment({fn}, [{args}], preserve_rng_state=False)",
    "remat.adaptive_checkpoint({fn}, {args}, threshold=THRESHOLD)",
    "remat.adaptive_checkpoint({fn}, {args}, threshold=THRESHOLD, preserve_rng_state=False)",
    "GROUP.checkpoint_fn({fn}, {args})",
    "GROUP.checkpoint_fn({fn})({args})",
)
_SCOPES = (
    'with remat.CheckpointScope("part"):',
    'with remat.CheckpointScope("part"):',
    'with remat.CheckpointScope("part", use_recomputation=False):',
    'with remat.CheckpointScope("part", enabled=False):',
    "with SCOPE:",
)
_CONTEXTS = (
    "with torch.no_grad():",
    "with torch.enable_grad():",
    'with torch.autocast("cpu", dtype=torch.bfloat16):',
    'with torch.autocast("cpu", enabled=False):',
    "with kept_twice():",
    "with torch.random.fork_rng():",
    "with torch.autograd.detect_anomaly(check_nan=False):",
    "for _ in range(2):",
    "for _ in range(3):",
)
_THRESHOLDS = ("0", "64", "500", '"1KB"', "4000", '"20KB"', '"1MiB"')


def draw(rng: random.Random, *, scope: str, group: str) -> Wrapping:
    """Return a random way of wrapping; `scope` and `group` are objects that it may use."""
    chance = rng.random()
    if chance < 0.15:
        return Wrapping("with", rng.choice(_CONTEXTS), is_region=False)
    if chance < 0.2:
        return Wrapping("leave", rng.choice(_SCOPES[:2]))
    if chance < 0.55:
        text = rng.choice(_SCOPES).replace("SCOPE", scope)
        return Wrapping("with", text, is_region="enabled=False" not in text)
    text = rng.choice(_CALLS).replace("GROUP", group)
    return Wrapping("call", text.replace("THRESHOLD", rng.choice(_THRESHOLDS)))
