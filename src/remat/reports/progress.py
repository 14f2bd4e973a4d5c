"""A progress bar for loops: forward, recomputed and backward steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["LoopProgress"]


class LoopProgress:
    """Three bars on standard error; shown while the loop runs ahead, and again on the way back."""

    def __init__(self, steps: int | None) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._forward = self._progress.add_task("forward", total=steps)
        self._recompute = self._progress.add_task("recompute", total=None)
        self._backward = self._progress.add_task("backward", total=steps)

    def expect(self, recomputed: int) -> None:
        """Say how many steps will be run again."""
        self._progress.update(self._recompute, total=recomputed)

    @contextmanager
    def shown(self, *, last: bool) -> Iterator[None]:
        """Show the bars for a while; only the `last` time they stay on the screen."""
        self._progress.live.transient = not last
        self._progress.start()
        try:
            yield
        finally:
            self._progress.stop()

    def forward(self, steps: int) -> None:
        self._progress.advance(self._forward, steps)

    def recompute(self, steps: int) -> None:
        self._progress.advance(self._recompute, steps)

    def backward(self, steps: int) -> None:
        self._progress.advance(self._backward, steps)

    # What is held is not shown.

    def holds_state(self, step: int, state: object, nbytes: int | None) -> None:
        pass

    def frees_state(self, step: int) -> None:
        pass

    def holds_tape(self, step: int) -> None:
        pass

    def frees_tape(self, step: int) -> None:
        pass
