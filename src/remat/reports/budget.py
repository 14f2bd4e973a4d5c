"""What a pass under a budget holds: by module, at its peak, predicted and measured."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..plans import Alive, Kind, PassRecord, Plan, Simulation, Trace, simulate
from ..plans.attribution import Repeated, repeated_modules
from ..plans.bounds import lower_bound_seconds
from ..sizes import format_bytes
from ..tables import Table, as_html, as_text

__all__ = ["BudgetReport", "MemoryReport", "ModuleRow", "module_rows", "modules_at_peak"]

_ROWS = 12  # of a table
_LINE = re.compile(r", ([^,]*):(\d+)(?:: |$)")  # file and line in the place of an op


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """What a plan does with what the ops of a module make, or of several that do the same."""

    module: str  # its path; `h.*.mlp` for those of all blocks together
    kept_bytes: int
    recomputed_bytes: int
    recompute_seconds: float
    modules: int = 1

    @property
    def bytes_per_second(self) -> float:
        """The bytes that a second of recomputation saves."""
        return self.recomputed_bytes / self.recompute_seconds if self.recompute_seconds else 0.0


class BudgetReport:
    """A pass under a budget: what was planned and what was measured, as text and as a picture."""

    def __init__(self, record: PassRecord) -> None:
        self.record = record
        self.trace, self.plan = record.trace, record.plan
        self.budget = record.budget

    def text(self) -> str:
        """Return it as text: peaks and times, a table by module, what is alive at the peak."""
        simulation = simulate(self.trace, self.plan)
        return as_text(
            [
                *self._headline(simulation),
                "",
                _table(
                    ["module", "kept", "recomputed", "seconds", "saved per second"],
                    [_cells(row) for row in module_rows(self.trace, self.plan)],
                ),
                f"at the peak, in {_moment(self.trace, simulation)}:",
                _alive_table(self.trace, simulation, self.plan),
            ]
        )

    def _headline(self, simulation: Simulation) -> Iterable[str]:
        plain = self.trace.plain_peak
        what = "activations and gradients" if self.record.counts_gradients else "activations"
        yield (
            f"budget {format_bytes(self.budget)}, plain peak {format_bytes(plain)}, "
            f"predicted peak {format_bytes(simulation.peak_bytes)}, "
            f"measured ({what}) {format_bytes(self.record.measured_peak)}"
        )
        forward = self.trace.seconds
        share = f" ({simulation.extra_seconds / forward:.0%} of forward)" if forward else ""
        yield (
            f"recomputation: predicted {simulation.extra_seconds:.4g} s{share}, at least "
            f"{lower_bound_seconds(self.trace, self.plan):.4g} s; measured "
            f"{self.record.recompute_seconds:.4g} s in {self.record.recomputed_ops} ops"
        )
        if not self.record.followed:
            yield "this pass was not planned yet: values were dropped as the budget required"
        if simulation.peak_bytes > plain:
            yield (
                "recomputation raises the peak above that of a plain pass, in "
                f"{_moment(self.trace, simulation)}; give a larger budget, or none"
            )

    def plot(self, path: str | Path) -> Path:
        """Draw memory over the pass, plain, planned and measured, with the budget; return the file.

        The ending of `path` says the format: .png, .svg or .pdf. Needs matplotlib.
        """
        from .plots import plot_budget  # noqa: PLC0415  (only if it is used)

        keep_all = Plan(frozenset(_computed(self.trace)))
        curves = {
            "plain": [m.nbytes for m in simulate(self.trace, keep_all).memory],
            "planned": [m.nbytes for m in simulate(self.trace, self.plan).memory],
        }
        if self.record.curve:
            curves["measured"] = list(self.record.curve)
        return plot_budget(curves, self.budget, path)


def _computed(trace: Trace) -> list[int]:
    return [number for number in trace.saved if trace.values[number].kind is Kind.COMPUTED]


def _dropped(trace: Trace, plan: Plan) -> frozenset[int]:
    return frozenset(trace.saved) - plan.keep


def module_rows(trace: Trace, plan: Plan) -> list[ModuleRow]:
    """Return what a plan does by module, those that hold or recompute most first.

    Blocks that repeat, and with which the plan does the same, are one row.
    """
    names = repeated_modules(trace, _dropped(trace, plan))
    kept: dict[Repeated, int] = {}
    dropped: dict[Repeated, int] = {}
    seconds: dict[Repeated, float] = {}
    for number in trace.saved:
        value = trace.values[number]
        if value.made_by is not None:
            is_kept = number in plan.keep or value.kind is Kind.FIXED
            where = kept if is_kept else dropped
            module = names[trace.ops[value.made_by].module]
            where[module] = where.get(module, 0) + value.nbytes
    for ops in simulate(trace, plan).recomputed:
        for number in ops:
            op = trace.ops[number]
            module = names[op.module]
            seconds[module] = seconds.get(module, 0.0) + op.seconds
    rows = [
        ModuleRow(
            module.name,
            kept.get(module, 0),
            dropped.get(module, 0),
            seconds.get(module, 0.0),
            module.times,
        )
        for module in kept | dropped | seconds
    ]
    return sorted(rows, key=lambda row: -(row.kept_bytes + row.recomputed_bytes))


def modules_at_peak(
    trace: Trace, simulation: Simulation, dropped: Collection[int] = ()
) -> list[tuple[str, str, int]]:
    """Return what is alive at the peak: module and line, what it is, bytes; the largest first."""
    names = repeated_modules(trace, dropped)
    found: dict[tuple[str, str], int] = {}
    for alive in simulation.alive:
        key = _place_of(trace, alive, names), alive.what
        found[key] = found.get(key, 0) + alive.nbytes
    rows = [(place, what, nbytes) for (place, what), nbytes in found.items()]
    return sorted(rows, key=lambda row: -row[2])


class MemoryReport:
    """Where the memory of a plain pass goes."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._plan = Plan(frozenset(_computed(trace)))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the pass holds at a time, above what was held before it."""
        return self.trace.plain_peak

    @property
    def rows(self) -> list[ModuleRow]:
        """What autograd saves of the results of each module's ops, the most first."""
        return module_rows(self.trace, self._plan)

    @property
    def at_peak(self) -> list[tuple[str, str, int]]:
        """What is alive at the peak: module and line, what it is, bytes; the largest first."""
        simulation = simulate(self.trace, self._plan)
        return modules_at_peak(self.trace, simulation)

    def text(self) -> str:
        """Return it as text."""
        return as_text(self._page())

    def _page(self) -> list[str | Table]:
        trace, simulation = self.trace, simulate(self.trace, self._plan)
        total = trace.saved_bytes or 1
        cells = [
            [_name_of(row), format_bytes(row.kept_bytes), f"{row.kept_bytes / total:.0%}"]
            for row in self.rows
        ]
        return [
            f"peak {format_bytes(simulation.peak_bytes)} in {_moment(trace, simulation)}; "
            f"saved for backward {format_bytes(trace.saved_bytes)}",
            "",
            _table(["module", "saved for backward", "share"], cells),
            "at the peak:",
            _alive_table(trace, simulation, self._plan),
        ]

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return (
            f"MemoryReport(peak {format_bytes(self.peak_bytes)}, saved for backward "
            f"{format_bytes(self.trace.saved_bytes)})"
        )

    def _repr_html_(self) -> str:
        return as_html(self._page())


