"""Adds up events of regions: what a plain pass would hold, what is held, what was recomputed.

Events arrive from any thread and re-entrantly from finalizers. They are queued; the thread that
gets the lock without blocking drains the queue.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from ..core.meter import Meter
from ..plans.trace import Trace

__all__ = ["MemoryAccounting", "RegionTotals"]

_MOST_POINTS = 4096  # of a curve: far more than a picture shows
_MOST_TRACES = 1024  # a profiler around a long training must not fill the memory
_NAME_BITS = 32


@dataclass(slots=True)
class RegionTotals:
    """All runs of the regions of one name together."""

    name: str
    runs: int = 0
    recomputed: int = 0  # how often one of them, or a part of it, was computed again
    ops: int = 0  # that were run for it: ops, calls or steps, as the engine counts
    seconds: float = 0.0
    error: float = 0.0  # the largest that rounding a checkpoint has caused
    plain_bytes: int = 0  # that plain passes would keep for them from forward to backward
    held_bytes: int = 0  # that were kept instead: inputs, and what policies keep


class MemoryAccounting:
    """An observer that adds up; readers see all events that came before.

    >>> accounting = MemoryAccounting()
    >>> region = accounting.region_ran("layer")
    >>> accounting.would_hold("activations", 100)
    >>> accounting.holds("input", 10)
    >>> accounting.recomputed(region, 3, 0.5)
    >>> accounting.plain_peak, accounting.held_peak
    (100, 10)
    >>> [(totals.name, totals.runs, totals.ops) for totals in accounting.regions]
    [('layer', 1, 3)]
    """

    def __init__(self, *, only_totals: bool = False) -> None:
        self._numbers = itertools.count()
        self._only_totals = only_totals  # no curve and no traces
        self._queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self._naming = threading.Lock()
        self._name_numbers: dict[str, int] = {}
        self._regions: list[RegionTotals] = []  # by the numbers of their names
        self._plain = Meter()
        self._held = Meter()
        self._curve = _Curve()
        self._traces: dict[int, Trace] = {}

    def close(self) -> None:
        """Take no more events: the numbers stay as they are."""
        self._is_closed = True

    # -- events ----------------------------------------------------------------------------------

    def region_ran(self, name: str) -> int:
        # The low bits are the number of the name: nothing has to be remembered of a single region.
        with self._naming:
            name_number = self._name_numbers.setdefault(name, len(self._name_numbers))
        self._notify(self._enter_run, name_number, name)
        return next(self._numbers) << _NAME_BITS | name_number

    def kept(self, region: int, *, plain: int = 0, held: int = 0) -> None:
        self._notify(self._enter_kept, region, plain, held)

    def would_hold(self, key: Hashable, nbytes: int) -> None:
        self._notify(self._plain.put, key, nbytes)

    def would_free(self, key: Hashable) -> None:
        self._notify(self._plain.take, key)

    def holds(self, key: Hashable, nbytes: int) -> None:
        self._notify(self._held.put, key, nbytes)

    def frees(self, key: Hashable) -> None:
        self._notify(self._held.take, key)

    def allocated(self, key: Hashable, nbytes: int) -> None:
        self._notify(self._enter_allocated, key, nbytes)

    def freed(self, key: Hashable) -> None:
        self._notify(self._enter_freed, key)

    def recomputed(self, region: int, ops: int, seconds: float) -> None:
        self._notify(self._enter_recomputed, region, ops, seconds)

    def rounded(self, region: int, error: float) -> None:
        self._notify(self._enter_rounded, region, error)

    def traced(self, region: int, trace: Trace) -> None:
        if not self._only_totals:
            self._notify(self._enter_trace, region, trace)

    # -- what readers see ------------------------------------------------------------------------

    @property
    def plain_peak(self) -> int:
        """The most bytes that a plain pass would have held at a time."""
        self._finish_queue()
        return self._plain.peak

    @property
    def held_peak(self) -> int:
        """The most bytes that were held at a time."""
        self._finish_queue()
        return self._held.peak

    @property
    def memory_saved(self) -> int:
        """The difference of the two peaks; negative if checkpointing took more than it saved."""
        return self.plain_peak - self.held_peak

    @property
    def regions(self) -> list[RegionTotals]:
        """What happened under each name, in the order of first runs."""
        self._finish_queue()
        return [replace(totals) for totals in self._regions]

    @property
    def curve(self) -> list[tuple[int, int]]:
        """What a plain pass would have held and what was held, over all events."""
        self._finish_queue()
        return self._curve.all_points()

    @property
    def traces(self) -> list[Trace]:
        """What the last regions did, where the engine records it."""
        self._finish_queue()
        return list(self._traces.values())

    # -- adding up -------------------------------------------------------------------------------

    def _notify(self, enter: Callable[..., None], *what: Any) -> None:
        if self._is_closed:
            return
        self._queue.append((enter, what))
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _finish_queue(self) -> None:
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        while self._queue:
            enter, what = self._queue.popleft()
            enter(*what)
            if not self._only_totals:
                self._curve.add(self._plain.live, self._held.live)

    def _totals(self, region: int) -> RegionTotals:
        return self._regions[region & ((1 << _NAME_BITS) - 1)]

    def _enter_run(self, name_number: int, name: str) -> None:
        while len(self._regions) <= name_number:  # events of threads may come in another order
            self._regions.append(RegionTotals(""))
        self._regions[name_number].name = name
        self._regions[name_number].runs += 1

    def _enter_kept(self, region: int, plain: int, held: int) -> None:
        totals = self._totals(region)
        totals.plain_bytes += plain
        totals.held_bytes += held

    def _enter_trace(self, region: int, trace: Trace) -> None:
        self._traces[region] = trace
        if len(self._traces) > _MOST_TRACES:
            del self._traces[next(iter(self._traces))]

    def _enter_allocated(self, key: Hashable, nbytes: int) -> None:
        self._plain.put(key, nbytes)
        self._held.put(key, nbytes)

    def _enter_freed(self, key: Hashable) -> None:
        self._plain.take(key)
        self._held.take(key)

    def _enter_recomputed(self, region: int, ops: int, seconds: float) -> None:
        totals = self._totals(region)
        totals.recomputed += 1
        totals.ops += ops
        totals.seconds += seconds

    def _enter_rounded(self, region: int, error: float) -> None:
        totals = self._totals(region)
        totals.error = max(totals.error, error)


class _Curve:
    """Two heights over events, in a bounded number of points: each the highest of its stretch."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []
        self._stretch = 1  # events in a point
        self._open: tuple[int, int] = (0, 0)
        self._events = 0  # in the open point

    def add(self, plain: int, held: int) -> None:
        self._open = _higher(self._open, (plain, held)) if self._events else (plain, held)
        self._events += 1
        if self._events < self._stretch:
            return
        self._points.append(self._open)
        self._events = 0
        if len(self._points) == _MOST_POINTS:
            self._points = list(map(_higher, self._points[::2], self._points[1::2]))
            self._stretch *= 2

    def all_points(self) -> list[tuple[int, int]]:
        return [*self._points, *([self._open] if self._events else [])]


def _higher(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])
