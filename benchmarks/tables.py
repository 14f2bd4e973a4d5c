"""Writes docs/benchmarks.md and the README's table from the results: `python -m benchmarks.tables`.

A results file that has no section here gets one with the descriptions that the benchmark gave, so
no measured figure is left out.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["benchmarks_page", "readme_with_table", "write_tables"]

Entry = dict[str, Any]  # one result, as benchmarks/results/*.json holds it
Format = Callable[[float], str]
Cells = tuple[str, str, str, str]

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
PAGE, README = _ROOT / "docs" / "benchmarks.md", _ROOT / "README.md"
BEGIN = "<!-- figures: written by python -m benchmarks.tables -->"
END = "<!-- end of figures -->"


# -- numbers ---------------------------------------------------------------------------------------


def percent(value: float) -> str:
    return f"{100 * value:.1f} %" if value < 0.1 else f"{100 * value:.0f} %"


def times(value: float) -> str:
    return f"{value:.3g} x" if value >= 10 else f"{value:.2f} x"


def megabytes(value: float) -> str:
    return f"{value:.2g} MB"


def seconds(value: float) -> str:
    return f"{value:.2g} s"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# -- what the figures mean -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """A result, found by its name and the beginning of its description, and what it means.

    Without a name it stands for all results with such a description; without a meaning, the
    description is shown.
    """

    name: str
    begins: str
    format: Format
    means: str


@dataclass(frozen=True, slots=True)
class Section:
    """One results file."""

    benchmark: str
    title: str
    about: str
    figures: tuple[Figure, ...]


def _numpy_scopes(name: str, title: str) -> tuple[Figure, ...]:
    return (
        Figure(f"{name}: memory", "", percent, f"{title}: reduction of a plain gradient's peak"),
        Figure(f"{name}: other gradients", "", number, "gradients with other bits"),
        Figure(f"{name}: time", "", times, "time, plain gradient = 1"),
        Figure(f"{name}: everything held", "", times, "`use_recomputation=False`: time, plain = 1"),
        Figure(
            f"{name}: budget", "", percent, "`memory_budget` of half the plain peak: peak, of it"
        ),
    )


def _network(name: str, title: str) -> tuple[Figure, ...]:
    return (
        Figure(f"{name}: time against plain", "", times, f"{title}: time of a pass, plain = 1"),
        Figure(f"{name}: time", "", times, f"{title}: time, `torch.utils.checkpoint` = 1"),
        Figure(f"{name}: peak", "", times, f"{title}: peak, `torch.utils.checkpoint` = 1"),
        Figure(
            f"{name}: activation memory",
            "",
            percent,
            f"{title}: reduction of activation memory (peak without the parameters' gradients)",
        ),
        Figure(
            f"{name}: memory_saved()",
            "",
            percent,
            "error of `CheckpointProfiler.memory_saved()` against the measured difference",
        ),
    )


def _loop(name: str, title: str) -> tuple[Figure, ...]:
    return (
        Figure(f"{name}: peak against plain", "", percent, f"{title}: peak, of a plain loop's"),
        Figure(f"{name}: time against plain", "", times, "time, plain loop = 1"),
        Figure(
            f"{name}: peak against torch.utils.checkpoint",
            "",
            times,
            "peak, `torch.utils.checkpoint` over sqrt(n) segments = 1",
        ),
        Figure(
            f"{name}: time against torch.utils.checkpoint",
            "",
            times,
            "time of the same, `torch.utils.checkpoint` over sqrt(n) segments = 1",
        ),
    )


_REVOLVE, _MIXED, _LONG_MIXED = "revolve (1000000, 30)", "mixed (1000, 31)", "mixed (10000, 100)"
_TIERS = "two tiers (1000, 31 + 31)"
SECTIONS = (
    Section(
        "torch_budget",
        "Memory budgets on PyTorch",
        "`remat.auto_checkpoint` with a budget that is a share of the plain peak, next to plain\n"
        "autograd and to the checkpointing that comes with PyTorch. Gradients are equal to those\n"
        "of plain autograd. Peaks leave out the parameters' own `.grad`; times are medians.",
        (
            Figure(
                "",
                "peak against the budget from",
                percent,
                "peak from the second pass on, of the budget",
            ),
            Figure(
                "", "peak against the budget in", percent, "peak of the first pass, of the budget"
            ),
            Figure("", "time of a pass against plain", times, "time of a pass, plain = 1"),
        ),
    ),
    Section(
        "plans",
        "Plans for recorded passes",
        "`remat.plans.plan_trace` on passes of five networks that were recorded once: seconds of\n"
        "recomputation, of forward and backward together, as simulated. All but the planning time\n"
        "is deterministic. The optimum over stages is an integer programme, where it is solved in\n"
        "a minute; the limit is 1.05 of it. Peers: `torch.utils.checkpoint` around every block,\n"
        "`checkpoint_sequential`, selective checkpointing that saves matmuls, and a knapsack that\n"
        "keeps a share of the saved bytes; each at its own peak.",
        (
            Figure("", "recomputation", percent, ""),
            Figure("", "seconds to plan", seconds, ""),
        ),
    ),
    Section(
        "torch_regions",
        "Segments on PyTorch",
        "`remat.checkpoint` around every block of a network, next to plain autograd and to\n"
        "`torch.utils.checkpoint(use_reentrant=False)` around the same blocks.",
        (
            Figure(
                "region of 2 tiny ops (8 x 8)",
                "",
                times,
                "fixed cost of a segment: time that remat adds to 2 tiny ops, of the time that "
                "`torch.utils.checkpoint` adds",
            ),
            Figure(
                "region of 200 tiny ops (8 x 8)",
                "",
                times,
                "cost per op: time of a segment of 200 tiny ops, `torch.utils.checkpoint` = 1",
            ),
            *_network("gpt", "GPT of 16 blocks"),
            *_network("resnet", "ResNet of 31 convolutions with BatchNorm"),
        ),
    ),
    Section(
        "torch_loops",
        "Loops on PyTorch",
        "`remat.checkpointed_loop` over 1000 steps, next to a plain loop and to\n"
        "`torch.utils.checkpoint` over about sqrt(1000) segments of the same loop. The RNN is\n"
        "tanh(x @ W + b) on 64 x 256; the LSTM is a cell in torch ops on 64 x 256 (narrow: 64 x "
        "128).",
        (
            *_loop("rnn", "RNN"),
            Figure(
                "rnn, on disk: peak against plain",
                "",
                percent,
                'RNN with `store="disk"`: peak, of a plain loop\'s',
            ),
            Figure("rnn, on disk: time against plain", "", times, "time, plain loop = 1"),
            *_loop("lstm", "LSTM"),
            *_loop("narrow lstm", "narrow LSTM"),
            Figure(
                "runner: time against the sum of its steps",
                "",
                times,
                "overhead of the loop itself: time of a whole pass, sum of its steps = 1",
            ),
            Figure(
                "1,000,000 steps of 64 floats with 100 checkpoints",
                "",
                megabytes,
                "peak memory of a million steps",
            ),
            Figure(
                "disk: 2,000 steps of 4 MB, 10 slots in memory",
                "",
                times,
                "time with most checkpoints on disk, all of them in memory = 1",
            ),
        ),
    ),
    Section(
        "numpy_loop",
        "Loops on NumPy",
        "`remat.checkpointed_loop` over 1000 steps of tanh(x @ W + b) on 64 x 256, next to HIPS\n"
        "autograd on the plain loop.",
        (
            Figure("memory", "", percent, "100 checkpoints: peak, of plain autograd's"),
            Figure("time", "", times, "time, plain autograd = 1"),
            Figure("budget of 4 MB", "", percent, '`memory_budget="4MB"`: peak, of the budget'),
            Figure("budget of 16 MB", "", percent, '`memory_budget="16MB"`: peak, of the budget'),
            Figure("budget of 64 MB", "", percent, '`memory_budget="64MB"`: peak, of the budget'),
            Figure("growth", "", number, "bytes for each further step, from 10,000 to 100,000"),
            Figure("raw speed", "", times, "forward only: time, a Python loop by hand = 1"),
        ),
    ),
    Section(
        "numpy_scopes",
        "Scopes and budgets on NumPy",
        "`remat.CheckpointScope` around every step or layer of plain NumPy functions, next to\n"
        "`remat.grad` without scopes; and a memory budget in their place.",
        (
            *_numpy_scopes("wave", "50 steps of a wave on 512 x 512"),
            *_numpy_scopes("attention", "4 layers of attention"),
            *_numpy_scopes("residual", "4 residual blocks"),
        ),
    ),
    Section(
        "source_loops",
        "Plain Python loops",
        "`remat.checkpoint_loops` on a function with a loop, next to `checkpointed_loop` by hand.",
        (
            Figure("memory", "", percent, "1000 steps on NumPy, 31 checkpoints: peak, of `grad`'s"),
            Figure("memory, by hand", "", times, "the same: peak, `checkpointed_loop` = 1"),
            Figure("time", "", times, "1000 steps on NumPy: time, `checkpointed_loop` = 1"),
            Figure("time, numbered", "", times, "the same, with a step that reads its number"),
            Figure(
                "time, torch", "", times, "1000 steps on PyTorch: time, `checkpointed_loop` = 1"
            ),
            Figure(
                "transform", "", number, "ms to transform a function of 48 lines with ten loops"
            ),
        ),
    ),
    Section(
        "schedules",
        "Planning of loops",
        "`remat.schedules` next to the package `checkpoint-schedules` (with numba, where that\n"
        "helps it) on the same problems.",
        (
            Figure(_REVOLVE, "the whole", times, "Revolve, all actions: how many times faster"),
            Figure(_REVOLVE, "no more", number, "evaluations (theirs: the limit)"),
            Figure(_REVOLVE, "MB", megabytes, "peak memory of the whole schedule"),
            Figure(_MIXED, "planned", times, "states and tapes of one size: how many times faster"),
            Figure(
                _MIXED,
                "how many",
                times,
                "unequal sizes (theirs: equal): how many times faster",
            ),
            Figure(_MIXED, "no more", number, "evaluations (theirs: the limit)"),
            Figure(_LONG_MIXED, "seconds to plan, tapes", seconds, "planning time, equal sizes"),
            Figure(_LONG_MIXED, "seconds to plan, unequal", seconds, "planning time, unequal"),
            Figure(_TIERS, "planned", times, "memory and disk: how many times faster"),
            Figure(_TIERS, "no more", number, "cost in forward steps (theirs: the limit)"),
        ),
    ),
    Section(
        "importing",
        "Import",
        "In a fresh process.",
        (Figure("import", "", seconds, "`import remat` beyond numpy and autograd"),),
    ),
)

_INTRODUCTION = """\
# Benchmarks

