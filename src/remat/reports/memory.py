"""What the operating system says about this process's memory, now and over a while."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import UnsupportedError

__all__ = ["MeasuredPass", "MemorySampler", "peak_bytes", "resident_bytes"]

_PROCESS = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """What a pass took; `curve_bytes[i]` were held `curve_seconds[i]` after its start."""

    name: str
    seconds: float
    peak_bytes: int
    curve_seconds: tuple[float, ...] = ()
    curve_bytes: tuple[int, ...] = ()


def resident_bytes() -> int:
    """Return the bytes that this process has in memory now (on macOS: has had at most)."""
    try:
        pages = (_PROCESS / "statm").read_text().split()[1]
    except OSError:
        return _high_water_of_getrusage()
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Return the bytes that this process has had in memory at most."""
    try:
        lines = (_PROCESS / "status").read_text().splitlines()
    except OSError:
        return _high_water_of_getrusage()
    kilobytes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    # Why a second way? Some sandboxes have a /proc without this line.
    return int(kilobytes[0]) * 1024 if kilobytes else _high_water_of_getrusage()


class MemorySampler:
    """Samples the memory of this process from a thread, as bytes above the level at its start.

    >>> with MemorySampler() as sampler:
    ...     ballast = b"x" * 200_000_000
    >>> sampler.peak_bytes > 40_000_000
    True
    """

    def __init__(self, interval: float = 0.01) -> None:
        self.interval = interval
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self.step_peaks: list[int] = []  # the first one is of what came before any step
        self.peak_bytes = 0
        self._first = 0  # the first sample of the current step

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._sample_until_stopped, name="remat-memory", daemon=True
        )
        self._exact = _reset_high_water()
        self._base = resident_bytes()
        self._started = time.perf_counter()
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        self._end_step()
        self.peak_bytes = max(self.step_peaks)

    def begin_step(self) -> None:
        """Count from the level of this moment on; `step_peaks` has the peaks of earlier steps."""
        self._end_step()
        self._exact = _reset_high_water()
        self._base = resident_bytes()
        self._first = len(self.bytes)
        self._sample()

    def _end_step(self) -> None:
        peak = max(self.bytes[self._first :])
        if self._exact:  # the system misses nothing between two samples
            peak = max(peak, peak_bytes() - self._base)
        self.step_peaks.append(peak)

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(self.interval):
            self._sample()

    def _sample(self) -> None:
        held = resident_bytes() - self._base
        self.seconds.append(time.perf_counter() - self._started)
        self.bytes.append(max(0, held))


def _reset_high_water() -> bool:
    """Make the high-water mark start again from here, where the system allows it."""
    with suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")  # proc(5): reset the peak resident set size
        return True
    return False


def _high_water_of_getrusage() -> int:
    try:
        import resource  # noqa: PLC0415  (not on Windows)
    except ImportError:
        raise UnsupportedError(
            f"the memory of a process cannot be measured on {sys.platform}; use Linux or macOS"
        ) from None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # bytes there, kilobytes elsewhere
