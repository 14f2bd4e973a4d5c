"""Who watches: profilers that are on in this thread, and what engines tell them.

Engines look up the watchers when a region begins and keep them with it, so that a backward pass
that runs in another thread reports to the same ones. With nobody watching nothing is counted.
What everybody should know, watching or not, is a warning, once.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from .errors import RematWarning
from .plans.trace import Trace

__all__ = ["Watcher", "start_watching", "stop_watching", "warn_once", "watched_by", "watchers"]

_HERE = str(Path(__file__).parent / "_")[:-1]  # with the separator at its end


class Watcher(Protocol):
    """What engines tell about regions: what was run, held and computed again.

    Memory is told twice, each as things with a key and a size: what a plain pass would hold at
    this time, and what is held. A thing that is held in several ways is told several times and
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
        """What the region did, op by op, if the engine can tell."""


class _Threads(threading.local):
    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()


_threads = _Threads()


def watchers() -> tuple[Watcher, ...]:
    """Return those who watch this thread."""
    return _threads.watchers


def start_watching(watcher: Watcher) -> None:
    _threads.watchers = (*_threads.watchers, watcher)


def stop_watching(watcher: Watcher) -> None:
    _threads.watchers = tuple(w for w in _threads.watchers if w is not watcher)


@contextmanager
def watched_by(more: Sequence[Watcher]) -> Iterator[None]:
    """Let those who watched the begin of a region also watch what it runs later."""
    added = [watcher for watcher in more if watcher not in _threads.watchers]
    for watcher in added:
        start_watching(watcher)
    try:
        yield
    finally:
        for watcher in added:
            stop_watching(watcher)


_warned: set[Hashable] = set()


def warn_once(key: Hashable, message: str) -> None:
    """Warn the caller of remat, but of the same thing (the same `key`) only the first time."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, RematWarning, stacklevel=_frames_inside() + 1)


def _frames_inside() -> int:
    """Count the frames from here up to the first that is not remat's own."""
    count, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        count, frame = count + 1, frame.f_back
    return count
