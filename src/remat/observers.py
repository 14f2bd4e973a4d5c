"""Observers of regions: the profilers of this thread, and the events that engines send them.

Engines look up the observers when a region begins and keep them with it, so that a backward pass
that runs in another thread notifies the same ones. Without observers nothing is counted. What
every user should know is a warning, once.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from .errors import RematWarning
from .plans.trace import Trace

__all__ = [
    "AllocationTracker",
    "Observer",
    "observed_by",
    "observers",
    "start_observing",
    "stop_observing",
    "warn_once",
]

_FRAMEWORKS = {"torch", "autograd"}  # which call back, in backward
_HERE = str(Path(__file__).parent / "_")[:-1]  # with the separator at its end


class Observer(Protocol):
    """Gets the events of regions: what was run, held and recomputed.

    There are two accounts of memory, each by key and size: what a plain pass would hold at
    this time, and what is held. What is held in several ways is reported several times and
    counts once. Engines may call from any thread.
    """

    def region_ran(self, name: str) -> int:
        """A checkpointed region has begun; returns its number."""

    def kept(self, region: int, *, plain: int = 0, held: int = 0) -> None:
        """A region keeps more bytes from forward to backward: a plain pass, and this one."""

    def would_hold(self, key: Hashable, nbytes: int) -> None: ...

    def would_free(self, key: Hashable) -> None: ...

    def holds(self, key: Hashable, nbytes: int) -> None: ...

    def frees(self, key: Hashable) -> None: ...

    def allocated(self, key: Hashable, nbytes: int) -> None:
        """The program has allocated memory, which is there with and without checkpointing."""

    def freed(self, key: Hashable) -> None: ...

    def recomputed(self, region: int, ops: int, seconds: float) -> None:
        """A region, or a part of it, was computed again; `ops` counts calls (ops, or steps)."""

    def rounded(self, region: int, error: float) -> None:
        """A store has rounded what a region holds, with this error at most."""

    def traced(self, region: int, trace: Trace) -> None:
        """What the region did, op by op, if the engine records it."""


class AllocationTracker(Protocol):
    """Tells an observer what the thread that starts it allocates."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Without effect if it was not started, or was stopped before."""


class _ThreadObservers(threading.local):
    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()


_threads = _ThreadObservers()


def observers() -> tuple[Observer, ...]:
    """Return the observers of this thread."""
    return _threads.observers


def start_observing(observer: Observer) -> None:
    _threads.observers = (*_threads.observers, observer)


def stop_observing(observer: Observer) -> None:
    _threads.observers = tuple(w for w in _threads.observers if w is not observer)


@contextmanager
def observed_by(more: Sequence[Observer]) -> Iterator[None]:
    """Notify the observers of a region's beginning also of what it runs later."""
    added = [observer for observer in more if observer not in _threads.observers]
    for observer in added:
        start_observing(observer)
    try:
        yield
    finally:
        for observer in added:
            stop_observing(observer)


_warned: set[Hashable] = set()


def warn_once(key: Hashable, message: str) -> None:
    """Warn the caller of remat, but of the same thing (the same `key`) only the first time."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, RematWarning, stacklevel=_frames_inside() + 1)


def _frames_inside() -> int:
    """Count the frames from here up to the first that is neither remat's own nor a framework's."""
    count, frame = 0, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame):
        count, frame = count + 1, frame.f_back
    return count


def _is_inside(frame: FrameType) -> bool:
    package, _, _ = frame.f_globals.get("__name__", "").partition(".")
    return package in _FRAMEWORKS or frame.f_code.co_filename.startswith(_HERE)
