"""How things are measured here, and how results are kept.

Time: all sides interleaved in one process, the best of many rounds (and of several processes, if it
matters where tensors lie in memory; and of each stretch of a pass, if a pass takes seconds); only
ratios are worth telling.
Memory: from outside, as the operating system's high-water mark of a fresh process.

    # benchmarks/some_loop.py
    def plain(steps: int) -> Report:
        gradient = prepare(steps)  # imports, inputs and a warm-up on a tiny case: not measured
        run = measured(gradient)
        return run.report(checksum=float(run.value.sum()))

    in_fresh_process("benchmarks.some_loop:plain", steps=1000)["peak_bytes"]
    interleaved({"plain": prepare(1000), "ours": prepare_ours(1000)}, rounds=20)["plain"]
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

__all__ = [
    "ONE_THREAD",
    "Measured",
    "Report",
    "Result",
    "best_of_processes",
    "in_fresh_process",
    "interleaved",
    "interleaved_stretches",
    "lowest_of_processes",
    "measured",
    "show",
    "versions",
    "write",
]

T = TypeVar("T")
Report = dict[str, Any]  # what a fresh process sends back as JSON

# Same threads on all sides. It counts only if it is set before NumPy is imported.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = Path(__file__).resolve().parent / "results"


# --- time ---------------------------------------------------------------------------------------


def interleaved(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    *,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the best seconds of each side.

    Every round runs every side once, each time another one first, so that a slow minute of the
    machine hits them all. `before` runs ahead of every call, untimed: to clear caches, say.
    """
    best = dict.fromkeys(sides, float("inf"))
    for name in _in_turn(sides, rounds):
        before()
        gc.collect()
        best[name] = min(best[name], _seconds(sides[name]))
    return best


def interleaved_stretches(
    sides: dict[str, Callable[[], list[float]]], rounds: int
) -> dict[str, list[float]]:
    """Return the best seconds of each stretch of each side, and last those of its best run.

    A side returns the times (of `time.perf_counter`) at which one stretch ended and the next began.
    Next to neighbours a long run is never undisturbed, but each of its stretches is, now and then:
    the sum of their best is what the whole takes.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for name in _in_turn(sides, rounds):
        gc.collect()
        start = time.perf_counter()
        ends = [*sides[name](), time.perf_counter()]
        starts = [start, *ends[:-1]]
        stretches = [end - begin for begin, end in zip(starts, ends, strict=True)]
        found[name].append([*stretches, ends[-1] - start])
    return {name: [min(times) for times in zip(*runs, strict=True)] for name, runs in found.items()}


def _in_turn(sides: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield every side once a round, each time another one first, and backwards by turns.

    What ran before decides which memory is warm and which was given back to the system: a side
    must not always follow the same other one.
    """
    order = deque(sides)
    for number in range(rounds):
        if number % len(order) == 0:
            order.reverse()
        yield from tuple(order)
        order.rotate(-1)


def best_of_processes(function_path: str, processes: int, **kwargs: object) -> dict[str, Any]:
    """Return the best seconds of each side, or of each of its stretches, over fresh processes.

    The function runs all sides interleaved and returns the seconds. Where tensors lie in memory is
    decided once for a process, and makes a difference of up to a tenth, to either side.
    """
    found = [in_fresh_process(function_path, **kwargs) for _ in range(processes)]
    return {side: _best([seconds[side] for seconds in found]) for side in found[0]}


def _best(found: list[Any]) -> Any:
    if isinstance(found[0], list):
        return [min(times) for times in zip(*found, strict=True)]
    return min(found)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# --- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured(Generic[T]):
    """One pass, measured from outside."""

    value: T
    peak_bytes: int  # the high-water mark during the pass, less the level before it
    seconds: float  # of this one pass: for information, times are compared by `interleaved`
    mark_was_reset: bool  # if not, what came before may hide behind the mark: an upper bound

    def report(self, **more: object) -> Report:
        return {
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "mark_was_reset": self.mark_was_reset,
            **more,
        }


