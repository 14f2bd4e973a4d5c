"""`remat plan`: the schedules for a loop, compared."""

from __future__ import annotations

import argparse
from typing import Any

import remat

from ..reports.plots import check_plot_path, plot_schedule
from ..schedules import Disk, LoopPlan, ScheduleOption
from ..sizes import counted, parse_budget
from .arguments import (
    at_least,
    cost,
    in_options,
    print_json,
    size,
    size_or_fraction,
    texts,
)

__all__ = ["add_plan"]

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


def add_plan(commands: Any) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "plan", help="compare the schedules for a loop", **texts(_PLAN, _PLAN_EXAMPLES)
    )
    add = parser.add_argument
    add("--steps", type=at_least(0), required=True, metavar="N", help="length of the loop")
    room = parser.add_mutually_exclusive_group()
    room.add_argument(
        "--checkpoints",
        type=at_least(0),
        metavar="K",
        help="room, in states (default: sqrt(steps))",
    )
    room.add_argument(
        "--memory",
        type=size_or_fraction,
        metavar="SIZE",
        help="room, as the peak of the pass, or as a fraction of the peak without checkpointing",
    )
    add("--state-bytes", type=size, metavar="SIZE", help="what goes from step to step")
    add("--tape-bytes", type=size, metavar="SIZE", help="what one step keeps to go back through")
    add("--disk", type=at_least(0), metavar="SLOTS", help="this many more states fit on disk")
    for verb in ("write", "read"):
        text = f"what a disk {verb} takes, in forward steps (default: 1)"
        add(f"--disk-{verb}", type=cost, metavar="COST", help=text)
    add("--plot", metavar="FILE", help="draw the best schedule: .png, .svg or .pdf")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    _check_plan_options(arguments)
    plan = _plan_of(arguments)
    picture = None
    if arguments.plot is not None:
        steps, runs = counted(plan.steps, "step"), counted(plan.evaluations, "evaluation")
        title = f"{plan.name}: {steps}, {runs}"
        picture = plot_schedule(plan.schedule, plan.steps, arguments.plot, title=title)
    if arguments.json:
        print_json(_plan_as_dict(plan))
        return
    print(plan.table(in_options(plan.reason)).text())
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
        "reason": in_options(plan.reason),
        "peak_unit": plan.unit,
        "options": options,
    }


def _options(plan: LoopPlan) -> tuple[ScheduleOption, ...]:
    return plan.best, *plan.alternatives
