"""Type checkers see through what remat wraps: a small user program, checked by two of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")
EXPECTED = [
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
    if "# type: ignore[" in line
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], check=False, capture_output=True, text=True, cwd=ROOT
    )


def test_mypy() -> None:
    """Strict: an error that is expected and missing is an error, too."""
    found = run("mypy", "--strict", str(PROGRAM))  # with what `make types` has found out
    assert found.returncode == 0, found.stdout


def test_pyright() -> None:
    options = ("--pythonpath", sys.executable, "--level", "error", "--outputjson")
    found = run("basedpyright", *options, str(PROGRAM))
    errors = json.loads(found.stdout)["generalDiagnostics"]
    assert [error["range"]["start"]["line"] + 1 for error in errors] == EXPECTED, found.stdout
