"""The function that libraries call in place of torch's checkpoint, and what a step did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import remat

__all__ = ["CheckpointFunction", "StepMeter"]


@dataclass(frozen=True, slots=True)
class CheckpointFunction:
    """Takes the place of `torch.utils.checkpoint.checkpoint`; pickles with the model that has it.

    Libraries call it with a layer, or with a partial of one that has all of its arguments.
    """

    policy: Any = None
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        """Raise now, and not in the first step, if an option is wrong."""
        remat.checkpoint(policy=self.policy, preserve_rng_state=self.preserve_rng_state)

    def __call__(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("preserve_rng_state", self.preserve_rng_state)
        # An option of torch's says that this is a call, also if there are no arguments.
        kwargs["use_reentrant"] = False
        return remat.checkpoint(function, *args, policy=self.policy, **kwargs)


class StepMeter:
    """Measures single steps of training: one after each time that its numbers were read.

    Not every step, because measuring takes time.
    """

    def __init__(self) -> None:
        self._profiler = remat.CheckpointProfiler()
        self._is_due = True

    def __reduce__(self) -> Any:
        return StepMeter, ()  # copies of a callback measure for themselves

    def begin(self) -> None:
        """A step begins: measure it, once for each report."""
        if self._is_due and not self._profiler.is_tracking:
            self._profiler.start_tracking()

    def end(self) -> None:
        """A step has ended."""
        if self._profiler.is_tracking:
            self._profiler.stop_tracking()
            self._is_due = False

    def read(self) -> dict[str, float]:
        """Return what the last step took that was measured; {} if there was none."""
        if self._is_due:
            return {}
        self._is_due = True
        profiler = self._profiler
        return {
            "remat/regions": profiler.checkpoint_count(),
            "remat/recompute_seconds": profiler.recompute_seconds(),
            "remat/peak_bytes": profiler.peak_bytes(),
            "remat/saved_bytes": profiler.memory_saved(),
        }

    @staticmethod
    def numbers_of(record: Any) -> dict[str, float]:
        """Return what a pass under a budget took, as `read` does; {} if there was none."""
        if record is None:
            return {}
        return {
            "remat/budget_bytes": record.budget,
            "remat/peak_bytes": record.measured_peak,
            "remat/saved_bytes": record.trace.plain_peak - record.measured_peak,
            "remat/recompute_seconds": record.recompute_seconds,
        }

    def report(self) -> str:
        """Return the table of the last step that was measured."""
        return self._profiler.report()
