"""Tables for people: what a plan predicts, what two passes took, what regions did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text

from ..schedules.choose import LoopPlan, Option
from ..sizes import format_bytes
from .ledger import RegionTotals
from .memory import MeasuredPass

__all__ = ["Unit", "comparison_table", "counted", "plan_table", "profile_table"]


Unit = Literal["bytes", "states"]


def plan_table(plan: LoopPlan, *, unit: Unit = "bytes") -> Table:
    """One schedule a row, the best first and marked.

    A plan made without `state_bytes` counts in states.
    """
    with_disk = any(option.disk_slots for option in _options(plan))
    table = Table(title=f"Schedules for {counted(plan.steps, 'step')}", title_justify="left")
    table.add_column("schedule")
    for heading in ("evaluations", "per step", "cost", "peak", *(["on disk"] * with_disk)):
        table.add_column(heading, justify="right")
    for option in _options(plan):
        best, peak = option is plan.best, option.peak_bytes
        cells = [
            f"{'*' if best else ' '} {option.name}",
            f"{option.evaluations:,}",
            f"{option.evaluations / max(1, plan.steps):.2f}",
            f"{option.cost:,.6g}" if option.cost < 1e6 else f"{option.cost:,.0f}",
            format_bytes(peak) if unit == "bytes" else counted(peak, "state"),
        ]
        disk = [counted(option.disk_slots, "state") if option.disk_slots else "-"] * with_disk
        table.add_row(*cells, *disk, style="bold green" if best else None)
    return table


def comparison_table(plain: MeasuredPass, checkpointed: MeasuredPass, difference: float) -> Table:
    """Two passes side by side, and how far their gradients are apart, relatively."""
    table = Table()
    table.add_column("")
    for heading in (plain.name, checkpointed.name, "ratio"):
        table.add_column(heading, justify="right")
    memory = checkpointed.peak_bytes / max(1, plain.peak_bytes)
    table.add_row(
        "peak memory",
        format_bytes(plain.peak_bytes),
        format_bytes(checkpointed.peak_bytes),
        f"{memory:.1%}",
        style="bold",
    )
    table.add_row(
        "time",
        f"{plain.seconds:.1f} s",
        f"{checkpointed.seconds:.1f} s",
        f"{checkpointed.seconds / plain.seconds:.2f} x",
    )
    table.add_row("gradient difference", "", f"{difference:.1e}" if difference else "0", "relative")
    return table


def profile_table(regions: Sequence[RegionTotals]) -> Table:
    """One name a row: how often its regions ran, and what was computed again."""
    table = Table(title="Checkpointed regions", title_justify="left", show_footer=len(regions) > 1)
    table.add_column("region", footer="all", overflow="fold")
    rows = [(totals.runs, totals.recomputed, totals.ops, totals.seconds) for totals in regions]
    headings = ("runs", "recomputed", "ops", "seconds")
    for heading, *numbers in zip(headings, *rows, strict=True):
        table.add_column(heading, footer=_number(sum(numbers)), justify="right")
    for totals, row in zip(regions, rows, strict=True):
        table.add_row(Text(totals.name), *map(_number, row))
    return table


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _options(plan: LoopPlan) -> tuple[Option, ...]:
    return plan.best, *plan.alternatives


def counted(count: int, what: str) -> str:
    """Write a number of things.

    >>> counted(1, "step"), counted(1000, "step")
    ('1 step', '1,000 steps')
    """
    return f"{count:,} {what}" + "s" * (count != 1)
