"""Rules of thumb for loops, before anything has been measured."""

from __future__ import annotations

from itertools import takewhile
from typing import Literal

from ..sizes import shown
from .actions import Backward, Save
from .check import one_of, options_by_name, whole_number
from .choose import default_checkpoints
from .revolve import Revolve
from .uniform import even_positions

__all__ = [
    "compute_checkpoint_positions",
    "estimate_checkpoint_savings",
    "get_memory_savings",
    "should_checkpoint",
]


@options_by_name
def compute_checkpoint_positions(
    seq_length: int, num_checkpoints: int, schedule: Literal["uniform", "revolve"] = "uniform"
) -> list[int]:
    """Return where the first sweep holds a state; position p is the state before step p.

    "uniform" cuts the loop into parts that differ by at most one step, "revolve" gives the
    places that need the fewest evaluations. Position 0, the initial state, belongs to the caller
    and is never among them: a loop of n steps has at most n - 1 positions.

    >>> compute_checkpoint_positions(1000, 31)[:4]
    [31, 62, 93, 124]
    >>> compute_checkpoint_positions(5, 10)
    [1, 2, 3, 4]
    >>> compute_checkpoint_positions(10, 3, "revolve")
    [5, 7, 8]
    """
    steps = whole_number(seq_length, "seq_length")
    slots = whole_number(num_checkpoints, "num_checkpoints")
    one_of(schedule, "schedule", ["uniform", "revolve"])
    if slots >= steps - 1:
        return list(range(1, steps))
    if schedule == "uniform":
        return list(even_positions(steps, slots))
    ahead = takewhile(lambda action: not isinstance(action, Backward), Revolve(steps, slots))
    return [action.step for action in ahead if isinstance(action, Save)]


@options_by_name
def get_memory_savings(
    seq_length: int, num_checkpoints: int | None = None
) -> dict[str, int | float]:
    """Estimate what holding `num_checkpoints` states of a loop saves, and what it costs.

    Memory is counted in states. `savings_ratio` is the share of them that is not held, and
    `savings_percent` the same in percent. `recomputation_factor` is how often a step is run again,
    on average, by Revolve, the best schedule for slots that hold states: what `"auto"` finds once
    it has measured a step's tape is the same or better.

    >>> savings = get_memory_savings(1000)
    >>> savings["num_checkpoints"], round(savings["savings_percent"], 1)
    (31, 96.9)
    >>> savings["savings_ratio"], savings["recomputation_factor"]
    (0.969, 2.405)
    """
    steps = whole_number(seq_length, "seq_length")
    if num_checkpoints is None:
        num_checkpoints = default_checkpoints(steps)
    slots = min(whole_number(num_checkpoints, "num_checkpoints"), max(0, steps - 1))
    # A single step is held whatever is done: backward begins with it.
    held = slots if steps > 1 else steps
    return {
        "without_checkpointing": steps,
        "with_checkpointing": held,
        "savings_percent": 100 * (steps - held) / steps if steps else 0.0,
        "savings_ratio": (steps - held) / steps if steps else 0.0,
        "num_checkpoints": slots,
        "segment_length": steps / slots if slots else float(steps),
        "recomputation_factor": Revolve(steps, slots).evaluations / steps - 1 if steps else 0.0,
    }


estimate_checkpoint_savings = get_memory_savings


@options_by_name
def should_checkpoint(seq_length: int, threshold: float = 0.5) -> bool:
    """Return whether checkpointing saves at least the fraction `threshold` of the states.

    >>> should_checkpoint(1000), should_checkpoint(3)
    (True, True)
    >>> should_checkpoint(1)
    False
    """
    steps = whole_number(seq_length, "seq_length")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise TypeError(f"threshold must be a fraction between 0 and 1, got {shown(threshold)}")
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be a fraction between 0 and 1, got {threshold!r}")
    if steps < 2:
        return False  # one step needs its tape whatever is done
    return get_memory_savings(steps)["savings_percent"] >= 100 * threshold