def _place_of(trace: Trace, alive: Alive, names: Mapping[str, Repeated]) -> str:
    if alive.what == "workspace":
        op = trace.ops[alive.number]
    else:
        made_by = trace.values[alive.number].made_by
        if made_by is None:
            return "inputs and parameters"
        op = trace.ops[made_by]
    line = _LINE.search(op.place)
    where = f"{Path(line[1]).name}:{line[2]}" if line else ""
    return ", ".join(filter(None, [str(names[op.module]), where])) or op.name


def _moment(trace: Trace, simulation: Simulation) -> str:
    peak = simulation.peak
    if not trace.ops:
        return "a pass without ops"
    op = trace.ops[peak.op]
    phase = {"forward": "forward", "backward": "the backward", "recompute": "the recomputation"}
    where = f" in {op.module}" if op.module else ""
    return f"{phase[peak.phase]} of {op.name}{where}"


def _alive_table(trace: Trace, simulation: Simulation, plan: Plan) -> Table:
    rows = modules_at_peak(trace, simulation, _dropped(trace, plan))
    return _table(
        ["module and line", "what", "bytes"],
        [[place, what, format_bytes(nbytes)] for place, what, nbytes in rows],
    )


def _name_of(row: ModuleRow) -> str:
    return str(Repeated(row.module, row.modules)) or "-"


def _cells(row: ModuleRow) -> list[str]:
    rate = f"{format_bytes(row.bytes_per_second)}/s" if row.recompute_seconds else "-"
    return [
        _name_of(row),
        format_bytes(row.kept_bytes),
        format_bytes(row.recomputed_bytes),
        f"{row.recompute_seconds:.4f}",
        rate,
    ]


def _table(headings: list[str], rows: list[list[str]]) -> Table:
    more = [[f"and {len(rows) - _ROWS} more"]] if len(rows) > _ROWS else []
    return Table(headings, [*rows[:_ROWS], *more])
