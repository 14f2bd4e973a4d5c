"""Pickled traced arrays: good inside the trace that they belong to, an error outside of it.

A pickle cannot hold the graph. So it holds a name, and the copy that it names is held here until
the trace ends. A plain array in its place would lose the gradient in silence (worker processes).
"""

from __future__ import annotations

import copy
import itertools
import uuid
from typing import Any

from ...errors import UnsupportedError

__all__ = ["forget", "keep", "unpickled"]

_process = uuid.uuid4().hex  # numbers of another process mean something else
_numbers = itertools.count()
_kept: dict[tuple[str, int], Any] = {}


def keep(box: Any) -> tuple[str, int]:
    """Hold a copy of a traced array; return its name."""
    name = _process, next(_numbers)
    _kept[name] = box
    return name


def unpickled(name: tuple[str, int]) -> Any:
    """Return what was kept under a name."""
    if name not in _kept:
        raise UnsupportedError(
            "this pickle holds a traced array of remat, which can be loaded only in the same "
            "process and while the function is being differentiated: its gradient would be lost. "
            "Pickle values that remat.value_and_grad has returned instead"
        )
    return copy.copy(_kept[name])


def forget(trace: int) -> None:
    """Let go of the arrays of a trace that has ended."""
    for name in [name for name, box in _kept.items() if box._trace >= trace]:
        del _kept[name]
