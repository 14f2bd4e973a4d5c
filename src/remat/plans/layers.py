"""A recorded pass as a chain: the trace is cut, and what is between two cuts is a layer.

Each layer is measured on the trace: what crosses its ends, what it saves, its gradients. A plan of
`chain.py` over these layers is a plan of the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from .chain import ChainLayer, ChainPlan, Part, Segment, Step
from .facts import Facts
from .plan import Plan, Stage
from .trace import Kind

__all__ = ["LayerChain", "choose_cuts"]

_MOST_LAYERS = 48


def choose_cuts(facts: Facts) -> list[int]:
    """Return the ops before which few bytes cross, the first and the end included.

    What crosses and backward does not use anyway counts twice.
    """
    change = [0] * (facts.count + 1)
    for value, users in enumerate(facts.users):
        last = max(facts.readers[value][-1:] + users[-1:], default=-1)
        if not facts.is_external[value] and last > facts.made_by[value]:
            weight = facts.nbytes[value] * (1 if users else 2)
            change[facts.made_by[value] + 1] += weight
            change[last + 1] -= weight
    score = list(accumulate(change))
    inner = list(range(1, facts.count))
    if len(inner) >= _MOST_LAYERS:
        inner = [c for c in inner if score[c - 1] >= score[c] <= score[c + 1]]
        window = math.ceil(facts.count / (_MOST_LAYERS - 1))
        # Of equal ones the first: ops that read the same stand together.
        best = {c // window: c for c in sorted(inner, key=lambda c: (-score[c], -c))}
        inner = sorted(best.values())
    return [0, *inner, facts.count] if facts.count else [0]


class LayerChain:
    """A trace as a chain of layers: `layers[i]` is ops `cuts[i]` to `cuts[i + 1]`.

    `outliving_bytes` are those of results that the program holds all the time, whatever the plan;
    layers do not count them. `crossing[i]` is what is needed beyond `cuts[i]`, and `gradients` are
    the bytes of gradients and workspace in the backward of each op.
    """

    def __init__(self, facts: Facts, ends: Iterable[int]) -> None:
        self.trace = facts.trace
        self._own = [not is_external for is_external in facts.is_external]
        self._outliving = self._find_outliving()
        self.outliving_bytes = self._bytes(self._outliving)
        self.cuts = self._find_cuts(ends)
        self._last_needed = self._find_last_needed()
        self.crossing = [self._find_crossing(cut) for cut in self.cuts]
        self._saved = [self._find_saved(*part) for part in pairwise(self.cuts)]
        self.gradients = facts.gradient_bytes
        self.layers = [
            self._measure(number, self.gradients[first:stop])
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

    def _find_last_needed(self) -> list[int]:
        last = [-1] * len(self.trace.values)
        for number, op in enumerate(self.trace.ops):
            for value in (*op.reads, *op.saves):
                last[value] = number
        return last

    def _find_crossing(self, cut: int) -> frozenset[int]:
        """Return the values that are made before a cut and needed at or after it."""
        if cut == len(self.trace.ops):
            return self._outliving
        crossing = (n for n, last in enumerate(self._last_needed) if last >= cut and self._own[n])
        return frozenset(n for n in crossing if (self.trace.values[n].made_by or 0) < cut)

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
        before, after = self.crossing[number], self.crossing[number + 1]
        tape = (self._saved[number] | after) - before - self._outliving
        incoming = self.gradient_bytes(before) if number else self._input_gradient_bytes(stop)
        outgoing = self.gradient_bytes(after)
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

    def gradient_bytes(self, numbers: Iterable[int]) -> int:
        values = self.trace.values
        return self._bytes(number for number in numbers if values[number].requires_grad)

    def _input_gradient_bytes(self, stop: int) -> int:
        """Return the bytes of the gradients of what the first layer gets from the caller."""
        values = self.trace.values
        reads = {number for op in self.trace.ops[:stop] for number in op.reads}
        return self.gradient_bytes(n for n in reads if values[n].kind is Kind.INPUT)

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

    # -- plans -------------------------------------------------------------------------------------

    def plan_of(self, plan: ChainPlan) -> Plan:
        """Return what a plan over layers means for the ops and values of the trace."""
        return Plan(self._held(plan.steps), tuple(self._stages(plan.steps, frozenset())))

    def _held(self, steps: Iterable[Step]) -> frozenset[int]:
        """Return what is held of a row: tapes, and what segments and parts begin with."""
        return frozenset[int]().union(*map(self._held_by, steps))

    def _held_by(self, step: Step) -> frozenset[int]:
        if isinstance(step, Segment):
            return self.crossing[step.layers[0]]
        if isinstance(step, Part):
            return self.crossing[step.first] | step.keep
        return self._saved[step]

    def _stages(self, steps: Sequence[Step], hold: frozenset[int]) -> Iterator[Stage]:
        """Generate the stages of a row: layers side by side are one, segments are rows."""
        groups = _groups(steps)
        for group in groups:
            if isinstance(group, Segment):
                *before, _ = _groups(group.steps)
                earlier = [s for g in before for s in (g if isinstance(g, list) else [g])]
                yield from self._stages(group.steps, self._held(earlier))
            elif isinstance(group, Part):
                yield Stage(self.cuts[group.first])
            else:
                yield Stage(self.cuts[group[0]], hold if group is groups[-1] else frozenset())


def _groups(steps: Iterable[Step]) -> list[Segment | Part | list[int]]:
    """Return the steps with layers that stand side by side put together.

    >>> _groups([0, 1, Segment((2, 3)), 4])
    [[0, 1], Segment(steps=(2, 3)), [4]]
    """
    groups: list[Segment | Part | list[int]] = []
    for step in steps:
        if not isinstance(step, int):
            groups.append(step)
        elif groups and isinstance(groups[-1], list):
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups
