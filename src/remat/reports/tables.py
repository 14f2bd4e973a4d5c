"""Tables for people: what a plan predicts, what two passes took, what regions did."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..html_table import html_table
from ..schedules.choose import LoopPlan
from ..sizes import counted, format_bytes
from .accounting import RegionTotals
from .memory import MeasuredPass

if TYPE_CHECKING:  # rich is loaded only if a table is drawn
    from rich.table import Table

__all__ = ["comparison_table", "plan_table", "profile_grid"]


class Grid(NamedTuple):
    """A table of text: the first column are names, the others numbers."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    footer: Sequence[str] = ()
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Return it with lines drawn around the cells, as wide as it is."""
        from rich.console import Console  # noqa: PLC0415  (only if it is used)

        page = io.StringIO()
        # Why so wide? All of it is wanted, wherever it is shown. In a notebook rich would show it
        # instead of writing it.
        console = Console(file=page, width=10_000, color_system=None, force_jupyter=False)
        console.print(self._drawn())
        return page.getvalue() + "".join(f"{note}\n" for note in self.notes)

    def _drawn(self) -> Table:
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(title=self.title, title_justify="left", show_footer=bool(self.footer))
        for number, heading in enumerate(self.headings):
            table.add_column(
                heading,
                footer=self.footer[number] if self.footer else "",
                justify="right" if number else "left",
            )
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def html(self) -> str:
        """Return it for a notebook."""
        return html_table(
            self.headings, self.rows, title=self.title, footer=self.footer, notes=self.notes
        )


def plan_table(plan: LoopPlan) -> Table:
    """One schedule a row, the best first and marked."""
    from rich.table import Table  # noqa: PLC0415

    headings, rows = plan.cells()
    table = Table(title=f"Schedules for {counted(plan.steps, 'step')}", title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for number, row in enumerate(rows):
        table.add_row(*row, style=None if number else "bold green")
    return table


def comparison_table(plain: MeasuredPass, checkpointed: MeasuredPass, difference: float) -> Table:
    """Two passes side by side, and how far their gradients are apart, relatively."""
    from rich.table import Table  # noqa: PLC0415

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


def profile_grid(regions: Sequence[RegionTotals], notes: Sequence[str]) -> Grid:
    """One name a row: how often its regions ran, their bytes, and what was recomputed.

    Bytes are those of one run, on average: what a plain pass keeps from forward to backward, and
    what is kept instead.
    """
    headings = ("region", "runs", "plain", "held", "recomputed", "ops", "seconds")
    rows = [
        (
            totals.name,
            f"{totals.runs:,}",
            format_bytes(totals.plain_bytes / max(1, totals.runs)),
            format_bytes(totals.held_bytes / max(1, totals.runs)),
            f"{totals.recomputed:,}",
            f"{totals.ops:,}",
            f"{totals.seconds:.4f}",
        )
        for totals in regions
    ]
    footer = (
        "all",
        f"{sum(totals.runs for totals in regions):,}",
        *("", ""),  # regions share memory, and do not all run at a time
        f"{sum(totals.recomputed for totals in regions):,}",
        f"{sum(totals.ops for totals in regions):,}",
        f"{sum(totals.seconds for totals in regions):.4f}",
    )
    title = "Checkpointed regions (bytes of one run)"
    return Grid(title, headings, rows, footer if len(regions) > 1 else (), notes)
