"""What checkpointing really did: regions, bytes, and what was computed again."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import RematError
from ..plans.trace import Trace
from ..sizes import format_bytes
from ..watching import start_watching, stop_watching
from .ledger import Ledger, RegionTotals

__all__ = ["CheckpointProfiler"]


class CheckpointProfiler:
    """Counts what happens in the checkpointed regions that begin while it tracks.

    A context manager, or `start_tracking()` and `stop_tracking()`; it tracks the thread that
    starts it. Numbers can be read at any time, and stay after the end; starting again begins
    from zero.

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

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._thread: int | None = None  # that is tracked

    @property
    def is_tracking(self) -> bool:
        """Whether it is counting now."""
        return self._thread is not None

    def start_tracking(self) -> None:
        """Count from now on, from zero."""
        if self.is_tracking:
            raise RematError(
                "this profiler is tracking already; call stop_tracking() first, or use a second "
                "CheckpointProfiler"
            )
        self._ledger, self._thread = Ledger(), threading.get_ident()
        start_watching(self._ledger)

    def stop_tracking(self) -> None:
        """Count no more; the numbers stay."""
        if not self.is_tracking:
            raise RematError("this profiler is not tracking; call start_tracking() first")
        if self._thread != threading.get_ident():
            raise RematError(
                "this profiler tracks another thread; call stop_tracking() in the thread that "
                "called start_tracking()"
            )
        self._thread = None
        stop_watching(self._ledger)
        self._ledger.close()

    def __enter__(self) -> Self:
        self.start_tracking()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.is_tracking:  # it may have been stopped inside
            self.stop_tracking()

    # -- numbers ---------------------------------------------------------------------------------

    def memory_saved(self) -> int:
        """Return by how many bytes the peak of what was held is below that of a plain pass.

        Counted is what the regions made and what goes into them, as far as it was made in the
        same pass; not what the caller held before. Negative if checkpointing took more.
        """
        return self._ledger.memory_saved

    def checkpoint_count(self) -> int:
        """Return how many checkpointed regions were run: calls, scopes, loops."""
        return sum(totals.runs for totals in self.regions)

    def recompute_count(self) -> int:
        """Return how often a region, or a part of one, was computed again."""
        return sum(totals.recomputed for totals in self.regions)

    def recompute_seconds(self) -> float:
        """Return the time that this took."""
        return sum(totals.seconds for totals in self.regions)

    def rounding_error(self) -> float:
        """Return the largest absolute error of a checkpoint that a store has rounded."""
        return max((totals.error for totals in self.regions), default=0.0)

    @property
    def regions(self) -> list[RegionTotals]:
        """What happened under each name: runs, recomputations, their ops and seconds."""
        return self._ledger.regions

    @property
    def traces(self) -> list[Trace]:
        """What the regions did op by op, where the engine can tell."""
        return self._ledger.traces

    # -- for people ------------------------------------------------------------------------------

    def report(self) -> str:
        """Return a table of all this, as text."""
        if not self.regions:
            return "No checkpointed region was run while this profiler tracked.\n"
        from rich.console import Console  # noqa: PLC0415  (only if it is used)

        from .tables import profile_table  # noqa: PLC0415

        page = io.StringIO()
        Console(file=page, width=100, color_system=None).print(profile_table(self.regions))
        return page.getvalue() + self._memory_in_words()

    def _memory_in_words(self) -> str:
        plain, held = self._ledger.plain_peak, self._ledger.held_peak
        share = f" ({(plain - held) / plain:.0%})" if plain else ""
        error = self.rounding_error()
        rounded = f"checkpoints were rounded, by at most {error:.3g}\n" if error else ""
        return (
            f"peak of a plain pass {format_bytes(plain)}, held {format_bytes(held)}: "
            f"saved {format_bytes(plain - held)}{share}\n{rounded}"
        )

    def plot(self, path: str | Path) -> Path:
        """Draw what a plain pass would hold and what is held, over events; return the file.

        The ending of `path` says the format: .png, .svg or .pdf. Needs matplotlib.
        """
        from .plots import plot_profile  # noqa: PLC0415  (only if it is used)

        return plot_profile(self._ledger.curve, path)
