"""Tables for people: what a plan predicts, what two passes took."""

from __future__ import annotations

from typing import Literal

from rich.table import Table

from ..schedules.choose import LoopPlan, Option
from ..sizes import format_bytes
from .memory import MeasuredPass

__all__ = ["Unit", "comparison_table", "plan_table"]


Unit = Literal["bytes", "states"]


def plan_table(plan: LoopPlan, *, unit: Unit = "bytes") -> Table:
    """One schedule a row, the best first and marked.

    A plan made without `state_bytes` counts in states.
    """
    with_disk = any(option.disk_slots for option in _options(plan))
    table = Table(title=f"Schedules for {plan.steps:,} steps", title_justify="left")
    table.add_column("schedule")
    for heading in ("evaluations", "per step", "cost", "peak", *(["on disk"] * with_disk)):
        table.add_column(heading, justify="right")
    for option in _options(plan):
        best = option is plan.best
        cells = [
            f"{'*' if best else ' '} {option.name}",
            f"{option.evaluations:,}",
            f"{option.evaluations / max(1, plan.steps):.2f}",
            f"{option.cost:,.6g}" if option.cost < 1e6 else f"{option.cost:,.0f}",
            format_bytes(option.peak_bytes) if unit == "bytes" else _states(option.peak_bytes),
        ]
        disk = [_states(option.disk_slots) if option.disk_slots else "-"] * with_disk
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


def _options(plan: LoopPlan) -> tuple[Option, ...]:
    return plan.best, *plan.alternatives


def _states(count: int) -> str:
    return f"{count:,} state" + "s" * (count != 1)
