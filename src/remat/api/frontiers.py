"""Where the memory of a pass goes, and what less of it would cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.locate import engine_of_call
from ..plans import Plan, Trace
from ..reports.budget import MemoryReport
from ..sizes import format_bytes, parse_bytes, shown
from ..tables import Table
from .wrapped import refuse_module_class

if TYPE_CHECKING:
    from ..plans import FrontierPoint

__all__ = ["Frontier", "frontier", "memory_report"]


class Frontier:
    """Peak memory against time for every budget, from one recorded pass."""

    def __init__(self, trace: Trace) -> None:
        from ..plans import frontier as curve_of  # noqa: PLC0415  (the planner is loaded late)

        self.trace = trace
        self._curve = curve_of(trace)

    @property
    def points(self) -> tuple[FrontierPoint, ...]:
        """Budgets that pay, the fewest bytes first: `peak_bytes`, `extra_seconds`, `plan`."""
        return self._curve.points

    @property
    def knee(self) -> FrontierPoint:
        """The point from which on less memory costs much more time."""
        return self._curve.knee

    @property
    def plain_peak_bytes(self) -> int:
        """The peak of a pass without checkpointing."""
        return self._curve.plain_peak_bytes

    def slowdown(self, point: FrontierPoint) -> float:
        """Return the predicted time of a pass at a point, relative to a plain pass."""
        return 1 + point.extra_seconds / max(self._curve.plain_seconds, 1e-12)

    def plan(self, memory_budget: int | float | str) -> Plan:
        """Return the plan for a budget."""
        from ..plans import plan_trace  # noqa: PLC0415

        return plan_trace(self.trace, memory_budget)

    def table(self) -> str:
        """Return the curve as text."""
        return self._table().text() + "\n"

    def _table(self) -> Table:
        rows = [
            (
                format_bytes(point.peak_bytes),
                f"{point.peak_bytes / max(1, self.plain_peak_bytes):.0%}",
                f"{self.slowdown(point):.2f} x",
            )
            for point in self._shown()
        ]
        knee = (
            f"knee: memory_budget={_rounded_up(self.knee.peak_bytes)!r} at "
            f"{self.slowdown(self.knee):.2f} x the time of a plain pass"
        )
        headings = ("peak memory", "of plain", "time")
        return Table(headings, rows, "Peak memory against time", notes=[knee])

    def _shown(self) -> list[FrontierPoint]:
        """Return about twenty points, evenly over the memory, with both ends and the knee."""
        points, knee = list(self.points), self.knee
        width = (points[-1].peak_bytes - points[0].peak_bytes) / 20
        shown = [points[0]]
        for point in points[1:]:
            is_end = point is points[-1] or point is knee
            if is_end or point.peak_bytes >= shown[-1].peak_bytes + width:
                shown.append(point)
        return shown

    def to_json(self) -> dict[str, Any]:
        """Return the curve as what `json` can write."""
        return {
            "plain_peak_bytes": self.plain_peak_bytes,
            "plain_seconds": self._curve.plain_seconds,
            "points": [[point.peak_bytes, point.extra_seconds] for point in self.points],
            "knee": [self.knee.peak_bytes, self.knee.extra_seconds],
        }

    def plot(self, path: str | Path) -> Path:
        """Draw the curve; return the file.

        The ending of `path` says the format: .png, .svg or .pdf. Needs matplotlib.
        """
        from ..reports.plots import plot_frontier  # noqa: PLC0415  (only if it is used)

        points = [(point.peak_bytes, self.slowdown(point)) for point in self.points]
        knee = self.knee
        return plot_frontier(points, (knee.peak_bytes, self.slowdown(knee)), path)

    def __repr__(self) -> str:
        return (
            f"Frontier({len(self.points)} budgets from "
            f"{format_bytes(self.points[0].peak_bytes)} to {format_bytes(self.plain_peak_bytes)}, "
            f"knee at {format_bytes(self.knee.peak_bytes)})"
        )

    def _repr_html_(self) -> str:
        return self._table().html()


def _rounded_up(nbytes: int) -> str:
    """Write a budget that is enough for so many bytes."""
    text = format_bytes(nbytes)
    enough = nbytes
    while parse_bytes(text) < nbytes:
        enough += max(1, nbytes // 1000)
        text = format_bytes(enough)
    return text


def frontier(model_or_function: Callable[..., Any], /, *inputs: Any, **kwargs: Any) -> Frontier:
    """Return peak memory against time for every budget, from recorded passes of a model.

    The model is run forward and backward, without a trace of it: gradients, buffers and random
    state are left as they were.

    >>> import torch, remat
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
    >>> curve = remat.frontier(torch.nn.Sequential(*layers), torch.ones(512, 64))
    >>> curve.points[0].peak_bytes <= curve.knee.peak_bytes <= curve.plain_peak_bytes
    True

    >>> import numpy as np
    >>> def f(x):
    ...     for _ in range(6):
    ...         x = np.tanh(np.sin(x) * 1.1)
    ...     return np.sum(x)
    >>> curve = remat.frontier(f, np.linspace(0.0, 1.0, 100_000))
    >>> curve.points[0].peak_bytes < curve.plain_peak_bytes
    True
    """
    return Frontier(_trace_of(model_or_function, inputs, kwargs))


def memory_report(
    model_or_function: Callable[..., Any], /, *inputs: Any, **kwargs: Any
) -> MemoryReport:
    """Return where the memory of a plain pass goes: by module, and what is alive at the peak.

    The model is run forward and backward, as by `frontier`. Print the result, or look at `rows`.

    >>> import torch, remat
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
    >>> report = remat.memory_report(model, torch.ones(512, 64))
    >>> report.rows[0].module, report.rows[0].kept_bytes
    ('0', 131072)
    """
    return MemoryReport(_trace_of(model_or_function, inputs, kwargs))


def _trace_of(function: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    refuse_module_class(function, "model_or_function")
    if not callable(function):
        raise TypeError(f"model_or_function must be a model or a function, got {shown(function)}")
    return engine_of_call(function, inputs, kwargs).record_trace(function, inputs, kwargs)
