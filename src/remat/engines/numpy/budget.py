"""A budget: gradients are recorded once, planned, and follow their plan from then on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

from ... import trees
from ...core.following import Planned, needed_keeps
from ...errors import BudgetTooSmallError, UnsupportedError
from ...plans import PassRecord, Plan, Trace
from ...plans.planner import Planner, Plans, too_small
from ...plans.similar import Searches
from ...random_states import RandomStates, default_sources
from ...sizes import parse_budget
from .recording.planned import PlannedRegion
from .recording.region import close_region, threads
from .tape import Recording, is_differentiable, is_tracing, record, zeros_like

__all__ = ["Budget", "enter_budget", "record_trace", "record_within", "run_within", "set_budget"]

_MANY = 32  # plans that are remembered
_LEAST_ROOM = 0.65  # of a budget; with less, planning does not fit in, and nothing is left for it
Run = Callable[[list[Any]], list[Any]]


class _Threads(threading.local):
    def __init__(self) -> None:
        self.budgets: list[Budget] = []  # that have begun, the innermost last


_threads = _Threads()


class Budget:
    """Keeps gradients within a memory budget."""

    def __init__(self, budget: int | float | str, planner: Planner, *, share: float = 1.0) -> None:
        self._budget = budget
        self._planner = planner
        self._searches = Searches(planner)
        self._share = share  # of it that is planned for
        self._region: PlannedRegion | None = None  # of the part of a pass that runs
        self.planned: list[Planned] = []  # the one that ran last comes first
        self.last: PassRecord | None = None

    def __reduce__(self) -> Any:
        return partial(Budget, share=self._share), (self._budget, self._planner)

    def change(self, budget: int | float | str, *, share: float) -> None:
        """Take another budget, for the gradients that begin from now on; they are planned again."""
        if (budget, share) != (self._budget, self._share):
            self._budget, self._share = budget, share
            self.planned.clear()

    def begin(self) -> Self:
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

    @property
    def position(self) -> int:
        """The number of ops that the part of a pass has run so far; 0 outside of it."""
        return 0 if self._region is None else len(self._region.tracer)

    # -- a pass ------------------------------------------------------------------------------------

    def record(self, run: Run, inputs: Sequence[Any], wanted: Sequence[bool]) -> BudgetedRecording:
        """Record a function as one region, and plan it if it has no plan."""
        region, recording = _record_region(run, inputs, wanted, self.planned)
        return BudgetedRecording(self, recording, region, self._obeyed(region))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function as one region of the pass that is being recorded."""
        with _inside(PlannedRegion(self.planned)) as region:
            self._region = region
            try:
                result = function(*args)
            finally:
                self._region = None
        region.tracer.is_forward = False
        self._obeyed(region)
        return result

    def _obeyed(self, region: PlannedRegion) -> Planned:
        """Return the plan that a region has followed, or one that it follows from now on."""
        follower = region.follower
        planned = follower.current if region.follows and follower.is_complete else None
        if planned is None:
            region.let_go()
            planned = self._plan(region)
            region.catch_up(planned.plan)
        region.obey(planned.plan)
        return planned

    def _plan(self, region: PlannedRegion) -> Planned:
        """Plan a pass for the next times; return what to do this time."""
        tracer = region.tracer
        trace = tracer.trace(region.needed_ops())
        this_time, later = self._plans(trace)
        planned = Planned(tracer.keys, trace, later, tracer.seconds)
        known = [other for other in self.planned if other.keys != planned.keys]
        self.planned[:] = [planned, *known][:_MANY]
        return Planned(tracer.keys, trace, this_time, tracer.seconds)

    def _plans(self, trace: Trace) -> tuple[Plan, Plan]:
        """Return a plan for the pass that is being planned, and one for those after it.

        The first one leaves room for what planning has taken.
        """
        if not trace.ops:
            return Plan(frozenset()), Plan(frozenset())
        plans, budget = self._searches(trace), self._bytes(trace)
        later = this_time = self._plan_for(budget, plans)
        room = budget - plans.memory_bytes
        if later.extra_seconds and room > _LEAST_ROOM * budget:
            this_time = _smaller(plans, later, room)
        return _without_idle(trace, this_time), _without_idle(trace, later)

    def _plan_for(self, budget: int, plans: Plans) -> Plan:
        try:
            return plans.plan(int(budget * self._share))
        except BudgetTooSmallError as error:
            raise too_small(error, self._budget, budget, self._share) from None

    def _bytes(self, trace: Trace) -> int:
        return parse_budget(self._budget, whole=trace.plain_peak)

    def ended(self, region: PlannedRegion, planned: Planned) -> None:
        """Take note of what a pass did."""
        self.last = PassRecord(
            planned.trace,
            planned.plan,
            self._bytes(planned.trace) if planned.trace.ops else 0,
            region.meter.peak,
            recompute_seconds=region.recompute_seconds,
            recomputed_ops=region.recomputed_ops,
            followed=region.follows,
            curve=tuple(region.meter.curve),
        )


