"""What a planner decides about a recorded pass: what to keep, and how to recompute the rest.

The ops are cut into stages, in forward order. When backward first asks for a saved value of a
stage that is not held, all saved values that the rest of this stage's backward needs and that are
not held are recomputed in one go, each op at most once, from the nearest values that are held.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..sizes import format_bytes

__all__ = ["Plan", "Stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive ops, from `first_op` up to the first op of the next stage.

    Values in `hold` that are recomputed for this stage stay held for the rest of backward, as if
    they had been kept, until nothing needs them any more.
    """

    first_op: int
    hold: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """The values to keep in forward, the stages of backward, and what it will take.

    `lower_bound_seconds` is less than any plan of this kind can reach within `memory_budget`.

    >>> Plan(frozenset({3}), (Stage(0), Stage(4)), peak_bytes=2000, extra_seconds=0.5)
    Plan(keeps 1 value, 2 stages, peak 2.0 KB, 0.5 s extra)
    """

    keep: frozenset[int]
    stages: tuple[Stage, ...] = (Stage(0),)
    peak_bytes: int = 0
    extra_seconds: float = 0.0
    lower_bound_seconds: float = 0.0
    memory_budget: int | None = None
    plain_peak_bytes: int = 0
    signature: str = ""  # of the trace that it is for

    def stage_of(self, op: int) -> int:
        """Return the number of the stage that an op belongs to."""
        return bisect_right([stage.first_op for stage in self.stages], op) - 1

    def to_json(self) -> dict[str, Any]:
        """Return the plan as what `json` can write."""
        return {
            "keep": sorted(self.keep),
            "stages": [[stage.first_op, sorted(stage.hold)] for stage in self.stages],
            "peak_bytes": self.peak_bytes,
            "extra_seconds": self.extra_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "memory_budget": self.memory_budget,
            "plain_peak_bytes": self.plain_peak_bytes,
            "signature": self.signature,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_json` wrote; a ValueError says what is wrong with it."""
        try:
            stages = tuple(Stage(int(first), frozenset(hold)) for first, hold in data["stages"])
            return cls(frozenset(data["keep"]), stages, **{name: data[name] for name in _NUMBERS})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is not the JSON of a plan: {error!r}") from error

    def __repr__(self) -> str:
        values = "1 value" if len(self.keep) == 1 else f"{len(self.keep)} values"
        stages = "1 stage" if len(self.stages) == 1 else f"{len(self.stages)} stages"
        held = sum(len(stage.hold) for stage in self.stages)
        return (
            f"Plan(keeps {values}, {stages}{f', holds {held} on' if held else ''}, "
            f"peak {format_bytes(self.peak_bytes)}, {self.extra_seconds:.3g} s extra)"
        )


_NUMBERS = (
    "peak_bytes",
    "extra_seconds",
    "lower_bound_seconds",
    "memory_budget",
    "plain_peak_bytes",
    "signature",
)
