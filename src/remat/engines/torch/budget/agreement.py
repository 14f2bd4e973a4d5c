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

from ..backend import process_group_store

__all__ = ["agreed_bytes", "agreed_seconds", "is_shared"]

_MANY = 1000  # programs that are agreed upon: with ever new shapes the store would grow for ever


def is_shared() -> bool:
    """Return whether this process trains together with others."""
    return process_group_store() is not None


def agreed_seconds(keys: Sequence[Any], seconds: list[float], *, passes: int) -> list[float]:
    """Return the seconds of the ops of a program that all ranks plan with."""
    return _agreed(keys, str(passes), seconds)


def agreed_bytes(keys: Sequence[Any], nbytes: int, *, passes: int) -> int:
    """Return the bytes that all ranks reserve for a program after so many passes."""
    return int(_agreed(keys, f"{passes}/reserved", [nbytes])[0])


def _agreed(keys: Sequence[Any], about: str, numbers: list[float]) -> list[float]:
    store = process_group_store()
    if store is None:
        return numbers
    program = repr([(str(func), [list(s) for s in shapes], made) for func, shapes, made in keys])
    name = f"remat/{hashlib.sha256(program.encode()).hexdigest()}/{about}"
    if store.add(f"{name}/claimed", 1) == 1:
        is_to_share = store.add("remat/programs", 1) <= _MANY
        store.set(name, json.dumps(numbers if is_to_share else None))
        return numbers
    agreed: list[float] | None = json.loads(store.get(name))
    return numbers if agreed is None else agreed
