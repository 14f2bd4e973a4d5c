"""Ranks that train together follow the same plan.

A plan depends on the program, the budget, the seconds that ops take, and on how far measured peaks
lie above predicted ones. Only these numbers differ from rank to rank, so ranks that run the same
program take those of the rank that asks first. They come through the key-value store of the process
group and not by a collective: ranks with other shapes may plan at another time, and nobody waits
for them. They plan for themselves, which is safe: no collective lies inside of what a plan has
recomputed (`sections`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from ..backend import process_group_store

__all__ = ["agreed_bytes", "agreed_seconds", "is_shared"]

_MANY = 1000  # programs that are agreed upon: with ever new shapes the store would grow for ever


def is_shared() -> bool:
    """Return whether this process trains together with others."""
    return process_group_store() is not None


def agreed_seconds(keys: Sequence[Any], seconds: list[float], *, about: str) -> list[float]:
    """Return the seconds of the ops of a program that all ranks plan with.

    `about` names the budget, and after how many passes it is planned.
    """
    return _agreed(keys, f"{about}/seconds", seconds)


def agreed_bytes(keys: Sequence[Any], nbytes: int, *, about: str) -> int:
    """Return the bytes that all ranks reserve for a program and budget."""
    return int(_agreed(keys, f"{about}/reserved", [nbytes])[0])


def _agreed(keys: Sequence[Any], about: str, numbers: list[float]) -> list[float]:
    store = process_group_store()
    if store is None:
        return numbers
    program = repr([(str(func), [list(s) for s in shapes], made) for func, shapes, made in keys])
    name = f"remat/{hashlib.sha256(program.encode()).hexdigest()}/{about}"
    try:
        agreed = _ask(store, name, numbers)
    except torch.distributed.DistError:
        return numbers  # the rank that has the store has left: nobody is there to agree with
    return numbers if agreed is None else agreed


def _ask(store: Any, name: str, numbers: list[float]) -> list[float] | None:
    """Return the numbers of whoever asks first; None if there are too many programs."""
    if store.add(f"{name}/claimed", 1) == 1:
        is_to_share = store.add("remat/programs", 1) <= _MANY
        store.set(name, json.dumps(numbers if is_to_share else None))
        return numbers
    agreed: list[float] | None = json.loads(store.get(name))
    return agreed
