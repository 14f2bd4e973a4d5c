"""A progress bar for loops: forward, recomputed and backward steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["LoopProgress", "rich_bars"]

_SECONDS_BETWEEN_LINES = 0.1


class LoopProgress:
    """Three bars on standard error; shown while the loop runs forward, and again in backward."""

    def __init__(self, steps: int | None) -> None:
        self._bars = _bars()
        self._forward = self._bars.add("forward", steps)
        self._recompute = self._bars.add("recompute", None)
        self._backward = self._bars.add("backward", steps)

    def expect(self, recomputed: int) -> None:
        """Say how many steps will be run again."""
        self._bars.expect(self._recompute, recomputed)

    @contextmanager
    def shown(self, *, last: bool) -> Iterator[None]:
        """Show the bars for a while; only the `last` time they stay on the screen."""
        self._bars.start(stay=last)
        try:
            yield
        finally:
            self._bars.stop()

    def forward(self, steps: int) -> None:
        self._bars.advance(self._forward, steps)

    def recompute(self, steps: int) -> None:
        self._bars.advance(self._recompute, steps)

    def backward(self, steps: int) -> None:
        self._bars.advance(self._backward, steps)

    # What is held is not shown.

    def holds_state(self, step: int, state: object, nbytes: int | None) -> None:
        pass

    def frees_state(self, step: int) -> None:
        pass

    def holds_tape(self, step: int) -> None:
        pass

    def frees_tape(self, step: int) -> None:
        pass


class _Bars(Protocol):
    def add(self, name: str, total: int | None) -> TaskID: ...

    def expect(self, bar: TaskID, total: int) -> None: ...

    def advance(self, bar: TaskID, steps: int) -> None: ...

    def start(self, *, stay: bool) -> None: ...

    def stop(self) -> None: ...


def _bars() -> _Bars:
    """Return bars for wherever this runs.

    In a notebook rich shows nothing but a warning without ipywidgets: there it is a line of text.
    """
    console = Console(stderr=True)
    if console.is_jupyter and not find_spec("ipywidgets"):
        return _LineOfBars()
    return _RichBars(console)


def rich_bars(console: Console | None = None, *, shown: bool = True) -> Progress:
    """Return bars with names, counts and times, by default on standard error."""
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console or Console(stderr=True),
        disable=not shown,
    )


class _RichBars:
    def __init__(self, console: Console) -> None:
        self._progress = rich_bars(console)
        self.advance = self._progress.advance

    def add(self, name: str, total: int | None) -> TaskID:
        return self._progress.add_task(name, total=total)

    def expect(self, bar: TaskID, total: int) -> None:
        self._progress.update(bar, total=total)

    def start(self, *, stay: bool) -> None:
        self._progress.live.transient = not stay
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()


class _LineOfBars:
    """All bars in one line of text that is written over and over."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._done: list[int] = []
        self._totals: list[int | None] = []
        self._stay = False
        self._width = 0
        self._written = 0.0

    def add(self, name: str, total: int | None) -> TaskID:
        self._names.append(name)
        self._done.append(0)
        self._totals.append(total)
        return TaskID(len(self._names) - 1)

    def expect(self, bar: TaskID, total: int) -> None:
        self._totals[bar] = total

    def advance(self, bar: TaskID, steps: int) -> None:
        self._done[bar] += steps
        if time.monotonic() - self._written >= _SECONDS_BETWEEN_LINES:
            self._write(self._text())

    def start(self, *, stay: bool) -> None:
        self._stay = stay
        self._write(self._text())

    def stop(self) -> None:
        self._write(self._text() + "\n" if self._stay else "")

    def _text(self) -> str:
        return ", ".join(
            f"{name} {done}/{'?' if total is None else total}"
            for name, done, total in zip(self._names, self._done, self._totals, strict=True)
        )

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width))
        if not text:
            sys.stderr.write("\r")
        sys.stderr.flush()
        self._width = len(text)
        self._written = time.monotonic()
