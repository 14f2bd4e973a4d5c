"""The demo: one long NumPy simulation, differentiated plainly and with checkpoints.

Two chemicals diffuse and react on a grid (the Gray-Scott model). How should the feed, cell by
cell, and the initial fields change so that the pattern comes closer to a target? That is a
gradient through thousands of steps. The plain pass keeps everything that it computes until it goes
back; the checkpointed pass keeps a few states. Each runs in a process of its own, so that their
memory is measured apart.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import remat

from .reports.memory import MeasuredPass, MemorySampler

__all__ = ["DemoResult", "DemoSize", "run_demo"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Fields = tuple[Array, Array]
Step = Callable[[Fields], Fields]

# A fresh process finds its modules where this one does, also if that is no installed remat. Why as
# __main__? To remat the simulation is then what it would be to a user: a program, not remat.
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module('remat.demo', run_name='__main__', alter_sys=True)"
)


class DemoSize(NamedTuple):
    """How long the loop is, how wide the grid, and how many states may be held."""

    steps: int = 1500
    size: int = 96
    checkpoints: int | None = None


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both passes, and how far their gradients are apart."""

    size: DemoSize
    plain: MeasuredPass
    checkpointed: MeasuredPass
    loss: float
    gradient_difference: float  # the largest difference between two entries
    gradient_largest: float  # the largest entry, to compare that with

    def as_dict(self) -> dict[str, Any]:
        """Return the results for JSON."""
        passes = {
            measured.name: {"peak_bytes": measured.peak_bytes, "seconds": measured.seconds}
            for measured in (self.plain, self.checkpointed)
        }
        return {
            **self.size._asdict(),
            **passes,
            "memory_ratio": self.checkpointed.peak_bytes / max(1, self.plain.peak_bytes),
            "time_ratio": self.checkpointed.seconds / self.plain.seconds,
            "loss": self.loss,
            "gradient_difference": self.gradient_difference,
            "gradient_largest": self.gradient_largest,
        }


def run_demo(size: DemoSize) -> DemoResult:
    """Run both passes, one after the other, each in a fresh process; progress on stderr."""
    if size.checkpoints is None:
        default = remat.get_memory_savings(size.steps)["num_checkpoints"]
        size = size._replace(checkpoints=int(default))
    plain, checkpointed = _measure_apart("plain", size), _measure_apart("checkpointed", size)
    return DemoResult(
        size,
        plain.measured,
        checkpointed.measured,
        checkpointed.loss,
        float(np.max(np.abs(plain.gradients - checkpointed.gradients))),
        float(np.max(np.abs(plain.gradients))),
    )


# -- the simulation ----------------------------------------------------------------------------


def laplacian(field: Array) -> Array:
    """Return how far each cell is below its four neighbours; the grid is a torus."""
    upper, lower = np.roll(field, 1, axis=0), np.roll(field, -1, axis=0)
    left, right = np.roll(field, 1, axis=1), np.roll(field, -1, axis=1)
    return upper + lower + left + right - 4 * field


def reaction(feed: Array) -> Step:
    """Return one step of the Gray-Scott model; `feed` says how fast each cell is fed."""

    def step(fields: Fields) -> Fields:
        food, eater = fields
        eaten = food * eater * eater
        return (
            food + 0.2 * laplacian(food) - eaten + feed * (1 - food),
            eater + 0.1 * laplacian(eater) + eaten - (feed + 0.06) * eater,
        )

    return step


def initial_fields(size: int) -> tuple[Fields, Array]:
    """Return a drop of the eater in the middle of the food, and an even feed."""
    distance = _distance_from_middle(size)
    drop = np.exp(-200 * distance**2)
    return (1 - 0.5 * drop, 0.25 * drop), np.full((size, size), 0.04)


def target(size: int) -> Array:
    """Return the pattern to grow: a ring."""
    return 0.3 * np.exp(-400 * (_distance_from_middle(size) - 0.25) ** 2)


def _distance_from_middle(size: int) -> Array:
    rows, columns = np.mgrid[:size, :size] / size - 0.5
    distance: Array = np.hypot(rows, columns)
    return distance


