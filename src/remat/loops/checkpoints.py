"""The checkpoints that a loop returns: what it holds at the end of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import StoreError, UnsupportedError
from .runner import LoopRun

__all__ = ["checkpoints_of", "no_gradient_of_checkpoints"]


def checkpoints_of(
    run: LoopRun[Any, Any, Any, Any], shown: Callable[[Any], Any], *, lazily: bool = False
) -> Mapping[int, Any]:
    """Return states by position, as `shown` makes them for the caller.

    Those in a store are fetched when they are accessed. So are all, `lazily`, if there will be a
    backward pass: the caller's reference must not keep them from being freed one after the other.
    """
    if run.has_stores or lazily:
        return _Lazy(run, shown)
    return {step: shown(run.held(step)) for step in run.positions}


class _Lazy(Mapping[int, Any]):
    def __init__(self, run: LoopRun[Any, Any, Any, Any], shown: Callable[[Any], Any]) -> None:
        self._run = run
        self._shown = shown
        self._positions = run.positions

    def __getitem__(self, step: int) -> Any:
        if step not in self._positions:
            raise KeyError(step)
        if step not in self._run.positions:
            raise StoreError(
                f"the checkpoint before step {step} is no longer held: the backward pass has used "
                "it; look at it before"
            )
        return self._shown(self._run.held(step))

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __repr__(self) -> str:
        return f"<checkpoints before steps {', '.join(map(str, self._positions))}>"


def no_gradient_of_checkpoints() -> UnsupportedError:
    """Return the error for a gradient that comes to a checkpoint that the caller looks at."""
    return UnsupportedError(
        "gradients do not flow through the checkpoints that a loop returns; to use states on "
        "the way in a loss, return them as outputs of remat.checkpointed_scan"
    )
