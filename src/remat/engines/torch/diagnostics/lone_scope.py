"""Warns of a scope around a whole model, which costs time and saves no memory.

A scope is recomputed as a whole when backward reaches it. If backward begins there and no other
region is pending, all activations of the pass exist at once, as without the scope. Tensors saved
before the scope exist in either case. Tensors saved after it have been freed by then, so only a
loss may follow it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from weakref import ref

from ....observers import warn_once
from ....sizes import format_bytes
from ..backend import count_graph_nodes
from ..recording.recorder import Recorder
from ..region import TorchRegion

__all__ = ["LoneScope"]

_LEAST_BYTES = 10**6  # less is a toy
_MOST_NODES = 8  # of autograd's graph, for a loss


class LoneScope:
    """Called when backward reaches the region of a scope; checks whether it is the only one."""

    def __init__(
        self, region: TorchRegion, recorder: Recorder, then: Callable[[], None] | None
    ) -> None:
        self._region = ref(region)
        self._recorder = recorder
        self._then = then
        self._thread = threading.get_ident()
        self._is_checked = False
        self._closed: tuple[int, int] | None = None  # ops and nodes, when the scope was left

    def close(self) -> None:
        region = self._region()
        if region is None or _dropped_bytes(region) < _LEAST_BYTES:
            self._is_checked = True  # and no node is made to count others
        else:
            self._closed = self._recorder.op_count, count_graph_nodes()

    def __call__(self) -> None:
        if not self._is_checked:
            self._is_checked = True
            self._check()
        if self._then is not None:
            self._then()

    def _check(self) -> None:
        region = self._region()
        if region is None or threading.get_ident() != self._thread:
            return
        follows_others = region.start != self._recorder.iteration_start
        if follows_others or region.has_children or self._is_followed():
            return
        nbytes = _dropped_bytes(region)
        if nbytes >= _LEAST_BYTES:
            warn_once(
                ("lone scope", region.name),
                f"the scope {region.name!r} saves no memory: backward begins with recomputing all "
                f"of its activations at once ({format_bytes(nbytes)}), as many as without the "
                "scope, and that takes time. Use a scope, or remat.checkpoint, for each block of "
                "the model instead",
            )

    def _is_followed(self) -> bool:
        """Return whether more than a loss was computed between the scope and backward."""
        if self._closed is None:  # backward runs inside of the scope
            return False
        ops, nodes = self._closed
        return self._recorder.op_count > ops or count_graph_nodes() - nodes > _MOST_NODES


def _dropped_bytes(region: TorchRegion) -> int:
    missing = {saved.value for saved in region.living() if saved.tensor is None}
    return sum(
        math.prod(value.size) * value.dtype.itemsize
        for value in missing
        if value.held is None and value.dtype is not None
    )