# -- the two passes ----------------------------------------------------------------------------


def differentiate(run: Callable[[Step, Fields], Fields], size: int) -> tuple[float, Array]:
    """Return the mismatch with the target, and its gradient: by both fields and by the feed."""
    wanted = target(size)

    def mismatch(fields: Fields, feed: Array) -> Any:
        _, eater = run(reaction(feed), fields)
        return np.sum((eater - wanted) ** 2)

    loss, (by_fields, by_feed) = remat.value_and_grad(mismatch, wrt=(0, 1))(*initial_fields(size))
    return float(loss), np.stack([*by_fields, by_feed])


def plain_pass(size: DemoSize, *, progress: bool = True) -> tuple[float, Array]:
    """Differentiate an ordinary Python loop."""
    with _bars(progress) as bars:
        forward = bars.add_task("forward", total=size.steps)
        backward = bars.add_task("backward", total=None, start=False)  # its progress is unknown

        def run(step: Step, fields: Fields) -> Fields:
            for _ in range(size.steps):
                fields = step(fields)
                bars.advance(forward)
            bars.start_task(backward)
            return fields

        found = differentiate(run, size.size)
        bars.update(backward, total=size.steps, completed=size.steps)
    return found


def checkpointed_pass(size: DemoSize, *, progress: bool = True) -> tuple[float, Array]:
    """Differentiate the same loop, checkpointed."""

    def run(step: Step, fields: Fields) -> Fields:
        final, _ = remat.checkpointed_loop(
            step, fields, size.steps, size.checkpoints, progress=progress
        )
        return final  # type: ignore[no-any-return]

    return differentiate(run, size.size)


def _bars(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )


# -- in a process of its own -------------------------------------------------------------------


class _Measurement(NamedTuple):
    measured: MeasuredPass
    loss: float
    gradients: Array


def report_side(side: str, *numbers: str) -> None:
    """Run one pass in this process and write what it took to stdout, as an .npz archive."""
    # Being ended runs every `finally`, so that progress bars give the cursor back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    size = DemoSize(*map(int, numbers))
    run = {"plain": plain_pass, "checkpointed": checkpointed_pass}[side]
    run(DemoSize(2, 8, 1), progress=False)  # loads what is loaded once, before anything is measured
    with MemorySampler() as memory:
        started = time.perf_counter()
        loss, gradients = run(size)
        seconds = time.perf_counter() - started
    np.savez(
        sys.stdout.buffer,
        loss=loss,
        seconds=seconds,
        peak_bytes=memory.peak_bytes,
        curve_seconds=memory.seconds,
        curve_bytes=memory.bytes,
        gradients=gradients,
    )


def _measure_apart(side: str, size: DemoSize) -> _Measurement:
    Console(stderr=True).print(f"{side} loop", style="bold")
    with np.load(io.BytesIO(_output_of(side, size))) as found:
        measured = MeasuredPass(
            side,
            float(found["seconds"]),
            int(found["peak_bytes"]),
            tuple(found["curve_seconds"].tolist()),
            tuple(found["curve_bytes"].tolist()),
        )
        return _Measurement(measured, float(found["loss"]), found["gradients"])


def _output_of(side: str, size: DemoSize) -> bytes:
    command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), side, *map(str, size)]
    process = None
    try:
        # Why? An interrupt between the birth of the child and our having its name would orphan it.
        with _interrupts_wait():
            # Its own group: Ctrl-C comes to us alone, and we end the child in good order.
            group = 0 if os.name == "posix" else None
            process = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=group)
        output, _ = process.communicate()
    finally:
        if process is not None:
            _end(process)
    if process.returncode:
        raise remat.RematError(
            f"the {side} pass ended with exit code {process.returncode}, maybe for lack of "
            f"memory; try fewer --steps than {size.steps} or a smaller --size than {size.size}"
        )
    return output


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C come a moment later."""
    # Why not block the signal? Another thread, as BLAS has them, would take it in our place.
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that the child is gone; does nothing if it is."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


if __name__ == "__main__":
    report_side(*sys.argv[1:])