def _smaller(plans: Plans, plan: Plan, room: int) -> Plan:
    """Return a plan that leaves some room, or the smallest one."""
    try:
        smaller = plans.plan(room)
    except BudgetTooSmallError as error:
        smaller = plan if error.smallest is None else plans.plan(error.smallest)
    return min(plan, smaller, key=lambda each: each.peak_bytes)


def _without_idle(trace: Trace, plan: Plan) -> Plan:
    """Return a plan that keeps nothing that is not used."""
    return replace(plan, keep=needed_keeps(trace, plan))


class BudgetedRecording:
    """A recording that tells its budget when backward has been done."""

    def __init__(
        self, budget: Budget, recording: Recording, region: PlannedRegion, planned: Planned
    ) -> None:
        self._budget = budget
        self._recording = recording
        self._region = region
        self._planned = planned

    @property
    def results(self) -> list[Any]:
        return self._recording.results

    @property
    def ends(self) -> list[Any]:
        return self._recording.ends

    def go_back(self, seeds: Sequence[Any], sums: Sequence[Any], *, once: bool) -> list[Any]:
        gathered = self._recording.go_back(seeds, sums, once=once)
        self._budget.ended(self._region, self._planned)
        return gathered


def _record_region(
    run: Run, inputs: Sequence[Any], wanted: Sequence[bool], planned: list[Planned]
) -> tuple[PlannedRegion, Recording]:
    regions: list[PlannedRegion] = []

    def run_in_region(boxes: list[Any]) -> list[Any]:
        with _inside(PlannedRegion(planned)) as region:
            regions.append(region)
            return run(boxes)

    recording = record(run_in_region, inputs, wanted)
    regions[0].tracer.is_forward = False
    return regions[0], recording


@contextmanager
def _inside(region: PlannedRegion) -> Iterator[PlannedRegion]:
    threads.region = region
    try:
        yield region
    finally:
        close_region(region)


def record_within(run: Run, inputs: Sequence[Any], wanted: Sequence[bool]) -> Any:
    """Record a function, within the budget of this thread if there is one.

    What is differentiated inside of another function belongs to the pass of that one.
    """
    if not _threads.budgets or is_tracing():
        return record(run, inputs, wanted)
    return _threads.budgets[-1].record(run, inputs, wanted)


def run_within(budget: Budget, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function within a budget, if it is a part of what is being differentiated."""
    return budget.run(function, args) if budget.can_begin() else function(*args)


def enter_budget(budget: Budget) -> Budget:
    """Begin gradients within a budget, and return it."""
    if is_tracing():
        raise UnsupportedError(
            "a memory budget is for a whole gradient, and a function is being differentiated "
            "already; put the CheckpointManager, or memory_budget=, around the outermost gradient"
        )
    return budget.begin()


def record_trace(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Run a function forward and backward; return what it did."""
    leaves, structure = trees.flatten((args, kwargs))
    wanted = [is_differentiable(leaf) for leaf in leaves]
    if not any(wanted):
        raise TypeError("no argument holds a floating-point number to differentiate by")

    def run(boxes: list[Any]) -> list[Any]:
        given, keywords = trees.unflatten(structure, boxes)
        return trees.flatten(function(*given, **keywords))[0]

    states = RandomStates(default_sources())
    try:
        region, recording = _record_region(run, leaves, wanted, [])
    finally:
        states.restore(states.last_snapshot)
    needed = region.needed_ops()
    seeds = [zeros_like(r) + 1 if is_differentiable(r) else None for r in recording.results]
    started = time.perf_counter()
    recording.go_back(seeds, [None] * len(leaves), once=True)
    backward = time.perf_counter() - started - region.recompute_seconds
    forward = sum(region.tracer.seconds)
    return region.tracer.trace(needed, max(backward, 0.0) / forward if forward else 0.0)


def set_budget(model: Any, budget: int | float | str | None, planner: Any) -> Any:
    raise UnsupportedError(
        f"auto_checkpoint takes a module of PyTorch, got {type(model).__name__}; for a NumPy "
        'function write remat.grad(f, memory_budget="64MB")'
    )