def measured(run: Callable[[], T]) -> Measured[T]:
    """Run `run` once; to be called in a fresh process, when everything is prepared.

    The kernel counts pages in batches: the peak is exact to a few hundred kilobytes.
    """
    gc.collect()
    _return_free_memory()
    reset = _reset_high_water_mark()
    before = _status("VmRSS")
    start = time.perf_counter()
    value = run()
    seconds = time.perf_counter() - start
    return Measured(value, max(0, _status("VmHWM") - before), seconds, reset)


def lowest_of_processes(
    function_path: str, processes: int, environment: Mapping[str, str], **kwargs: object
) -> Report:
    """Return the report with the lowest peak of several fresh processes.

    Small objects lie in other pages of the heap in each of them, and the kernel counts pages in
    batches: single peaks scatter by a few hundred kilobytes.
    """
    found = [in_fresh_process(function_path, environment, **kwargs) for _ in range(processes)]
    return min(found, key=lambda report: report["peak_bytes"])


def in_fresh_process(
    function_path: str, environment: Mapping[str, str] = MappingProxyType({}), **kwargs: object
) -> Report:
    """Call "benchmarks.module:function" with `kwargs` in a fresh process; return its report."""
    code = "from benchmarks.measure import _answer; _answer()"
    done = subprocess.run(
        [sys.executable, "-c", code, function_path, json.dumps(kwargs)],
        cwd=_ROOT,
        env={**os.environ, **ONE_THREAD, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


def _answer() -> None:
    """Be the fresh process: the report is the last line of what is printed."""
    function_path, kwargs = sys.argv[1:]
    module, _, name = function_path.partition(":")
    report = getattr(import_module(module), name)(**json.loads(kwargs))
    print("\n" + json.dumps(report))


def _status(entry: str) -> int:
    """Return an entry of the process's status, such as VmRSS, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {entry}: peak memory is measured on Linux only")


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): VmHWM starts again from VmRSS
    except OSError:
        return False
    return True


def _return_free_memory() -> None:
    # What the preparation freed but the allocator kept would be reused unseen by the pass.
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """A figure that is demanded, and what was measured; without a limit it is information."""

    name: str
    figure: str
    value: float
    limit: float | None
    met: bool
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def at_least(
        cls, name: str, figure: str, value: float, limit: float, **details: object
    ) -> Result:
        return cls(name, figure, value, limit, value >= limit, details)

    @classmethod
    def at_most(
        cls, name: str, figure: str, value: float, limit: float, **details: object
    ) -> Result:
        return cls(name, figure, value, limit, value <= limit, details)

    @classmethod
    def information(cls, name: str, figure: str, value: float, **details: object) -> Result:
        return cls(name, figure, value, None, True, details)


def versions(*packages: str) -> dict[str, str | None]:
    """Return the version of each package, None if it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def write(benchmark: str, results: list[Result], *, packages: tuple[str, ...] = ()) -> None:
    """Keep the results in benchmarks/results/<benchmark>.json, with versions and the date."""
    kept = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        **versions("numpy", *packages),
        "results": [_rounded(asdict(result)) for result in results],
    }
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"{benchmark}.json").write_text(json.dumps(kept, indent=2) + "\n")


def _rounded(value: Any) -> Any:
    """Drop the digits that no measurement here can tell apart."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def show(benchmark: str, results: list[Result]) -> None:
    """Print a table of the results."""
    table = Table(title=f"benchmark: {benchmark}", show_lines=True)
    for heading in ("name", "figure", "value", "limit", "met", "details"):
        table.add_column(heading, justify="right" if heading in ("value", "limit") else "left")
    for result in results:
        table.add_row(
            result.name,
            result.figure,
            _number(result.value),
            "" if result.limit is None else _number(result.limit),
            "" if result.limit is None else "[green]yes" if result.met else "[red]NO",
            "\n".join(f"{name}: {_number(part)}" for name, part in result.details.items()),
        )
    # Why a width? Written to a file, a table gets 80 columns, too narrow for these.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _number(value: object) -> str:
    if isinstance(value, dict):
        return "".join(f"\n  {name}: {_number(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
