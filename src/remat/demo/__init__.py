"""The demos: a plain pass and one with remat, each in a process of its own.

So the memory of each is measured apart. `simulation` needs NumPy only, `training` PyTorch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..errors import RematError
from ..reports.memory import MeasuredPass
from ..sizes import format_bytes
from ..tables import Table

__all__ = ["DemoResult", "compare", "measure_apart", "report"]

# A fresh process finds its modules where this one does, also if that is no installed remat. Why as
# __main__? To remat the demo is then what it would be to a user: a program, not remat.
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


class DemoResult(NamedTuple):
    """A plain pass and one with remat, compared."""

    passes: tuple[MeasuredPass, MeasuredPass]
    facts: dict[str, Any]  # for JSON
    title: str  # of the picture
    summary: str  # for people
    budget: int | None = None


def compare(
    plain: MeasuredPass, other: MeasuredPass, key: str, rows: list[tuple[str, ...]]
) -> tuple[dict[str, Any], Table]:
    """Return what both took, for JSON and as a table with more rows."""
    memory = other.peak_bytes / max(1, plain.peak_bytes)
    time = other.seconds / plain.seconds
    both = {"plain": plain, key: other}
    facts: dict[str, Any] = {
        name: {"peak_bytes": one.peak_bytes, "seconds": one.seconds} for name, one in both.items()
    }
    peaks = (format_bytes(one.peak_bytes) for one in both.values())
    seconds = (f"{one.seconds:.2f} s" for one in both.values())
    found = [("peak memory", *peaks, f"{memory:.1%}"), ("time", *seconds, f"{time:.2f} x")]
    table = Table(("", plain.name, other.name, "ratio"), found + rows)
    return {**facts, "memory_ratio": memory, "time_ratio": time}, table


# -- a process of its own --------------------------------------------------------------------------


def measure_apart(
    module: str, name: str, settings: dict[str, Any], remedy: str, **environment: str
) -> tuple[MeasuredPass, dict[str, Any]]:
    """Run a module in a fresh process; return what its pass took, and all that it reports."""
    command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), module, json.dumps(settings)]
    process = None
    try:
        # Why? An interrupt between the birth of the child and our having its name would orphan it.
        with _interrupts_wait():
            # Its own group: Ctrl-C comes to us alone, and we end the child in good order.
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                env={**os.environ, **environment},
                process_group=0 if os.name == "posix" else None,
            )
        output, _ = process.communicate()
    finally:
        if process is not None:
            process.terminate()  # does nothing if it has ended
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    if process.returncode:
        raise RematError(
            f"the {name} pass ended with exit code {process.returncode}, see above, or for lack "
            f"of memory; {remedy}"
        )
    found = json.loads(output.splitlines()[-1])
    curve = tuple(found["curve_seconds"]), tuple(found["curve_bytes"])
    return MeasuredPass(name, found["seconds"], found["peak_bytes"], *curve), found


def report(run: Callable[..., dict[str, Any]]) -> None:
    """Run a pass as `measure_apart` asked this process to, and write what it reports."""
    # Being ended runs every `finally`, so that progress bars give the cursor back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        print(json.dumps(run(**json.loads(sys.argv[1]))))
    except RematError as error:
        print(f"remat: {error}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C come a moment later."""
    # Why not block the signal? Another thread, as BLAS has them, would take it in our place.
    came: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *signal_and_frame: came.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came and callable(handler):
            handler(*came[0])
