"""The demo: one long NumPy simulation, differentiated plainly and with checkpoints.

Two chemicals diffuse and react on a grid (the Gray-Scott model). How should the feed, cell by
cell, and the initial fields change so that the pattern comes closer to a target? That is a
gradient through thousands of steps. The plain pass keeps everything that it computes until it goes
back; the checkpointed pass keeps a few states.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import remat
from remat.demo import DemoResult, compare, measure_apart, report
from remat.reports.memory import MemorySampler
from remat.reports.progress import rich_bars
from remat.sizes import counted

__all__ = ["run_simulation_demo"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Fields = tuple[Array, Array]
Step = Callable[[Fields], Fields]


def run_simulation_demo(
    steps: int = 1500, size: int = 96, checkpoints: int | None = None
) -> DemoResult:
    """Run both passes, one after the other; progress on stderr."""
    if checkpoints is None:
        checkpoints = int(remat.get_memory_savings(steps)["num_checkpoints"])
    settings = {"steps": steps, "size": size, "checkpoints": checkpoints}
    remedy = f"try fewer --steps than {steps} or a smaller --size than {size}"
    (plain, one), (checkpointed, other) = (
        measure_apart(__name__, name, {"name": name, **settings}, remedy)
        for name in ("plain", "checkpointed")
    )
    difference = float(np.max(np.abs(np.subtract(one["gradients"], other["gradients"]))))
    largest = float(np.max(np.abs(one["gradients"])))
    relative = f"{difference / (largest or 1.0):.1e}" if difference else "0"
    row = ("gradient difference", "", relative, "relative")
    facts, table = compare(plain, checkpointed, "checkpointed", [row])
    facts["loss"] = other["loss"]
    facts |= {"gradient_difference": difference, "gradient_largest": largest}
    equal = f"the same gradient, {'up to rounding' if difference else 'bit for bit'}"
    share = f"{facts['memory_ratio']:.1%} of the memory"
    summary = f"{table.text()}\n{counted(steps, 'step')}: {equal}, in {share}."
    title = f"The gradient of {counted(steps, 'step')} of a {size} x {size} simulation"
    return DemoResult((plain, checkpointed), {**settings, **facts}, title, summary)


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
    drop = np.exp(-200 * _distance_from_middle(size) ** 2)
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


def plain_pass(
    steps: int, size: int, checkpoints: int = 0, *, progress: bool = True
) -> tuple[float, Array]:
    """Differentiate an ordinary Python loop."""
    with rich_bars(shown=progress) as bars:
        forward = bars.add_task("forward", total=steps)
        backward = bars.add_task("backward", total=None, start=False)  # its progress is unknown

        def run(step: Step, fields: Fields) -> Fields:
            for _ in range(steps):
                fields = step(fields)
                bars.advance(forward)
            bars.start_task(backward)
            return fields

        found = differentiate(run, size)
        bars.update(backward, total=steps, completed=steps)
    return found


def checkpointed_pass(
    steps: int, size: int, checkpoints: int, *, progress: bool = True
) -> tuple[float, Array]:
    """Differentiate the same loop, checkpointed."""

    def run(step: Step, fields: Fields) -> Fields:
        final, _ = remat.checkpointed_loop(step, fields, steps, checkpoints, progress=progress)
        return final  # type: ignore[no-any-return]

    return differentiate(run, size)


def _measure(name: str, steps: int, size: int, checkpoints: int) -> dict[str, Any]:
    run = {"plain": plain_pass, "checkpointed": checkpointed_pass}[name]
    run(2, 8, 1, progress=False)  # loads what is loaded once, before anything is measured
    print(f"{name} loop", file=sys.stderr)
    with MemorySampler() as memory:
        started = time.perf_counter()
        loss, gradients = run(steps, size, checkpoints)
        seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "peak_bytes": memory.peak_bytes,
        "curve_seconds": memory.seconds,
        "curve_bytes": memory.bytes,
        "loss": loss,
        "gradients": gradients.tolist(),
    }


if __name__ == "__main__":
    report(_measure)