<!-- Written by `python -m benchmarks.tables` from benchmarks/results/. Do not edit. -->

`make bench` measures every figure again and writes this page. The figures were measured on two
shared CPU cores without an accelerator, so read the ratios, not the seconds.

- **Peak memory** is the operating system's high-water mark of a fresh process, minus its level
  before the pass.
- **Time** is the best of many rounds, with all sides interleaved in one process and one thread. For
  the two networks it is the sum of the best time of each block, forward and backward.
- **Limit** is what the benchmark demands: an upper bound of a cost, a lower bound of a gain.
  `make bench` fails if it is not met. Figures without a limit are for information.
"""


# -- pages -----------------------------------------------------------------------------------------


def benchmarks_page() -> str:
    """Return the text of docs/benchmarks.md."""
    known = {section.benchmark for section in SECTIONS}
    others = sorted(path.stem for path in _RESULTS.glob("*.json") if path.stem not in known)
    measured = [section for section in SECTIONS if _path(section.benchmark).exists()]
    sections = [*measured, *(Section(name, _title(name), _docstring(name), ()) for name in others)]
    return _INTRODUCTION + "".join(f"\n{_section(section)}" for section in sections)


def _section(section: Section) -> str:
    data = _load(section.benchmark)
    rows = [_row(entry, section) for entry in data["results"]]
    measured = [f"{name} {text}" for name, text in data.items() if name not in ("date", "results")]
    return "\n".join(
        [
            f"## {section.title}",
            "",
            section.about,
            "",
            f"Measured on {data['date']} with {', '.join(measured)}.",
            "",
            "| benchmark | figure | value | limit |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _row(entry: Entry, section: Section) -> str:
    figure = _figure(entry, section)
    form = number if figure is None else figure.format
    means = _with_settings(figure, entry) if figure and figure.means else entry["figure"]
    limit = "" if entry["limit"] is None else form(entry["limit"])
    missed = "" if entry["met"] else " (missed)"
    return f"| {entry['name']} | {means} | {form(entry['value'])}{missed} | {limit} |"


def _with_settings(figure: Figure, entry: Entry) -> str:
    """Return what a figure means, and the settings that a description begins with."""
    text: str = entry["figure"]
    return (
        f"{figure.means} ({text})" if re.match(r"\d+ checkpoints|room for", text) else figure.means
    )


def _figure(entry: Entry, section: Section) -> Figure | None:
    found = (
        figure
        for figure in section.figures
        if figure.name in ("", entry["name"]) and entry["figure"].startswith(figure.begins)
    )
    return next(found, None)


def _docstring(benchmark: str) -> str:
    """Return the first paragraph of a benchmark's docstring, without importing it."""
    path = _ROOT / "benchmarks" / f"{benchmark}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else None
    return (text or "").split("\n\n")[0].replace("\n", " ")


