"""Groups of segments with shared options and statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..engines.compiling import is_compiling
from ..observers import observed_by
from ..reports.accounting import MemoryAccounting
from ..schedules.check import options_by_name
from ..segments import SegmentOptions
from ..sizes import shown
from .segments import check_option, check_policy, run_segment, wrap

__all__ = ["CheckpointGroup"]


class CheckpointGroup:
    """Checkpointed calls that share options and statistics.

    Functions can have several outputs. What the segments save is measured while they run, which
    takes time: use `checkpoint` if you do not need the statistics.

    >>> import numpy as np
    >>> import remat
    >>> group = remat.CheckpointGroup("pairs")
    >>> def both(x, y):
    ...     return np.exp(x * y), x + y
    >>> def f(x):
    ...     power, total = group.checkpoint_fn(both, x, 3.0)
    ...     return np.sum(power + total)
    >>> float(remat.grad(f)(np.zeros(100))[0])
    4.0
    >>> group.calls, group.recompute_count()
    (1, 1)
    """

    @options_by_name
    def __init__(
        self, name: str | None = None, *, preserve_rng_state: bool = True, policy: Any = None
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be text, got {shown(name)}")
        self.name = name
        check_option("preserve_rng_state", preserve_rng_state)
        self.preserve_rng_state = preserve_rng_state
        check_policy(policy)
        self.policy = policy
        self.calls = 0
        self._accounting = MemoryAccounting(only_totals=True)

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"preserve_rng_state": self.preserve_rng_state, "policy": self.policy}
        return functools.partial(type(self), **options), (self.name,)

    def checkpoint_fn(self, fn: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
        """Run `fn(*inputs, **kwargs)` as a checkpointed segment of this group.

        Without inputs the wrapped function is returned, as by `checkpoint`.
        """
        if not callable(fn):
            raise TypeError(f"fn must be a function, got {shown(fn)}")
        return self._run(fn, inputs, kwargs) if inputs or kwargs else wrap(fn, self._run)

    def memory_saved(self) -> int:
        """Return by how many bytes these segments lower the peak of what is held."""
        return self._accounting.memory_saved

    def recompute_count(self) -> int:
        """Return how often a segment, or a part of one, was recomputed."""
        return sum(totals.recomputed for totals in self._accounting.regions)

    def recompute_seconds(self) -> float:
        """Return the seconds that recomputation took."""
        return sum(totals.seconds for totals in self._accounting.regions)

    def __repr__(self) -> str:
        return f"CheckpointGroup({self.name!r}, preserve_rng_state={self.preserve_rng_state})"

    def _run(self, fn: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = SegmentOptions(self.preserve_rng_state, name=self.name or "", policy=self.policy)
        # A compiler traces this once for many calls, so calls cannot be counted.
        if is_compiling():
            return run_segment(fn, inputs, kwargs, options)
        self.calls += 1
        with observed_by([self._accounting]):
            return run_segment(fn, inputs, kwargs, options)
