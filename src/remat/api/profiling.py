"""The profiler, with the allocations that engines report."""

from __future__ import annotations

from ..engines.locate import allocation_tracker
from ..observers import AllocationTracker, Observer
from ..reports.profiler import Profiler

__all__ = ["CheckpointProfiler"]


class CheckpointProfiler(Profiler):
    """Counts what happens in the checkpointed regions that begin while it tracks.

    A context manager, or `start_tracking()` and `stop_tracking()`; it tracks the thread that
    starts it. Numbers can be read at any time, and stay after the end; starting again begins
    from zero. Called on the class itself, as in `CheckpointProfiler.start_tracking()`, they are the
    methods of one profiler that belongs to the class.

    Measuring takes time: for figures of speed use a stopwatch, and no profiler.

    >>> import numpy as np
    >>> import remat
    >>> def deep(x):
    ...     for _ in range(10):
    ...         x = np.sin(x)
    ...     return x
    >>> with remat.CheckpointProfiler() as profiler:
    ...     gradient = remat.grad(lambda x: np.sum(remat.checkpoint(deep, x)))(np.ones(1000))
    >>> profiler.checkpoint_count(), profiler.recompute_count()
    (1, 1)
    """

    def _allocation_tracker(self, observer: Observer) -> AllocationTracker | None:
        return allocation_tracker(observer)
