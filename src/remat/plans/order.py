"""The order in which the backward of a recorded pass runs."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trace import Trace

__all__ = ["backward_order", "has_backward"]


def has_backward(trace: Trace, number: int) -> bool:
    """Tell whether autograd has a node for an op: it saves, or makes what has a gradient."""
    op = trace.ops[number]
    return bool(op.saves) or any(trace.values[made].requires_grad for made in op.makes)


def backward_order(trace: Trace) -> tuple[int, ...]:
    """Return the ops that have a backward in its order: as recorded, the others when ready.

    Like autograd's engine, of the nodes that are ready the one that was made last runs first. An op
    whose backward asks for no saved value was not recorded: it runs when all that read its results
    have run. Recorded ops run in the order that was recorded.
    """
    nodes = [number for number in range(len(trace.ops)) if has_backward(trace, number)]
    if not trace.used:
        return tuple(reversed(nodes))
    return tuple(_AutogradEngine(trace, nodes).run())


class _AutogradEngine:
    def __init__(self, trace: Trace, nodes: list[int]) -> None:
        self._sources = _sources(trace, nodes)
        self._waits = dict.fromkeys(nodes, 0)  # for how many readers
        for sources in self._sources.values():
            for source in sources:
                self._waits[source] += 1
        self._recorded = [number for number in dict.fromkeys(trace.used) if number in self._waits]
        recorded = set(self._recorded)
        self._ready = [-n for n in nodes if n not in recorded and not self._waits[n]]
        heapq.heapify(self._ready)
        self._is_recorded = recorded
        self._done: list[int] = []

    def run(self) -> list[int]:
        for number in self._recorded:
            while self._ready and -self._ready[0] > number:
                self._finish(-heapq.heappop(self._ready))
            self._finish(number)
        while self._ready:
            self._finish(-heapq.heappop(self._ready))
        return self._done

    def _finish(self, number: int) -> None:
        self._done.append(number)
        for source in self._sources[number]:
            self._waits[source] -= 1
            if not self._waits[source] and source not in self._is_recorded:
                heapq.heappush(self._ready, -source)


def _sources(trace: Trace, nodes: list[int]) -> dict[int, set[int]]:
    """Return the nodes that get a gradient from each node."""
    known = set(nodes)
    sources: dict[int, set[int]] = {}
    for number in nodes:
        makers = {trace.values[read].made_by for read in trace.ops[number].reads}
        sources[number] = {maker for maker in makers if maker is not None and maker in known}
    return sources
