"""`remat demo`: a pass without checkpointing beside one with it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ..demo import DemoResult, DemoSize, run_demo
from ..reports.plots import can_plot, check_plot_path, plot_memory
from ..reports.tables import comparison_table, training_grid
from ..sizes import counted
from ..training_demo import MODELS, TrainingDemo, run_training_demo
from .arguments import at_least, default, size_or_fraction, texts
from .output import print_json

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
        "demo",
        help="see it work: memory, time and a picture",
        **texts(_DEMO, _DEMO_EXAMPLES),
    )
    _add_simulation_options(parser)
    _add_training_options(parser)
    add = parser.add_argument
    add(
        "--output",
        default="remat-demo.png",
        metavar="FILE",
        help=default("picture, .png, .svg or .pdf"),
    )
    add("--no-plot", action="store_true", help="draw no picture")
    add("--json", action="store_true", help="print only JSON on stdout; progress is on stderr")
    parser.set_defaults(run=_demo)


def _add_simulation_options(parser: argparse.ArgumentParser) -> None:
    usual = DemoSize()
    add = parser.add_argument
    add(
        "--steps",
        type=at_least(1),
        default=usual.steps,
        metavar="N",
        help=default("length of the loop"),
    )
    add(
        "--size",
        type=at_least(2),
        default=usual.size,
        metavar="N",
        help=default("cells along a side of the grid"),
    )
    add(
        "--checkpoints",
        type=at_least(0),
        metavar="K",
        help="room in memory, in states (default: sqrt(steps))",
    )


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=MODELS, help="train this network under a budget instead")
    add(
        "--budget",
        type=size_or_fraction,
        metavar="SHARE",
        help="with --model: the share of the plain peak (default: 0.4)",
    )


def _demo(arguments: argparse.Namespace) -> None:
    wanted = not arguments.no_plot
    target = check_plot_path(arguments.output) if wanted else None
    if arguments.model is not None:
        _train(arguments, target)
        return
    if arguments.budget is not None:
        raise ValueError(f"--budget {arguments.budget} needs --model: the network to train")
    size = DemoSize(arguments.steps, arguments.size, arguments.checkpoints)
    result = run_demo(size)
    picture = None
    if target is not None and can_plot():
        grid = f"{size.size} x {size.size}"
        title = f"The gradient of {counted(size.steps, 'step')} of a {grid} simulation"
        picture = plot_memory([result.plain, result.checkpointed], target, title=title)
    if arguments.json:
        print_json({**result.as_dict(), "plot": str(picture) if picture else None})
        return
    _show_demo(result)
    if picture:
        print(f"Memory over time: {picture}")
    elif wanted:
        print("For a picture of memory over time: pip install matplotlib")


def _show_demo(result: DemoResult) -> None:
    relative = result.gradient_difference / (result.gradient_largest or 1.0)
    Console().print(comparison_table(result.plain, result.checkpointed, relative))
    exact = result.gradient_difference == 0
    equal = "the same gradient, bit for bit" if exact else "the same gradient, up to rounding"
    ratio = result.checkpointed.peak_bytes / max(1, result.plain.peak_bytes)
    print(f"{counted(result.size.steps, 'step')}: {equal}, in {ratio:.1%} of the memory.")


def _train(arguments: argparse.Namespace, target: Path | None) -> None:
    """Train a network plain and under a budget."""
    budget = 0.4 if arguments.budget is None else arguments.budget
    if not isinstance(budget, float):
        raise ValueError(f"--budget is a share of the plain peak such as 0.4, got {budget}")
    result = run_training_demo(TrainingDemo(arguments.model, budget))
    picture = None
    if target is not None and can_plot():
        passes = [result.plain, result.budgeted]
        title = f"Training {arguments.model}: memory over a few steps"
        picture = plot_memory(passes, target, title=title, budget=result.budget_bytes)
    if arguments.json:
        print_json({**result.as_dict(), "plot": str(picture) if picture else None})
        return
    print(training_grid(result.plain, result.budgeted, result.budget_bytes).text(), end="")
    same = "the same losses, bit for bit" if not result.loss_difference else "other losses"
    print(f"{arguments.model}: {same} (largest difference {result.loss_difference:g}).")
    print("The peak is that of the fourth step and later ones: the first three record and plan.")
    if picture:
        print(f"Memory over time: {picture}")
