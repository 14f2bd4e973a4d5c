"""`remat demo`: a pass without checkpointing beside one with it."""

from __future__ import annotations

import argparse
from typing import Any

from ..demo import DemoResult
from ..demo.simulation import run_simulation_demo
from ..demo.training import MODELS, run_training_demo
from ..reports.plots import can_plot, check_plot_path, plot_memory
from .arguments import at_least, default, print_json, size_or_fraction, texts

__all__ = ["add_demo"]

_DEMO = """\
Without --model: differentiate a long NumPy simulation twice: with an ordinary Python loop, and with
remat.checkpointed_loop. Each runs in its own process; then memory, time and gradients are
compared, and a picture shows memory over time.

With --model (needs PyTorch): train a small network for a few steps, plain and with
remat.auto_checkpoint under a memory budget, and compare memory, time and losses.
"""
_DEMO_EXAMPLES = """\
examples:
  remat demo
  remat demo --steps 3000 --size 64 --checkpoints 20 --output memory.png
  remat demo --json --no-plot
  remat demo --model gpt --budget 0.3
"""


def add_demo(commands: Any) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "demo", help="see it work: memory, time and a picture", **texts(_DEMO, _DEMO_EXAMPLES)
    )
    add, count, cells = parser.add_argument, at_least(1), at_least(2)
    add("--steps", type=count, default=1500, metavar="N", help=default("length of the loop"))
    text = default("cells along a side of the grid")
    add("--size", type=cells, default=96, metavar="N", help=text)
    text = "room in memory, in states (default: sqrt(steps))"
    add("--checkpoints", type=at_least(0), metavar="K", help=text)
    add("--model", choices=MODELS, help="train this network under a budget instead")
    text = "with --model: the share of the plain peak (default: 0.4)"
    add("--budget", type=size_or_fraction, metavar="SHARE", help=text)
    text = default("picture, .png, .svg or .pdf")
    add("--output", default="remat-demo.png", metavar="FILE", help=text)
    add("--no-plot", action="store_true", help="draw no picture")
    add("--json", action="store_true", help="print only JSON on stdout; progress is on stderr")
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> None:
    target = None if arguments.no_plot else check_plot_path(arguments.output)
    result = _run(arguments)
    picture = None
    if target is not None and can_plot():
        picture = plot_memory(result.passes, target, title=result.title, budget=result.budget)
    if arguments.json:
        print_json({**result.facts, "plot": str(picture) if picture else None})
        return
    print(result.summary)
    if picture:
        print(f"Memory over time: {picture}")
    elif target is not None:
        print("For a picture of memory over time: pip install matplotlib")


def _run(arguments: argparse.Namespace) -> DemoResult:
    budget = arguments.budget
    if arguments.model is None:
        if budget is not None:
            raise ValueError(f"--budget {budget} needs --model: the network to train")
        return run_simulation_demo(arguments.steps, arguments.size, arguments.checkpoints)
    if not isinstance(budget, float | None):
        raise ValueError(f"--budget is a share of the plain peak such as 0.4, got {budget}")
    return run_training_demo(arguments.model, budget or 0.4)
