"""What checkpointing really did: regions, bytes, and what was computed again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from ..errors import RematError
from ..observers import AllocationTracker, Observer, start_observing, stop_observing
from ..plans.trace import Trace
from ..sizes import counted, format_bytes
from ..tables import Table, as_html, as_text
from .accounting import MemoryAccounting, RegionTotals
from .advice import advice

__all__ = ["Profiler"]

_NOTHING = "No checkpointed region was run while this profiler tracked."


P = ParamSpec("P")
R = TypeVar("R")


class _OnClassToo(Generic[P, R]):
    """A method that, called on the class, is that of one profiler that the class has for this."""

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self._method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    def __get__(self, instance: Profiler | None, owner: type[Profiler]) -> Callable[P, R]:
        profiler = owner._of_the_class() if instance is None else instance
        bound: Callable[P, R] = self._method.__get__(profiler, owner)
        return bound


class Profiler:
    """What `CheckpointProfiler` does, without knowing any engine."""

    @classmethod
    def _of_the_class(cls) -> Profiler:
        """Return the profiler that methods called on the class belong to."""
        if "_shared" not in cls.__dict__:
            cls._shared = cls()
        return cls._shared

    _shared: Profiler

    def __init__(self) -> None:
        self._accounting = MemoryAccounting()
        self._thread: int | None = None  # that is tracked
        self._allocations: AllocationTracker | None = None

    @property
    def is_tracking(self) -> bool:
        """Whether it is counting now."""
        return self._thread is not None

    @_OnClassToo
    def start_tracking(self) -> None:
        """Count from now on, from zero."""
        self._start()

    def _start(self) -> Self:
        if self.is_tracking:
            raise RematError(
                "this profiler is tracking already; call stop_tracking() first, or use a second "
                "CheckpointProfiler"
            )
        try:
            self._accounting, self._thread = MemoryAccounting(), threading.get_ident()
            start_observing(self._accounting)
            self._allocations = self._allocation_tracker(self._accounting)
            if self._allocations is not None:
                self._allocations.start()
            return self
        except BaseException:
            self._stop()
            raise

    def _allocation_tracker(self, observer: Observer) -> AllocationTracker | None:
        """Return what has engines report what else is allocated."""
        return None

    def _stop(self) -> None:
        """Count no more. To be called again after an interrupt: it tracks until all is done."""
        if self._allocations is not None:
            self._allocations.stop()
        stop_observing(self._accounting)
        self._accounting.close()
        self._thread = None

    @_OnClassToo
    def stop_tracking(self) -> None:
        """Count no more; the numbers stay."""
        if not self.is_tracking:
            raise RematError("this profiler is not tracking; call start_tracking() first")
        if self._thread != threading.get_ident():
            raise RematError(
                "this profiler tracks another thread; call stop_tracking() in the thread that "
                "called start_tracking()"
            )
        try:
            self._stop()
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self._start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:  # an interrupt at this very line leaves it on: Python calls `__exit__` once
            if self.is_tracking:  # it may have been stopped inside
                self.stop_tracking()
        except BaseException:
            if self._thread == threading.get_ident():
                self._stop()
            raise

    # -- numbers ---------------------------------------------------------------------------------

    @_OnClassToo
    def memory_saved(self) -> int:
        """Return by how many bytes the peak of what was held is below that of a plain pass.

        Counted is what is allocated while it tracks: by regions and, on PyTorch, by all else in
        this thread, such as gradients, which may move the peak. What a kernel allocates for itself
        while it runs is not seen. Negative if checkpointing took more.
        """
        return self._accounting.memory_saved

    @_OnClassToo
    def peak_bytes(self) -> int:
        """Return the peak of what was held, counted as `memory_saved` says."""
        return self._accounting.held_peak

    @_OnClassToo
    def checkpoint_count(self) -> int:
        """Return how many checkpointed regions were run: calls, scopes, loops."""
        return sum(totals.runs for totals in self.regions)

    @_OnClassToo
    def recompute_count(self) -> int:
        """Return how often a region, or a part of one, was computed again."""
        return sum(totals.recomputed for totals in self.regions)

    @_OnClassToo
    def recompute_seconds(self) -> float:
        """Return the time that this took."""
        return sum(totals.seconds for totals in self.regions)

    @_OnClassToo
    def rounding_error(self) -> float:
        """Return the largest absolute error of a checkpoint that a store has rounded."""
        return max((totals.error for totals in self.regions), default=0.0)

    @property
    def regions(self) -> list[RegionTotals]:
        """What happened under each name: runs, recomputations, their ops and seconds."""
        return self._accounting.regions

    @property
    def traces(self) -> list[Trace]:
        """What the regions did op by op, where the engine records it."""
        return self._accounting.traces

    # -- for people ------------------------------------------------------------------------------

    @_OnClassToo
    def report(self) -> str:
        """Return a table of all this, and what to make of it, as text."""
        return as_text([self._page()]) + "\n"

    def _repr_html_(self) -> str:
        return as_html([self._page()])

    def _page(self) -> Table | str:
        regions = self.regions
        return _table(regions, self._notes()) if regions else _NOTHING

    def __repr__(self) -> str:
        state = "tracking" if self.is_tracking else "not tracking"
        regions = counted(self.checkpoint_count(), "region")
        again = counted(self.recompute_count(), "recomputation")
        saved = format_bytes(self.memory_saved())
        return f"<CheckpointProfiler: {state}, {regions}, {again}, {saved} saved>"

    def _notes(self) -> list[str]:
        plain, held = self._accounting.plain_peak, self._accounting.held_peak
        share = f" ({(plain - held) / plain:.0%})" if plain else ""
        notes = [
            f"peak of a plain pass {format_bytes(plain)}, held {format_bytes(held)}: "
            f"saved {format_bytes(plain - held)}{share}"
        ]
        error = self.rounding_error()
        if error:
            notes.append(f"checkpoints were rounded, by at most {error:.3g}")
        return notes + advice(self.regions, plain, held)

    @_OnClassToo
    def plot(self, path: str | Path) -> Path:
        """Draw what a plain pass would hold and what is held, over events; return the file.

        The ending of `path` says the format: .png, .svg or .pdf. Needs matplotlib.
        """
        from .plots import plot_profile  # noqa: PLC0415  (only if it is used)

        return plot_profile(self._accounting.curve, path)


def _table(regions: Sequence[RegionTotals], notes: Sequence[str]) -> Table:
    """One name a row: how often its regions ran, their bytes, and what was recomputed.

    Bytes are those of one run, on average: what a plain pass keeps from forward to backward, and
    what is kept instead.
    """
    headings = ("region", "runs", "plain", "held", "recomputed", "ops", "seconds")
    rows = [
        (
            totals.name,
            f"{totals.runs:,}",
            format_bytes(totals.plain_bytes / max(1, totals.runs)),
            format_bytes(totals.held_bytes / max(1, totals.runs)),
            f"{totals.recomputed:,}",
            f"{totals.ops:,}",
            f"{totals.seconds:.4f}",
        )
        for totals in regions
    ]
    footer = (
        "all",
        f"{sum(totals.runs for totals in regions):,}",
        *("", ""),  # regions share memory, and do not all run at a time
        f"{sum(totals.recomputed for totals in regions):,}",
        f"{sum(totals.ops for totals in regions):,}",
        f"{sum(totals.seconds for totals in regions):.4f}",
    )
    title = "Checkpointed regions (bytes of one run)"
    return Table(headings, rows, title, footer if len(regions) > 1 else (), notes)
