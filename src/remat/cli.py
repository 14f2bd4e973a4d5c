"""The command line: arguments -> public API -> text."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

import remat

from .check import DEVICES, run_checks
from .demo import DemoResult, DemoSize, run_demo
from .reports.plots import can_plot, check_plot_path, plot_memory, plot_schedule
from .reports.tables import comparison_table, plan_table, training_grid
from .schedules import Disk, LoopPlan, Option
from .sizes import counted, parse_budget, parse_bytes
from .training_demo import MODELS, TrainingDemo, run_training_demo

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

"remat COMMAND --help" tells more about a command.
"""
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
_FRONTIER = """\
Peak memory against time for every budget, from one recorded pass of a model of your own.

TARGET is module:function. The function takes no argument and returns the model and its inputs:
(model, x), (model, (x, y)), or (model, {"input_ids": x}). The module is looked for in the current
folder, too. The model's result is differentiated as a sum.
"""
_FRONTIER_EXAMPLES = """\
examples:
  remat frontier my_project.models:make_model
  remat frontier my_project.models:make_model --plot frontier.png
  remat frontier my_project.models:make_model --json
"""
_PLAN = """\
Compare the schedules for a loop: how often a step is evaluated, and what is held at most.

Give the room as a number of states (--checkpoints), or as the peak of the whole pass in bytes
(--memory, with --state-bytes). Sizes are bytes, or text such as 64MB or 2GiB. --memory 0.1 is a
tenth of what the pass holds without checkpointing.
"""
_PLAN_EXAMPLES = """\
examples:
  remat plan --steps 1000 --checkpoints 31
  remat plan --steps 1000 --memory 64MB --state-bytes 1MB --tape-bytes 3MB
  remat plan --steps 1000 --memory 0.1 --state-bytes 1MB --tape-bytes 3MB
  remat plan --steps 1000 --checkpoints 10 --disk 20 --disk-write 2 --disk-read 2
  remat plan --steps 100 --checkpoints 5 --plot schedule.png
  remat plan --steps 1000 --checkpoints 31 --json
"""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 2 for bad input, 130 for Ctrl-C.

    1 says that a check did not hold, or that nobody reads what is printed.
    """
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
        # Whoever read us has seen enough. Python must not fail once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (remat.RematError, ValueError, TypeError, OSError) as error:
        return _complain(_in_options(str(error)), 2)
    return code or 0


_OPTIONS = {
    "memory_bytes": "--memory",
    "state_bytes": "--state-bytes",
    "tape_bytes": "--tape-bytes",
    "num_checkpoints": "--checkpoints",
    "disk_slots": "--disk",
    "write_cost": "--disk-write",
    "read_cost": "--disk-read",
}


def _in_options(text: str) -> str:
    """Name options of the command line where the library names its arguments."""
    return re.sub(rf"\b({'|'.join(_OPTIONS)})\b", lambda found: _OPTIONS[found[0]], text)


def _complain(message: str, code: int) -> int:
    print(f"remat: {message}", file=sys.stderr)
    return code


# -- arguments ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("remat", **_texts(_DESCRIPTION, _EXAMPLES))
    parser.add_argument(
        "--version",
        action="version",
        version=f"remat {remat.__version__}",
        help="show the version and exit",
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="see it work: memory, time and a picture",
        **_texts(_DEMO, _DEMO_EXAMPLES),
    )
    _add_demo_options(demo)
    plan = commands.add_parser(
        "plan",
        help="compare the schedules for a loop",
        **_texts(_PLAN, _PLAN_EXAMPLES),
    )
    _add_plan_options(plan)
    frontier = commands.add_parser(
        "frontier",
        help="memory against time of your own model",
        **_texts(_FRONTIER, _FRONTIER_EXAMPLES),
    )
    _add_frontier_options(frontier)
    check = commands.add_parser(
        "check",
        help="does remat hold on this machine?",
        **_texts(_CHECK, _CHECK_EXAMPLES),
    )
    _add_check_options(check)
    return parser


def _texts(description: str, examples: str) -> dict[str, Any]:
    return {
        "description": description,
        "epilog": examples,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,  # an option added later must not change what a script means
    }


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    usual = DemoSize()
    add = parser.add_argument
    add(
        "--steps",
        type=_at_least(1),
        default=usual.steps,
        metavar="N",
        help=_default("length of the loop"),
    )
    add(
        "--size",
        type=_at_least(2),
        default=usual.size,
        metavar="N",
        help=_default("cells along a side of the grid"),
    )
    add(
        "--checkpoints",
        type=_at_least(0),
        metavar="K",
        help="room in memory, in states (default: sqrt(steps))",
    )
    add(
        "--output",
        default="remat-demo.png",
        metavar="FILE",
        help=_default("picture, .png, .svg or .pdf"),
    )
    add("--no-plot", action="store_true", help="draw no picture")
    add("--model", choices=MODELS, help="train this network under a budget instead")
    add(
        "--budget",
        type=_size_or_fraction,
        metavar="SHARE",
        help="with --model: the share of the plain peak (default: 0.4)",
    )
    add("--json", action="store_true", help="print only JSON on stdout; progress is on stderr")
    parser.set_defaults(run=_demo)


def _add_frontier_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help="module:function that makes the model and its inputs")
    add("--plot", metavar="FILE", help="draw the curve: .png, .svg or .pdf")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_frontier)


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=_at_least(0), required=True, metavar="N", help="length of the loop")
    room = parser.add_mutually_exclusive_group()
    room.add_argument(
        "--checkpoints",
        type=_at_least(0),
        metavar="K",
        help="room, in states (default: sqrt(steps))",
    )
    room.add_argument(
        "--memory",
        type=_size_or_fraction,
        metavar="SIZE",
        help="room, as the peak of the pass, or as a fraction of the peak without checkpointing",
    )
    add("--state-bytes", type=_size, metavar="SIZE", help="what goes from step to step")
    add("--tape-bytes", type=_size, metavar="SIZE", help="what one step keeps to go back through")
    add("--disk", type=_at_least(0), metavar="SLOTS", help="this many more states fit on disk")
    for verb in ("write", "read"):
        text = f"what a disk {verb} takes, in forward steps (default: 1)"
        add(f"--disk-{verb}", type=_cost, metavar="COST", help=text)
    add("--plot", metavar="FILE", help="draw the best schedule: .png, .svg or .pdf")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_plan)


def _add_check_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"{', '.join(DEVICES)}; cuda:1 and the like, too (default: an accelerator, or cpu)"
    add("--device", metavar="DEVICE", help=text)
    add("--quick", action="store_true", help="fewer programs and repetitions")
    parser.set_defaults(run=_check)


def _default(text: str) -> str:
    return f"{text} (default: %(default)s)"


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        wanted = f"a whole number of at least {least}, got {text!r}"
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(wanted) from None
        if number < least:
            raise argparse.ArgumentTypeError(wanted)
        return number

    return parse


def _size(text: str) -> int:
    try:
        return parse_bytes(text, name="a size")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size_or_fraction(text: str) -> int | float:
    """Read a size; a decimal number without a unit is a fraction of the plain pass, as in Python.

    The number 1 is one byte, and 1.0 all of the plain pass.
    """
    try:
        fraction = float(text) if "." in text else None
    except ValueError:
        fraction = None
    if fraction is None:
        return _size(text)
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(
            f"a fraction in (0, 1], or a size with a unit such as 64MB, got {text!r}"
        )
    return fraction


def _cost(text: str) -> float:
    try:
        cost = float(text)
    except ValueError:
        cost = -1.0
    if not 0 <= cost < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of at least 0, got {text!r}")
    return cost


# -- remat demo --------------------------------------------------------------------------------


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
        _print_json({**result.as_dict(), "plot": str(picture) if picture else None})
        return
    _show_demo(result)
    if picture:
        print(f"Memory over time: {picture}")
    elif wanted:
        print('For a picture of memory over time: pip install "remat[plot]"')


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
        _print_json({**result.as_dict(), "plot": str(picture) if picture else None})
        return
    print(training_grid(result.plain, result.budgeted, result.budget_bytes).text(), end="")
    same = "the same losses, bit for bit" if not result.loss_difference else "other losses"
    print(f"{arguments.model}: {same} (largest difference {result.loss_difference:g}).")
    print("The peak is that of the fourth step and later ones: the first three record and plan.")
    if picture:
        print(f"Memory over time: {picture}")


# -- remat frontier ----------------------------------------------------------------------------


def _frontier(arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        check_plot_path(arguments.plot)
    model, args, kwargs = _made_by(arguments.target)
    curve = remat.frontier(model, *args, **kwargs)
    picture = None if arguments.plot is None else curve.plot(arguments.plot)
    if arguments.json:
        _print_json({**curve.to_json(), "plot": str(picture) if picture else None})
        return
    print(curve.table(), end="")
    if picture:
        print(f"The curve: {picture}")


def _made_by(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Import "module:function", call it, and return the model and its arguments."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"TARGET is module:function, such as my_project:make_model, got {target}")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(import_module(module), name)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported: {error}; modules are looked for in {os.getcwd()} and "
            "where Python finds installed ones"
        ) from None
    except AttributeError:
        raise ValueError(
            f"{module} has no {name}; name a function of it that makes a model"
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(function):
        kind = type(function).__name__
        raise TypeError(f"{target} is no function that makes a model and its inputs, got {kind}")
    made = function()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise TypeError(f"{target}() is to return (model, inputs), got {type(made).__name__}")
    model, inputs = made
    if isinstance(inputs, dict):
        return model, (), inputs
    return model, inputs if isinstance(inputs, tuple) else (inputs,), {}


def _show_demo(result: DemoResult) -> None:
    relative = result.gradient_difference / (result.gradient_largest or 1.0)
    Console().print(comparison_table(result.plain, result.checkpointed, relative))
    exact = result.gradient_difference == 0
    equal = "the same gradient, bit for bit" if exact else "the same gradient, up to rounding"
    ratio = result.checkpointed.peak_bytes / max(1, result.plain.peak_bytes)
    print(f"{counted(result.size.steps, 'step')}: {equal}, in {ratio:.1%} of the memory.")


# -- remat plan --------------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> None:
    _check_plan_options(arguments)
    plan = _plan_of(arguments)
    picture = None
    if arguments.plot is not None:
        steps, runs = counted(plan.steps, "step"), counted(plan.evaluations, "evaluation")
        title = f"{plan.name}: {steps}, {runs}"
        picture = plot_schedule(plan.schedule, plan.steps, arguments.plot, title=title)
    if arguments.json:
        _print_json(_plan_as_dict(plan))
        return
    console = Console()
    console.print(plan_table(plan))
    console.print(f"* best: {_in_options(plan.reason)}", markup=False, highlight=False)
    if picture:
        print(f"The schedule over time: {picture}")


def _check_plan_options(arguments: argparse.Namespace) -> None:
    """Refuse what has no meaning, in the words of the command line."""
    if arguments.state_bytes is None:
        for name, value in (("memory", arguments.memory), ("tape-bytes", arguments.tape_bytes)):
            if value is not None:
                raise ValueError(f"--{name} {value} needs --state-bytes: the bytes of one state")
    if isinstance(arguments.memory, float) and arguments.tape_bytes is None:
        raise ValueError(
            f"--memory {arguments.memory} is a fraction of what the pass holds without "
            "checkpointing: it needs --tape-bytes, the bytes that one step keeps; or give a size "
            "such as 64MB"
        )
    if arguments.disk is None:
        for name, cost in (("write", arguments.disk_write), ("read", arguments.disk_read)):
            if cost is not None:
                raise ValueError(f"--disk-{name} {cost:g} needs --disk: the states that fit there")
    if arguments.plot is not None:
        check_plot_path(arguments.plot)


def _plan_of(arguments: argparse.Namespace) -> LoopPlan:
    slots, disk = arguments.checkpoints, None
    if slots is None and arguments.memory is None:
        slots = int(remat.get_memory_savings(arguments.steps)["num_checkpoints"])
    if arguments.disk is not None:
        costs = (1.0 if c is None else c for c in (arguments.disk_write, arguments.disk_read))
        disk = Disk(arguments.disk, *costs)
    return remat.plan_loop(
        arguments.steps,
        slots=slots,
        memory_bytes=_memory(arguments),
        state_bytes=arguments.state_bytes,
        tape_bytes=arguments.tape_bytes,
        disk=disk,
    )


def _memory(arguments: argparse.Namespace) -> int | None:
    """Return the room in bytes; a fraction is one of all tapes, a state and the step that runs."""
    if arguments.memory is None:
        return None
    state, tape = arguments.state_bytes, arguments.tape_bytes or 0
    whole = state + tape + max(0, arguments.steps - 1) * max(state, tape)
    return parse_budget(arguments.memory, whole=whole)


def _plan_as_dict(plan: LoopPlan) -> dict[str, Any]:
    options = [
        {
            "name": option.name,
            "evaluations": option.evaluations,
            "evaluations_per_step": option.evaluations / max(1, plan.steps),
            "cost": option.cost,
            f"peak_{plan.unit}": option.peak_bytes,
            "disk_slots": option.disk_slots,
        }
        for option in _options(plan)
    ]
    return {
        "steps": plan.steps,
        "best": plan.name,
        "reason": _in_options(plan.reason),
        "peak_unit": plan.unit,
        "options": options,
    }


def _options(plan: LoopPlan) -> tuple[Option, ...]:
    return plan.best, *plan.alternatives


# -- remat check -------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    with Console(stderr=True).status("checking") as status:
        report = run_checks(arguments.device, quick=arguments.quick, progress=status.update)
    Console().print(report.table())
    print("For a bug report:")
    print(report.line())
    return 0 if report.all_held else 1


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    sys.exit(main())