def _title(benchmark: str) -> str:
    return benchmark.replace("_", " ").capitalize()


def _load(benchmark: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_path(benchmark).read_text())
    return data


def _path(benchmark: str) -> Path:
    return _RESULTS / f"{benchmark}.json"


# -- the README ------------------------------------------------------------------------------------


def readme_with_table(readme: str) -> str:
    """Return the README with its table of figures written anew."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"README.md has no lines {BEGIN!r} and {END!r} to write between")
    return f"{before}{BEGIN}\n\n{_short_table()}\n{END}{after}"


def _short_table() -> str:
    heading = "| | peak, plain = 100 % | time, plain = 1 | against `torch.utils.checkpoint` |"
    rows = [f"| {' | '.join(cells)} |" for cells in _short_rows()]
    return "\n".join([heading, "| --- | --- | --- | --- |", *rows, ""])


def _short_rows() -> Iterator[Cells]:
    if _path("torch_budget").exists():
        yield from (_budget_row(share) for share in (0.5, 0.2))
    yield from _segment_rows()
    yield from _loop_rows()
    yield (
        "NumPy, 1000 steps of tanh(x @ W + b), 100 checkpoints",
        percent(_value("numpy_loop", "memory")),
        times(_value("numpy_loop", "time")),
        "",
    )


def _budget_row(share: float) -> Cells:
    name = f"gpt at {share:.0%} of its plain peak"
    peak = _value("torch_budget", name, "peak against the budget from")
    time = _value("torch_budget", name, "time of a pass against plain")
    title = f"GPT, 24 blocks, `auto_checkpoint(model, memory_budget={share})`"
    return title, percent(share * peak), times(time), ""


def _segment_rows() -> Iterator[Cells]:
    for name, title in (("gpt", "GPT, 16 blocks"), ("resnet", "ResNet, 31 convolutions")):
        peak = _result("torch_regions", f"{name}: peak")
        share = percent(peak["details"]["ours_MB"] / peak["details"]["plain_MB"])
        time = times(_value("torch_regions", f"{name}: time against plain"))
        theirs = _result("torch_regions", f"{name}: time")
        yield (
            f"{title}, `checkpoint` around each block",
            share,
            time,
            f"peak {times(peak['value'])}, time {times(theirs['value'])}",
        )
    tiny = times(_value("torch_regions", "region of 2 tiny ops (8 x 8)"))
    yield "Fixed cost of a segment (2 tiny ops)", "", "", f"added time {tiny}"


def _loop_rows() -> Iterator[Cells]:
    for name, title in (("rnn", "RNN"), ("lstm", "LSTM")):
        result = _result("torch_loops", f"{name}: peak against plain")
        count = result["figure"].split(",")[0]
        theirs_peak = _result("torch_loops", f"{name}: peak against torch.utils.checkpoint")
        theirs_time = times(_value("torch_loops", f"{name}: time against torch.utils.checkpoint"))
        yield (
            f"{title}, 1000 steps in `checkpointed_loop`, {count}",
            percent(result["value"]),
            times(_value("torch_loops", f"{name}: time against plain")),
            f"with {theirs_peak['figure']}: peak {times(theirs_peak['value'])}, time {theirs_time}",
        )
    yield (
        'The same RNN with `store="disk"`',
        percent(_value("torch_loops", "rnn, on disk: peak against plain")),
        times(_value("torch_loops", "rnn, on disk: time against plain")),
        "",
    )
    million = _value("torch_loops", "1,000,000 steps of 64 floats with 100 checkpoints")
    yield "A million steps of 64 floats, 100 checkpoints", f"{megabytes(million)} in all", "", ""


def _result(benchmark: str, name: str, begins: str = "") -> Entry:
    for entry in _load(benchmark)["results"]:
        if entry["name"] == name and entry["figure"].startswith(begins):
            found: Entry = entry
            return found
    raise KeyError(
        f"benchmarks/results/{benchmark}.json has no figure {name!r}, which the README shows"
    )


def _value(benchmark: str, name: str, begins: str = "") -> float:
    return float(_result(benchmark, name, begins)["value"])


def write_tables() -> None:
    """Write docs/benchmarks.md and the table in the README."""
    PAGE.write_text(benchmarks_page())
    README.write_text(readme_with_table(README.read_text()))


if __name__ == "__main__":
    write_tables()
