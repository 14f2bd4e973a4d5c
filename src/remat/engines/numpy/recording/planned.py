"""The region of a whole pass under a budget.

While a plan is followed, the values that it keeps are held and all others are dropped. A pass that
has no plan, or that leaves its plan, drops all; it is planned when its forward part is
known, and what the plan keeps is then computed again, once.
"""

from __future__ import annotations

import weakref
from typing import Any

from ....core.following import Follower, Planned
from ....plans import Plan
from .meter import Meter
from .records import Value
from .region import Region, hold, threads
from .replay import find_needs, replay
from .rules import Rule
from .tracer import Tracer

__all__ = ["PlannedRegion"]


class PlannedRegion(Region):
    """Traces a pass, and holds what its plan says."""

    def __init__(self, planned: list[Planned]) -> None:
        super().__init__("memory budget")
        self.tracer = Tracer()
        self.meter = Meter()
        self.follower = Follower(planned)
        self.follows = self.follower.current is not None
        self.recompute_seconds = 0.0
        self.recomputed_ops = 0
        self._plan: Plan | None = None
        self._by_plan: list[weakref.ref[Value]] = []  # what is held because the plan says so

    def recorded(self, value: Value, array: Any, rule: Any) -> None:
        """An op of the pass has run, in this region or in one inside."""
        self.meter.add(array)
        own = isinstance(rule, Rule) and rule.region is self
        number = self.tracer.ran(value, array, rule.needs if own else [])
        if own:
            rule.number = number
        if value.base is None and self.follows:
            self._follow(number, value, array)
        self.tracer.went_on()

    def _follow(self, number: int, value: Value, array: Any) -> None:
        planned = self.follower.step(self.tracer.keys[number])
        if planned is None:
            self.follows = False  # another program: from here on there is no plan
            return
        keeps = planned.keeps[number]
        if keeps is not None and keeps[0] and not value.must_recompute:
            hold(value, array)
            self._by_plan.append(weakref.ref(value))

    def lend(self, value: Value, array: Any) -> None:
        """A region inside reads a value, and recomputes from it by itself: it is held."""
        hold(value, array)
        self.tracer.pin(value)

    # -- when the forward part is known ------------------------------------------------------------

    def needed_ops(self) -> set[int]:
        """Return the ops that backward may come to: the results of others are gone."""
        return {rule.number for rule in self.living()}

    def obey(self, plan: Plan) -> None:
        """Recompute by the stages of a plan from now on."""
        self.tracer.is_forward = False
        self._plan = plan
        for rule in self.living():
            rule.stage = max(plan.stage_of(rule.number), 0)

    def let_go(self) -> None:
        """Drop what was held for a plan that was not followed to its end."""
        values = [value for reference in self._by_plan if (value := reference()) is not None]
        self.tracer.let_go([value for value in values if not value.is_marked])

    def catch_up(self, plan: Plan) -> None:
        """Hold what a plan keeps that was made before it."""
        missing = [v for v in self._values(plan.keep) if v.op is not None and v.array is None]
        missing = [value for value in missing if not value.must_recompute]
        arrays = replay(find_needs(missing, lambda _: True))
        for value in missing:
            hold(value, arrays[value])
            self.meter.add(arrays[value])

    def _values(self, numbers: Any) -> list[Value]:
        return self.tracer.living(numbers)

    # -- backward ----------------------------------------------------------------------------------

    def _compute(self, stage: int | None) -> None:
        known = len(threads.fresh)
        super()._compute(stage)
        for reference in threads.fresh[known:]:
            if (value := reference()) is not None:
                self.meter.add(value.fresh)
        if self._plan is None or stage is None:
            return
        for value in self._values(self._plan.stages[stage].hold):
            if value.fresh is not None:
                hold(value, value.fresh)

    def _recomputed(self, ops: int, seconds: float) -> None:
        super()._recomputed(ops, seconds)
        self.recomputed_ops += ops
        self.recompute_seconds += seconds
