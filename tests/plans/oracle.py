"""The staged model as a mixed-integer programme, and brute force: what plans are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from remat.plans import Kind, Plan, Stage, Trace, simulate


class _Rows:
    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.limits: list[float] = []
        self.of_budget: list[float] = []  # how much of the budget is added to each limit

    def add(
        self, terms: Iterable[tuple[int, float]], at_most: float, *, budget: float = 0.0
    ) -> None:
        self.entries += [(len(self.limits), column, weight) for column, weight in terms]
        self.limits.append(at_most)
        self.of_budget.append(budget)


class StagedModel:
    """Keep per value, recompute per op and stage; the memory of every node, replay and op.

    Backward goes through the ops in reverse. A kept value counts from when it is made until the
    last stage that may need it.
    """

    def __init__(self, trace: Trace, firsts: Sequence[int]) -> None:
        self.trace, self.firsts = trace, list(firsts)
        self.ends = [*self.firsts[1:], len(trace.ops)]
        self.rows = _Rows()
        self.columns: dict[object, int] = {}
        self.costs: list[float] = []
        values = trace.values
        self.own = [n for n, v in enumerate(values) if not v.kind.is_external]
        self.base_at, self.base_before = self._gradients()
        self.users = {v: [i for i, op in enumerate(trace.ops) if v in op.saves] for v in self.own}
        self.readers = {v: [i for i, op in enumerate(trace.ops) if v in op.reads] for v in self.own}
        for v in self.own:
            self._column(("keep", v), 0.0)
        for stage in range(len(self.firsts)):
            self._add_stage(stage)
        self._add_forward()

    def _column(self, key: object, cost: float) -> int:
        if key not in self.columns:
            self.columns[key] = len(self.costs)
            self.costs.append(cost)
        return self.columns[key]

    def _keep(self, v: int) -> int:
        return self.columns["keep", v]

    def _gradients(self) -> tuple[list[int], list[int]]:
        values, at, before = self.trace.values, [0] * len(self.trace.ops), [0] * len(self.trace.ops)
        out = sum(v.nbytes for v in values if v.made_by is not None and v.freed_after is None)
        alive: set[int] = set()
        for i in reversed(range(len(self.trace.ops))):
            op = self.trace.ops[i]
            total = out + sum(values[v].nbytes for v in alive)
            before[i] = at[i] = total
            if not op.saves and not any(values[v].requires_grad for v in op.makes):
                continue
            touched = {v for v in (*op.reads, *op.makes) if values[v].requires_grad}
            alive |= {v for v in touched if values[v].kind is not Kind.PARAMETER}
            only = {v for v in touched if values[v].kind is Kind.PARAMETER}
            at[i] = out + sum(values[v].nbytes for v in alive | only) + op.workspace_bytes
            alive -= set(op.makes)
        return at, before

    def _add_stage(self, stage: int) -> None:
        first, end = self.firsts[stage], self.ends[stage]
        ops, values = self.trace.ops, self.trace.values
        uses: dict[int, int] = {}  # the last node of backward in this stage that uses a value
        for i in range(first, end):
            for v in ops[i].saves:
                if not values[v].kind.is_external:
                    uses.setdefault(v, i)
        runs = {j: self._column((j, stage), ops[j].seconds) for j in range(end)}
        for v in uses:  # kept, or recomputed here
            self.rows.add(self._there(v, runs, -1.0), -1.0)
        for j in range(end):
            for u in ops[j].reads:
                if not values[u].kind.is_external:
                    self.rows.add([(runs[j], 1.0), *self._there(u, runs, -1.0)], 0.0)
        earlier = [v for v in self.own if values[v].made_by < end and self._counts(v)]  # type: ignore[operator]
        for i in range(first, end):
            here = {v for v, last in uses.items() if last <= i and self._counts(v)}
            kept = [v for v in earlier if v not in here and self._lasts(v, first, i)]
            fixed = self.base_at[i] + sum(values[v].nbytes for v in here)
            self.rows.add([(self._keep(v), values[v].nbytes) for v in kept], -fixed, budget=1.0)
        base = max(self.base_before[first:end])
        for j in range(end):
            terms = [(self._keep(v), float(values[v].nbytes)) for v in earlier]
            for k in range(j + 1):
                for v in ops[k].makes:
                    stays = v in uses or any(r >= j for r in self.readers[v]) or k == j
                    if stays and self._counts(v):
                        terms.append((runs[k], float(values[v].nbytes)))
            # Only if the op runs: else nothing happens here.
            big = sum(weight for _, weight in terms) + base
            self.rows.add([*terms, (runs[j], big)], big - base, budget=1.0)

    def _there(self, v: int, runs: dict[int, int], sign: float) -> list[tuple[int, float]]:
        terms = [(self._keep(v), sign)]
        if self.trace.values[v].kind is not Kind.FIXED:
            terms.append((runs[self.trace.values[v].made_by], sign))  # type: ignore[index]
        return terms

    def _counts(self, v: int) -> bool:
        return self.trace.values[v].freed_after is not None

    def _lasts(self, v: int, first: int, i: int) -> bool:
        """Whether a kept value may be needed at or after node i, or by an earlier stage."""
        made = self.trace.values[v].made_by
        assert made is not None
        return made < first or any(u <= i for u in self.users[v])

    def _add_forward(self) -> None:
        values = self.trace.values
        for i in range(len(self.trace.ops)):
            live, terms = 0, []
            for v in self.own:
                made, freed = values[v].made_by, values[v].freed_after
                assert made is not None
                if made <= i and (freed is None or freed >= i):
                    live += values[v].nbytes
                elif made <= i:
                    terms.append((self._keep(v), float(values[v].nbytes)))
            self.rows.add(terms, -float(live), budget=1.0)

    def solve(self, budget: int, *, seconds: float = 20.0) -> tuple[float, Plan] | None:
        """Return the optimum, or None if there is none or it is not proved in time."""
        rows, columns, weights = zip(*self.rows.entries, strict=True)
        shape = (len(self.rows.limits), len(self.costs))
        matrix = coo_array((weights, (rows, columns)), shape=shape).tocsr()
        limits = np.array(self.rows.limits) + budget * np.array(self.rows.of_budget)
        done = milp(
            np.array(self.costs),
            constraints=LinearConstraint(matrix, -np.inf, limits),
            integrality=np.ones(len(self.costs)),
            bounds=Bounds(0, 1),
            options={"time_limit": seconds, "mip_rel_gap": 1e-4},
        )
        if done.status != 0:
            return None
        keep = frozenset(v for v in self.own if done.x[self._keep(v)] > 0.5)
        return float(done.fun), Plan(keep, tuple(Stage(first) for first in self.firsts))


def brute_force(trace: Trace, candidates: Sequence[int]) -> list[tuple[int, float]]:
    """Return the (peak, seconds) of all plans that no other beats: all keep sets, all stages."""
    best: dict[int, float] = {}
    inner = range(1, len(trace.ops))
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(inner, size) for size in range(len(trace.ops))
    ):
        stages = tuple(Stage(first) for first in (0, *cuts))
        for size in range(len(candidates) + 1):
            for keep in itertools.combinations(candidates, size):
                done = simulate(trace, Plan(frozenset(keep), stages))
                seconds = best.get(done.peak_bytes, np.inf)
                best[done.peak_bytes] = min(seconds, done.extra_seconds)
    front: list[tuple[int, float]] = []
    for peak in sorted(best):
        if not front or best[peak] < front[-1][1]:
            front.append((peak, best[peak]))
    return front
