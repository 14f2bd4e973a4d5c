"""A budget: passes are recorded once, planned, and followed from then on."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

from ..errors import BudgetTooSmallError
from ..observers import warn_once
from ..plans import PassRecord, Plan, Trace
from ..plans.planner import Planner, too_small
from ..plans.similar import Searches
from ..sizes import format_bytes, parse_budget
from .engine import Engine
from .following import Follower, Planned
from .passes import BudgetedPass, PassRegion, Sections
from .region import Region
from .settled import SettledPass, Step, steps_of
from .tracing import Key, OpFacts

__all__ = ["PLENTY", "Budget", "KeepAll", "with_backward"]

_FORWARD_SHARE = (
    0.7  # of the budget is what an unplanned forward pass may hold: backward needs room
)
_REFINED = 1  # passes after which a plan is made again, with seconds of warm kernels
_CORRECTED = 3  # passes after which plans stay as they are
_TOLERANCE = 1.05  # times the budget is what a pass may take without a warning
_MANY = 32  # plans that are remembered
_NEW_PROGRAMS = 4  # that are planned at once, although nobody has followed a plan so far
_SEEN = 1000  # passes without a plan that are remembered
_PASSES_EACH = 10  # that follow plans pay for one more


class Budget:
    """Keeps passes within a memory budget.

    An engine has a subclass that begins passes, ends them, and makes their regions.
    """

    engine: ClassVar[Engine]
    facts: ClassVar[OpFacts]
    counts_gradients = False  # a pass is metered to the end of its backward

    def __init__(self, budget: int | float | str, planner: Planner, *, share: float = 1.0) -> None:
        self._budget = budget
        self._planner = planner
        self._searches = Searches(planner)
        self._credit = float(_NEW_PROGRAMS)  # of programs to be planned when they first run
        self._unplanned: list[Any] = []  # the ops of the last pass that followed no plan
        self._seen: dict[int, None] = {}  # passes that followed no plan, by a hash of their ops
        self._unused = 0  # plans that were made since one was followed
        self._share = share  # of it that is planned for
        self.planned: list[Planned] = []  # the one that ran last comes first
        self.last: PassRecord | None = None
        self._pass: BudgetedPass | None = None
        self._region: PassRegion | None = None
        # What to do about each op of plans that are settled.
        self._steps: WeakKeyDictionary[Planned, list[Step] | None] = WeakKeyDictionary()
        self._firsts: dict[Any, None] = {}  # the first ops of what was planned
        self._goes_on: set[Any] = set()  # first ops with which a program did not start again
        self._lock = threading.RLock()  # of what passes in several threads change

    def __reduce__(self) -> Any:
        return partial(type(self), share=self._share), (self._budget, self._planner)

    def change(self, budget: int | float | str, *, share: float) -> None:
        """Take another budget, for the passes that begin from now on; they are planned again."""
        if (budget, share) != (self._budget, self._share):
            with self._lock:
                self._budget, self._share = budget, share
                self.planned.clear()
                if self._pass is not None and not self._pass.has_begun:
                    self.restart()  # the next pass was about to follow a plan

    def __repr__(self) -> str:
        given = self._budget
        if isinstance(given, float):
            return f"Budget({given:.0%} of a plain pass)"
        return f"Budget({format_bytes(self._bytes(0))})"

    # -- where passes begin ------------------------------------------------------------------------

    def new_pass(self) -> BudgetedPass:
        return BudgetedPass(self, Follower(self.planned))

    @property
    def position(self) -> int:
        """The number of ops that the pass has run so far; 0 outside of a pass."""
        return 0 if self._pass is None else self._pass.position

    def starts_again(self, op: Any, first: Any) -> bool:
        return op not in self._goes_on and (op == first or op in self._firsts)

    def learn_that_it_goes_on(self, op: Any) -> None:
        if len(self._goes_on) > _MANY:
            self._goes_on.clear()
        self._goes_on.add(op)

    def enter(self) -> Self:
        """Begin passes within this budget; `end` ends them."""
        raise NotImplementedError

    def end(self, *, failed: bool = False) -> None:
        """End what `enter` began; raise if no plan fits the budget."""
        raise NotImplementedError

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function as a pass, or as a part of one, if there is a derivative to be taken."""
        raise NotImplementedError

    def why_not(self) -> str:
        """Return what keeps a pass with gradients from having a budget of its own, or ""."""
        raise NotImplementedError

    # -- what a pass asks (passes.Owner) -----------------------------------------------------------

    def make_region(self, name: str) -> Region:
        raise NotImplementedError

    def find_sections(self) -> Sections | None:
        """Return the cuts of the pass that begins, if it has any."""
        return None

    @property
    def is_shared(self) -> bool:
        return False

    def expect_gradient(self, parameter: Any) -> None: ...

    def backward_began(self, begun: BudgetedPass) -> None: ...

    def restart(self) -> None:
        """Begin another pass, if passes end by themselves."""

    def room(self, plain_bytes: int) -> int:
        whole = max(plain_bytes, 1)
        return int(self._bytes(whole) * self._share * _FORWARD_SHARE)

    def _bytes(self, whole: int) -> int:
        return parse_budget(self._budget, whole=whole)

    def forward_ended(self, ended: BudgetedPass) -> None:
        """Plan a pass that nobody has planned, as soon as its forward part is known."""
        with self._lock:
            self._forward_ended(ended)
        self._firsts[ended.first] = None
        if len(self._firsts) > _MANY:
            del self._firsts[next(iter(self._firsts))]

    def _forward_ended(self, ended: BudgetedPass) -> None:
        if ended.settled is not None:
            self._ran_settled(ended.settled)
        elif ended.follower.is_complete and ended.follows:
            planned = ended.follower.current
            assert planned is not None
            self._earn_credit()
            self._ran_again(planned, ended)
        elif self._is_worth_planning(ended):
            self._plan(ended)

    def settle(self, planned: Planned, first: Any) -> None:
        """Let the pass that has begun follow a plan without recording more than that needs."""
        region = self._region
        if region is None or not planned.is_settled or planned not in self.planned:
            return
        if planned not in self._steps:
            self._steps[planned] = steps_of(planned, self.facts)
        steps = self._steps[planned]
        if steps is not None:
            region.settle(SettledPass(planned, steps, first, self.facts))

    def _ran_settled(self, settled: SettledPass) -> None:
        planned = settled.planned
        if not settled.is_complete:
            planned.was_left()
        elif planned in self.planned:
            self._earn_credit()
            known = [other for other in self.planned if other is not planned]
            self.planned[:] = [planned, *known]
            planned.passes += 1
            self.last = planned.record

    def _earn_credit(self) -> None:
        """A plan was followed: others may be, too."""
        self._credit = min(self._credit + 1 / _PASSES_EACH, _NEW_PROGRAMS)
        self._unused = 0

    def _is_worth_planning(self, ended: BudgetedPass) -> bool:
        """Return whether a program is likely to run again.

        One whose ops or sizes differ from step to step (experts with other tokens, stochastic
        depth) would be planned in every step, and the plans never be followed. It keeps to the
        budget without; what runs a second time is planned.
        """
        funcs = [key[0] for key in ended.tracer.keys]
        is_repeated, self._unplanned = funcs == self._unplanned, funcs
        number = hash(tuple(ended.tracer.keys))
        was_seen = number in self._seen
        self._seen[number] = None
        if len(self._seen) > _SEEN:
            del self._seen[next(iter(self._seen))]
        if was_seen or self._credit >= 1 or (is_repeated and self._unused < _NEW_PROGRAMS):
            self._credit = max(0.0, self._credit - 1)
            self._unused += 1
            return True
        return False

    def backward_ended(self, ended: BudgetedPass) -> None:
        with self._lock:
            self._backward_ended(ended)
        if ended is self._pass:
            self.restart()

    def _backward_ended(self, ended: BudgetedPass) -> None:
        if ended.settled is not None:
            return
        followed = ended.follower.current
        if followed is not None and ended.follows and ended.follower.is_complete:
            self._report(ended, followed)
            self._plan_again(ended, followed)
        else:
            planned = next((p for p in self.planned if p.keys == ended.tracer.keys), None)
            if planned is not None:
                self._report(ended, planned)

    # -- planning ----------------------------------------------------------------------------------

    def _plan(self, ended: BudgetedPass) -> None:
        tracer = ended.tracer
        seconds = self.agreed_seconds(tracer.keys, tracer.seconds, self._about(0))
        self._remember(tracer.keys, tracer.trace(seconds), seconds)

    def agreed_seconds(self, keys: Sequence[Key], seconds: list[float], about: str) -> list[float]:
        """Return the seconds of ops that all processes plan with that train together."""
        return seconds

    def agreed_bytes(self, keys: Sequence[Key], nbytes: int, about: str) -> int:
        """Return the bytes that all these processes reserve."""
        return nbytes

    def _about(self, passes: int) -> str:
        """Return what ranks agree upon besides a program: its budget, and when they ask."""
        return f"{self._budget}/{self._share}/{passes}"

    def _remember(
        self, keys: Any, trace: Trace, seconds: list[float], reserved: int = 0
    ) -> Planned:
        planned = Planned(keys, trace, self._plan_trace(trace, reserved), seconds)
        planned.reserved = reserved
        known = [other for other in self.planned if other.keys != keys]
        self.planned[:] = [planned, *known][:_MANY]
        return planned

    def _plan_trace(self, trace: Trace, reserved: int = 0) -> Plan:
        budget, plans = self._bytes(trace.plain_peak), self._searches(trace)
        try:
            return plans.plan(max(1, int(budget * self._share) - reserved))
        except BudgetTooSmallError as error:
            if reserved and error.smallest is not None:
                _warn_of_more(trace, budget, error.smallest, reserved)
                return plans.plan(error.smallest)
            largest = self._largest_budget()
            if error.smallest is not None and error.smallest <= largest:
                return plans.plan(largest)
            raise self._too_small(error, budget) from None

    def _largest_budget(self) -> int:
        """Return the bytes to plan for in the largest pass so far, if the budget is a fraction.

        A second backward in a step has few ops of its own, of which none may be worth recomputing.
        """
        if not isinstance(self._budget, float):
            return 0
        whole = max((planned.trace.plain_peak for planned in self.planned), default=0)
        return int(self._bytes(whole) * self._share)

    def _too_small(self, error: BudgetTooSmallError, budget: int) -> BudgetTooSmallError:
        return too_small(error, self._budget, budget, self._share)

    def _ran_again(self, planned: Planned, ended: BudgetedPass) -> None:
        if planned not in self.planned:
            return  # the budget has changed since
        known = [other for other in self.planned if other is not planned]
        self.planned[:] = [planned, *known][:_MANY]
        planned.passes += 1
        if planned.passes == _REFINED:
            # The first pass was cold: kernels were loaded, memory was new.
            seconds = list(map(min, planned.seconds, ended.tracer.seconds))
            seconds = self.agreed_seconds(planned.keys, seconds, self._about(planned.passes))
            planned.refined = ended.tracer.trace(seconds), seconds

    def _plan_again(self, ended: BudgetedPass, followed: Planned) -> None:
        """Plan again after the first warm pass, and after one that took more than its plan says.

        Now and not earlier: planning takes memory, too, and what backward has used is gone.
        """
        planned = next((p for p in self.planned if p.keys == followed.keys), None)
        if planned is None:
            return
        is_same = planned is followed
        if planned.has_settled or planned.passes > _CORRECTED:
            planned.fits(is_plain=is_same and ended.is_alone)
            return
        reserved = self._reserved(ended, followed, planned)
        if planned.refined is None and reserved == planned.reserved:
            planned.fits(is_plain=is_same and ended.is_alone)
            return
        trace, seconds = planned.refined or (planned.trace, planned.seconds)
        planned.refined = None
        with suppress(BudgetTooSmallError):  # other seconds, other plans: the one before fits
            again = self._remember(planned.keys, trace, seconds, reserved)
            again.passes = planned.passes

    def _reserved(self, ended: BudgetedPass, followed: Planned, planned: Planned) -> int:
        """Return the bytes to leave for what passes take and traces do not show.

        What the backward of an op allocates for itself is not in the trace.
        """
        excess = ended.meter.peak - followed.plan.peak_bytes
        given = self._bytes(followed.trace.plain_peak)
        is_kept = ended.meter.peak <= max(given, followed.plan.memory_budget or 0)
        reserved = planned.reserved if is_kept else max(planned.reserved, excess)
        return self.agreed_bytes(planned.keys, reserved, self._about(planned.passes))

    def _report(self, ended: BudgetedPass, planned: Planned) -> None:
        self.last = planned.record = PassRecord(
            planned.trace,
            planned.plan,
            self._bytes(planned.trace.plain_peak),
            ended.meter.peak,
            self.counts_gradients,
            ended.recompute_seconds,
            ended.recomputed_ops,
            ended.follows,
            tuple(ended.meter.curve),
        )


def _warn_of_more(trace: Trace, budget: int, smallest: int, reserved: int) -> None:
    needed = smallest + reserved
    if needed <= _TOLERANCE * budget:
        return  # as near as peaks are predicted
    warn_once(
        ("budget exceeded", trace.signature, budget),
        f"a pass takes {reserved} bytes ({format_bytes(reserved)}) more than its ops show, so it "
        f"does not fit into the budget of {format_bytes(budget)} by any plan found: it takes "
        f"{format_bytes(needed)}. The backward of an op (an FFT, a custom Function) allocates it, "
        f"or the program holds tensors; give at least {needed} bytes, or let it allocate less",
    )


# -- a pass that is only recorded ------------------------------------------------------------------

PLENTY = 1 << 62  # bytes


class KeepAll:
    """The one plan of a pass that is only recorded (plans.planner.Plans)."""

    def __init__(self, trace: Trace) -> None:
        self._plan = Plan(frozenset(trace.saved))

    def plan(self, memory_budget: int | float | str) -> Plan:
        return self._plan


def with_backward(trace: Trace, seconds: float) -> Trace:
    """Return the trace with the time of backward, which is measured as a whole, spread over it."""
    forward = trace.seconds or 1.0
    ops = tuple(
        dataclasses.replace(op, backward_seconds=seconds * op.seconds / forward) for op in trace.ops
    )
    return dataclasses.replace(trace, ops=ops)
