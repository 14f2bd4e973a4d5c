"""Plans for a recorded pass that is a chain of layers.

The trace is cut where one layer ends and the next begins. Each layer is measured on the trace, and
the best plan over whole layers is found by the dynamic programme of `chain.py`. It is judged op by
op, beside the plan that `graph.py` makes of the same trace: the one with less recomputation wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from ..errors import BudgetTooSmallError
from ..sizes import format_bytes, parse_budget
from .chain import ChainLayer, ChainPlan, Segment, plan_chain, smallest_chain
from .graph import Search
from .plan import Plan, Stage
from .simulate import Judge
from .trace import Kind, Trace

__all__ = ["LayerChain", "LayerSearch"]


class LayerSearch:
    """The plans of a pass through layers, for all budgets.

    `ends` are the numbers of ops that had run when each layer ended.

    >>> from remat.plans import Kind, Op, Trace, Value
    >>> values = [Value(8, kind=Kind.INPUT)]
    >>> values += [Value(8, made_by=i, freed_after=i + 1) for i in range(9)] + [Value(8, made_by=9)]
    >>> ops = [Op("sin", (i,), (i + 1,), 0.5, saves=(i,)) for i in range(10)]
    >>> LayerSearch(Trace(tuple(ops), tuple(values)), [4, 7, 10]).plan(56)
    Plan(keeps 6 values, 6 stages, peak 56 B, 1.5 s extra)
    """

    def __init__(self, trace: Trace, ends: Sequence[int]) -> None:
        self._trace = trace
        self._ends = ends
        self._over_ops = Search(trace)

    @property
    def memory_bytes(self) -> int:
        return self._over_ops.memory_bytes

    def plan(self, memory_budget: int | float | str) -> Plan:
        """Return the plan with the least recomputation.

        Raises:
            BudgetTooSmallError: No plan fits; the message has the smallest budget that works.
        """
        trace, ends = self._trace, self._ends
        budget = parse_budget(memory_budget, whole=trace.plain_peak)
        found, smallest = self._plan_over_ops(budget)
        if not found or found[0].extra_seconds:
            over_layers = list(_plans_over_layers(LayerChain(trace, ends), budget))
            smallest += [plan.peak_bytes for plan in over_layers]
            found += [plan for plan in over_layers if plan.peak_bytes <= budget]
        if not found:
            raise _too_small(len(ends), min(smallest), budget)
        return replace(
            min(found, key=lambda plan: (plan.extra_seconds, plan.peak_bytes)),
            memory_budget=budget,
            plain_peak_bytes=trace.plain_peak,
            signature=trace.signature,
        )

    def _plan_over_ops(self, budget: int) -> tuple[list[Plan], list[int]]:
        """Return the plan of `graph.py`, or else the smallest budget for which it has one."""
        try:
            return [self._over_ops.plan(budget)], []
        except BudgetTooSmallError as error:
            return [], [] if error.smallest is None else [error.smallest]


def _plans_over_layers(chain: LayerChain, memory_budget: int) -> Iterator[Plan]:
    """Generate the plan that needs least, and the best one within the budget; both judged.

    What is known of whole layers is an upper bound of what they take, so either may fit although
    the other does not.
    """
    if len(chain.layers) < 2:  # nothing can be recomputed
        return
    judge = Judge(chain.trace)
    yield _judged(chain.plan_of(smallest_chain(chain.layers)), judge)
    with suppress(BudgetTooSmallError):
        free = max(0, memory_budget - chain.outliving_bytes)
        yield _judged(chain.plan_of(plan_chain(chain.layers, free)), judge)


def _judged(plan: Plan, judge: Judge) -> Plan:
    peak, seconds, _ = judge.score(plan)
    return replace(plan, peak_bytes=peak, extra_seconds=seconds)


def _too_small(layers: int, smallest: int, budget: int) -> BudgetTooSmallError:
    return BudgetTooSmallError(
        f"this chain of {layers} layers needs at least {smallest} bytes "
        f"({format_bytes(smallest)}) whatever is recomputed, got memory_budget={budget}; give at "
        "least that, or a smaller input",
        smallest=smallest,
    )


class LayerChain:
    """A trace as a chain of layers: `layers[i]` is ops `cuts[i]` to `cuts[i + 1]`.

    `outliving_bytes` are those of results that the program holds all the time, whatever the plan;
    layers do not count them.
    """

    def __init__(self, trace: Trace, ends: Iterable[int]) -> None:
        self.trace = trace
        self._own = [not value.kind.is_external for value in trace.values]
        self._outliving = self._find_outliving()
        self.outliving_bytes = self._bytes(self._outliving)
        self.cuts = self._find_cuts(ends)
        self._crossing = [self._find_crossing(cut) for cut in self.cuts]
        self._saved = [self._find_saved(*part) for part in pairwise(self.cuts)]
        gradients = self._backward_bytes()
        self.layers = [
            self._measure(number, gradients[first:stop])
            for number, (first, stop) in enumerate(pairwise(self.cuts))
        ]

    def _find_cuts(self, ends: Iterable[int]) -> list[int]:
        """Return where layers end; one that writes to its input belongs to the layer before."""
        count = len(self.trace.ops)
        inside: set[int] = set()
        for value in self.trace.values:
            if value.overwrites is None or value.made_by is None:
                continue
            before = self.trace.values[value.overwrites].made_by
            if before is not None:
                inside.update(range(before + 1, value.made_by + 1))
        inner = {end for end in ends if 0 < end < count} - inside
        return [0, *sorted(inner), count] if count else [0]

    def _find_crossing(self, cut: int) -> frozenset[int]:
        """Return the values that are made before a cut and needed at or after it."""
        ops, values = self.trace.ops, self.trace.values
        if cut == len(ops):
            return self._outliving
        needed = {n for op in ops[cut:] for n in (*op.reads, *op.saves)}
        return frozenset(n for n in needed if self._own[n] and (values[n].made_by or 0) < cut)

    def _find_outliving(self) -> frozenset[int]:
        values = enumerate(self.trace.values)
        outliving = [number for number, value in values if value.freed_after is None]
        return frozenset(n for n in outliving if self._own[n] and not self._is_callers(n))

    def _is_callers(self, number: int) -> bool:
        """Return whether a value is in memory of the caller, as a buffer that was updated."""
        before = self.trace.values[number].overwrites
        while before is not None and self._own[before]:
            before = self.trace.values[before].overwrites
        return before is not None

    def _find_saved(self, first: int, stop: int) -> frozenset[int]:
        saved = (number for op in self.trace.ops[first:stop] for number in op.saves)
        return frozenset(number for number in saved if self._own[number])

    # -- what layers are like ----------------------------------------------------------------------

    def _measure(self, number: int, gradients: list[int]) -> ChainLayer:
        first, stop = self.cuts[number], self.cuts[number + 1]
        before, after = self._crossing[number], self._crossing[number + 1]
        tape = (self._saved[number] | after) - before - self._outliving
        incoming = self._gradient_bytes(before) if number else self._input_gradient_bytes(stop)
        outgoing = self._gradient_bytes(after)
        is_last = stop == self.cuts[-1]
        # Why the gradient? It is all that counts of what the program holds.
        outputs = outgoing if is_last else self._bytes(after - self._outliving)
        live = self._live_bytes(first, stop) - (0 if is_last else outputs)
        return ChainLayer(
            seconds=sum(op.seconds for op in self.trace.ops[first:stop]),
            output_bytes=outputs,
            tape_bytes=self._bytes(tape),
            input_gradient_bytes=incoming,
            forward_workspace_bytes=max(0, live),
            backward_workspace_bytes=max(0, max(gradients) - incoming - outgoing),
        )

    def _bytes(self, numbers: Iterable[int]) -> int:
        return sum(self.trace.values[number].nbytes for number in numbers)

    def _gradient_bytes(self, numbers: Iterable[int]) -> int:
        values = self.trace.values
        return self._bytes(number for number in numbers if values[number].requires_grad)

    def _input_gradient_bytes(self, stop: int) -> int:
        """Return the bytes of the gradients of what the first layer gets from the caller."""
        values = self.trace.values
        reads = {number for op in self.trace.ops[:stop] for number in op.reads}
        return self._gradient_bytes(n for n in reads if values[n].kind is Kind.INPUT)

    def _live_bytes(self, first: int, stop: int) -> int:
        """Return the most bytes of its own that a layer holds if nothing of it is kept."""
        values, live, most = self.trace.values, 0, 0
        freed: dict[int, int] = {}
        for number, op in enumerate(self.trace.ops[first:stop], first):
            made = [n for n in op.makes if n not in self._outliving]
            made = [n for n in made if values[n].overwrites is None]  # others are there already
            live += self._bytes(made)
            most = max(most, live)
            for value in made:
                end = values[value].freed_after
                if end is not None and end < stop:
                    freed[end] = freed.get(end, 0) + values[value].nbytes
            live -= freed.pop(number, 0)
        return most

    def _backward_bytes(self) -> list[int]:
        """Return the bytes of gradients and workspace while the backward of each op runs."""
        values, alive = self.trace.values, dict[int, int]()
        found = [0] * len(self.trace.ops)
        for number in self.trace.backward_order:
            op = self.trace.ops[number]
            only_here = op.workspace_bytes
            for value in dict.fromkeys((*op.makes, *op.reads)):
                if not values[value].requires_grad:
                    continue
                if values[value].kind is Kind.PARAMETER:
                    only_here += values[value].nbytes
                else:
                    alive[value] = values[value].nbytes
            found[number] = sum(alive.values()) + only_here
            for value in op.makes:
                alive.pop(value, None)
        return found

    # -- plans -------------------------------------------------------------------------------------

    def plan_of(self, plan: ChainPlan) -> Plan:
        """Return what a plan over layers means for the ops and values of the trace."""
        return Plan(self._held(plan.steps), tuple(self._stages(plan.steps, frozenset())))

    def _held(self, steps: Iterable[int | Segment]) -> frozenset[int]:
        """Return what is held of a row: tapes, and what segments begin with."""
        return frozenset[int]().union(
            *(
                self._crossing[step.layers[0]] if isinstance(step, Segment) else self._saved[step]
                for step in steps
            )
        )

    def _stages(self, steps: Sequence[int | Segment], hold: frozenset[int]) -> Iterator[Stage]:
        """Generate the stages of a row: layers side by side are one, segments are rows."""
        groups = _groups(steps)
        for group in groups:
            if isinstance(group, Segment):
                *before, _ = _groups(group.steps)
                earlier = [s for g in before for s in ([g] if isinstance(g, Segment) else g)]
                yield from self._stages(group.steps, self._held(earlier))
            else:
                yield Stage(self.cuts[group[0]], hold if group is groups[-1] else frozenset())


def _groups(steps: Iterable[int | Segment]) -> list[Segment | list[int]]:
    """Return the steps with layers that stand side by side put together.

    >>> _groups([0, 1, Segment((2, 3)), 4])
    [[0, 1], Segment(steps=(2, 3)), [4]]
    """
    groups: list[Segment | list[int]] = []
    for step in steps:
        if isinstance(step, Segment):
            groups.append(step)
        elif groups and isinstance(groups[-1], list):
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups
