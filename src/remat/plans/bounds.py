"""Lower bounds: the seconds of recomputation that no plan can avoid within a budget.

When forward ends, what is held fits into the budget; all else that backward needs has to be
computed again at least once, from what is held then. This holds for every plan, whatever it does
later.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np

from .facts import Facts
from .plan import Plan
from .trace import Trace

__all__ = ["LowerBound", "lower_bound_seconds"]

_SAFE = 1 - 1e-9  # sums of floats are not exact


def lower_bound_seconds(trace: Trace, plan: Plan) -> float:
    """Return the seconds that every plan takes at least within the budget of a plan."""
    budget = plan.peak_bytes if plan.memory_budget is None else plan.memory_budget
    return min(LowerBound(Facts(trace)).seconds(budget), plan.extra_seconds)


class LowerBound:
    """The bound as a function of the budget."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        out = [v for v, outlives in enumerate(facts.outlives) if outlives]
        fixed = [v for v, users in enumerate(facts.users) if users and facts.is_fixed[v]]
        self._always = sum(facts.nbytes[v] for v in {*out, *fixed})
        self._nbytes, self._seconds = self._cheapest_first()

    def _cheapest_first(self) -> tuple[list[int], list[float]]:
        """Return the bytes that can be dropped for so many seconds, as running sums.

        What an op has made can only be dropped if the op runs again.
        """
        items = []
        for op, made in enumerate(self._facts.makes):
            nbytes = sum(self._facts.nbytes[v] for v in made if self._can_be_dropped(v))
            if nbytes:
                items.append((self._chain_seconds(op, nbytes), nbytes))
        items.sort(key=lambda item: item[0] / item[1])
        nbytes_sums = list(accumulate((nbytes for _, nbytes in items), initial=0))
        return nbytes_sums, list(accumulate((s for s, _ in items), initial=0.0))

    def _chain_seconds(self, op: int, nbytes: int) -> float:
        """Return the seconds of an op, and of those that run only for it.

        To keep what only this op reads, and is no smaller than what it makes, gains nothing over
        keeping what it makes: so the op that made it runs again, too.
        """
        facts, total, todo = self._facts, 0.0, [op]
        while todo:
            op = todo.pop()
            total += facts.seconds[op]
            for read in facts.reads[op]:
                maker = facts.made_by[read]
                is_private = facts.makes[maker] == (read,) and len(facts.readers[read]) == 1
                is_loose = not (facts.users[read] or facts.is_fixed[read] or facts.outlives[read])
                if is_private and is_loose and facts.nbytes[read] >= nbytes:
                    todo.append(maker)
        return total

    def _can_be_dropped(self, value: int) -> bool:
        facts = self._facts
        return bool(facts.users[value]) and not facts.is_fixed[value] and not facts.outlives[value]

    def seconds(self, budget: int) -> float:
        """Return the seconds that every plan within a budget takes at least."""
        bound = self.quick_seconds(budget)
        if bound and importlib.util.find_spec("scipy"):
            bound = max(bound, self._programme(budget - self._always) * _SAFE)
        return bound

    def quick_seconds(self, budget: int) -> float:
        """Return a bound that may be lower, and takes no linear programme.

        SciPy takes half a second and some 50 MB of memory to import.
        """
        to_drop = self._nbytes[-1] - (budget - self._always)
        if to_drop <= 0:
            return 0.0
        place = bisect_right(self._nbytes, to_drop) - 1
        bound = self._seconds[place]
        if place + 1 < len(self._nbytes):  # a part of the next one
            whole = self._nbytes[place + 1] - self._nbytes[place]
            part = (to_drop - self._nbytes[place]) / whole
            bound += part * (self._seconds[place + 1] - self._seconds[place])
        return bound * _SAFE

    def _programme(self, room: int) -> float:
        """Solve the linear programme: what is dropped comes from ops that have what they read."""
        from scipy.optimize import linprog  # noqa: PLC0415  # optional, and slow to import
        from scipy.sparse import coo_array  # noqa: PLC0415

        facts = self._facts
        rows: list[tuple[tuple[int, float], ...]] = []
        limits: list[float] = []
        for value, users in enumerate(facts.users):
            if users and not facts.is_external[value]:
                rows.append(tuple((column, -1.0) for column in self._there(value)))
                limits.append(-1.0)
        for op, reads in enumerate(facts.reads):
            for read in reads:
                rows.append(((op, 1.0), *((column, -1.0) for column in self._there(read))))
                limits.append(0.0)
        counted = [v for v, n in enumerate(facts.nbytes) if n and not facts.outlives[v]]
        rows.append(tuple((facts.count + v, float(facts.nbytes[v])) for v in counted))
        limits.append(float(room + sum(facts.nbytes[v] for v in counted if self._is_fixed_cost(v))))
        entries = [(row, column, w) for row, terms in enumerate(rows) for column, w in terms]
        at, columns, weights = zip(*entries, strict=True)
        width = facts.count + len(facts.nbytes)
        matrix = coo_array((weights, (at, columns)), shape=(len(rows), width)).tocsr()
        costs = np.array([*facts.seconds, *([0.0] * len(facts.nbytes))])
        done: Any = linprog(costs, A_ub=matrix, b_ub=limits, bounds=(0, 1), method="highs")
        return float(done.fun) if done.status == 0 else 0.0

    def _is_fixed_cost(self, value: int) -> bool:
        """Tell whether a value is already taken off the room."""
        facts = self._facts
        return bool(facts.users[value]) and facts.is_fixed[value]

    def _there(self, value: int) -> tuple[int, ...]:
        """Return the columns one of which must be 1 for a value to be there: run, or keep."""
        keep = self._facts.count + value
        made_by = self._facts.made_by[value]
        return (keep,) if self._facts.is_fixed[value] else (made_by, keep)
