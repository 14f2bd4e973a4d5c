"""Parameters that FSDP has resharded: gathered for a replay by FSDP itself, and released again.

`fully_shard` frees the memory of a module's parameters when its forward is done, and gathers them
before its backward. A region with several sharded modules is recomputed when the backward of the
last one begins: the parameters of the others are gathered when the first op of the replay needs
them and released after the last one. All ranks replay the same ops in the same order, so their
collectives match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...core.records import Op, Value
from .backend import is_fsdp_loaded, sharded_modules
from .memory.tensors import is_plain

__all__ = ["ShardedParameters", "sharded_parameters"]


class ShardedParameters:
    """Gathers the parameters of sharded modules while some ops are run again."""

    def __init__(self, first: dict[int, list[Any]], last: dict[int, list[Any]]) -> None:
        self._first = first  # modules that an op is the first to need, by its number
        self._last = last
        self._gathered: list[Any] = []

    def before(self, number: int) -> None:
        for module in self._first.get(number, ()):
            self._gathered.append(module)
            module.unshard()

    def after(self, number: int) -> None:
        for module in self._last.get(number, ()):
            self._gathered.remove(module)
            module.reshard()

    def release(self) -> None:
        """Release what an error has left gathered."""
        while self._gathered:
            self._gathered.pop().reshard()


def sharded_parameters(ops: Sequence[tuple[Op, list[Value]]]) -> ShardedParameters | None:
    """Return what gathers the parameters that ops need and that are freed; None if none are."""
    if not is_fsdp_loaded():
        return None
    uses: dict[int, tuple[int, int]] = {}  # first and last op that reads a freed storage
    for number, (op, _) in enumerate(ops):
        for value in op.reads:
            if value.held is not None and _is_freed(value.held.tensor):
                key = value.held.tensor.untyped_storage()._cdata
                uses[key] = uses.get(key, (number, number))[0], number
    return _schedule(uses) if uses else None


def _schedule(uses: dict[int, tuple[int, int]]) -> ShardedParameters:
    spans: dict[Any, tuple[int, int]] = {}
    for module, parameters in sharded_modules():
        for key in {p.untyped_storage()._cdata for p in parameters} & uses.keys():
            first, last = uses[key]
            before = spans.get(module, (first, last))
            spans[module] = min(first, before[0]), max(last, before[1])
    starts: dict[int, list[Any]] = {}
    ends: dict[int, list[Any]] = {}
    for module, (first, last) in spans.items():
        starts.setdefault(first, []).append(module)
        ends.setdefault(last, []).append(module)
    return ShardedParameters(starts, ends)


def _is_freed(tensor: Tensor) -> bool:
    return is_plain(tensor) and not tensor.untyped_storage().nbytes() and tensor.numel() > 0
