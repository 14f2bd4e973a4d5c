"""Run all benchmarks, or the named ones: `python -m benchmarks [names...]`."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from .measure import ONE_THREAD, Result, show, write

_NOT_BENCHMARKS = {"__main__", "measure", "networks"}


def main(arguments: list[str] | None = None) -> int:
    names = _chosen(arguments)
    os.environ.update(ONE_THREAD)  # before the first benchmark imports NumPy
    missed: list[str] = []
    for name in names:
        results = _run(name)
        missed += [f"{name}: {r.name}: {r.figure}, got {r.value:.4g}" for r in results if not r.met]
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


def _chosen(arguments: list[str] | None) -> list[str]:
    known = sorted(
        module.name
        for module in pkgutil.iter_modules([str(Path(__file__).parent)])
        if module.name not in _NOT_BENCHMARKS
    )
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of: {', '.join(known)} (default: all)")
    names: list[str] = parser.parse_args(arguments).names
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}")
    return names or known


def _run(name: str) -> list[Result]:
    module = import_module(f"benchmarks.{name}")
    run: Callable[[], list[Result]] = module.run
    results = run()
    write(name, results, packages=getattr(module, "PEERS", ()))
    show(name, results)
    return results


if __name__ == "__main__":
    sys.exit(main())
