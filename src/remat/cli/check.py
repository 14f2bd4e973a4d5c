"""`remat check`: whether remat holds its promises on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from ..check import DEVICES, run_checks
from .arguments import texts

__all__ = ["add_check"]

_CHECK = """\
Check on this machine what remat promises: random programs, random numbers, autocast, streams, peak
memory and time, each against plain PyTorch. The exit code is 0 if all of it held and 1 if not.
"""
_CHECK_EXAMPLES = """\
examples:
  remat check
  remat check --quick
  remat check --device cuda
"""


def add_check(commands: Any) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "check", help="does remat hold on this machine?", **texts(_CHECK, _CHECK_EXAMPLES)
    )
    add = parser.add_argument
    text = f"{', '.join(DEVICES)}; cuda:1 and the like, too (default: an accelerator, or cpu)"
    add("--device", metavar="DEVICE", help=text)
    add("--quick", action="store_true", help="fewer programs and repetitions")
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    with Console(stderr=True).status("checking") as status:
        report = run_checks(arguments.device, quick=arguments.quick, progress=status.update)
    print(report.table().text())
    print("For a bug report:")
    print(report.line())
    return 0 if report.all_held else 1
