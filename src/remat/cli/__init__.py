"""The command line: arguments -> public API -> text. One file for each command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import remat

from .arguments import in_options, texts
from .check import add_check
from .demo import add_demo
from .frontier import add_frontier
from .plan import add_plan

__all__ = ["main"]

_DESCRIPTION = "Exact gradients inside a memory budget."
_EXAMPLES = """\
examples:
  remat demo                                  see it work: about 20 seconds, and a picture
  remat plan --steps 1000 --checkpoints 31    which schedule, and what it costs
  remat plan --steps 1000 --memory 64MB --state-bytes 1MB --tape-bytes 3MB --plot plan.png
  remat demo --model gpt --budget 0.4         train a network in 40 % of its memory
  remat frontier my_project:make_model        memory against time of your own model
  remat check                                 does it hold on this machine?

"remat COMMAND --help" describes a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 2 for bad input, 130 for Ctrl-C.

    1 says that a check did not hold, or that the reader of a pipe is gone.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # lines of tables, where there is no UTF-8
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.command is None:
            parser.print_help(sys.stderr)
            return 2
        code: int | None = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        # The reader has closed the pipe. Python must not fail once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (remat.RematError, ValueError, TypeError, OSError) as error:
        return _complain(in_options(str(error)), 2)
    return code or 0


def _complain(message: str, code: int) -> int:
    print(f"remat: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("remat", **texts(_DESCRIPTION, _EXAMPLES))
    parser.add_argument(
        "--version",
        action="version",
        version=f"remat {remat.__version__}",
        help="show the version and exit",
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for add in (add_demo, add_plan, add_frontier, add_check):
        add(commands)
    return parser
