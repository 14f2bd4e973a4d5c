"""Budgets on NumPy: a gradient, or a part of one, is a pass (core.budget)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from ... import trees
from ...core import budget
from ...core.following import Planned
from ...core.passes import PassRegion
from ...errors import UnsupportedError
from ...plans import PassRecord, Plan, Trace
from ...random_states import RandomStates, default_sources
from .adapter import NUMPY
from .op_facts import FACTS
from .recording.region import NumpyRegion, close_region, enter, threads
from .tape import Recording, is_differentiable, is_tracing, record, zeros_like

__all__ = ["NumpyBudget", "record_trace", "record_within"]

Run = Callable[[list[Any]], list[Any]]


class _ThreadBudgets(threading.local):
    def __init__(self) -> None:
        self.budgets: list[NumpyBudget] = []  # that have begun, the innermost last


_threads = _ThreadBudgets()


class NumpyPassRegion(PassRegion, NumpyRegion):
    """The region of a whole gradient, or of a part of one."""


class NumpyBudget(budget.Budget):
    """Keeps gradients within a memory budget."""

    engine = NUMPY
    facts = FACTS

    def enter(self) -> Self:
        if is_tracing():
            raise UnsupportedError(
                "a memory budget is for a whole gradient, and a function is being differentiated "
                "already; put the CheckpointManager, or memory_budget=, around the outermost "
                "gradient"
            )
        _threads.budgets.append(self)
        return self

    def end(self, *, failed: bool = False) -> None:
        if self in _threads.budgets:
            while _threads.budgets.pop() is not self:
                pass  # one inside that was left open

    def can_begin(self) -> bool:
        """Return whether there is a part of a pass to keep within a budget."""
        return is_tracing() and threads.region is None

    def why_not(self) -> str:
        """Return what keeps a part of a pass from having a budget of its own, or ""."""
        if not is_tracing() or threads.region is None:
            return ""
        return (
            "it is inside of a scope, a checkpointed region or a gradient with a budget, which "
            "decides what is held; call it outside of them"
        )

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not self.can_begin():
            return function(*args)
        with self.recorded():
            return function(*args)

    def settle(self, planned: Planned, first: Any) -> None:
        """Record each pass: without its record, rules would hold all that they need."""

    def make_region(self, name: str) -> NumpyRegion:
        return NumpyRegion(name)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record a pass, and plan it if it has no plan."""
        self._pass = recorded = self.new_pass()
        self._region = region = NumpyPassRegion(recorded, self)
        enter(region)
        try:
            yield
        except BaseException:
            recorded.abandon()
            raise
        finally:
            close_region(region)
            self._pass = self._region = None
        recorded.end_forward(region)
        recorded.plan()
        if not recorded.has_backward:
            self.last = PassRecord(Trace((), ()), Plan(frozenset()), 0)


def record_within(run: Run, inputs: Sequence[Any], wanted: Sequence[bool]) -> Recording:
    """Record a function, within the budget of this thread if there is one.

    What is differentiated inside of another function belongs to the pass of that one.
    """
    if not _threads.budgets or is_tracing():
        return record(run, inputs, wanted)
    return _record(_threads.budgets[-1], run, inputs, wanted)


def _record(
    within: NumpyBudget, run: Run, inputs: Sequence[Any], wanted: Sequence[bool]
) -> Recording:
    def run_in_region(boxes: list[Any]) -> list[Any]:
        with within.recorded():
            return run(boxes)

    return record(run_in_region, inputs, wanted)


def record_trace(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Run a function forward and backward; return what it did."""
    leaves, structure = trees.flatten((args, kwargs))
    wanted = [is_differentiable(leaf) for leaf in leaves]
    if not any(wanted):
        raise TypeError("no argument holds a floating-point number to differentiate by")

    def run(boxes: list[Any]) -> list[Any]:
        given, keywords = trees.unflatten(structure, boxes)
        return trees.flatten(function(*given, **keywords))[0]

    within = NumpyBudget(budget.PLENTY, budget.KeepAll)
    states = RandomStates(default_sources())
    try:
        recording = _record(within, run, leaves, wanted)
    finally:
        states.restore(states.last_snapshot)
    seeds = [zeros_like(r) + 1 if is_differentiable(r) else None for r in recording.results]
    began = time.perf_counter()
    recording.go_back(seeds, once=True)
    trace = within.planned[0].trace if within.planned else Trace((), ())
    return budget.with_backward(trace, time.perf_counter() - began)
