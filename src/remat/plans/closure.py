"""Evicts saved values one by one, from any stage: the greedy choice for graphs with long skips.

Segments (`segments.py`) keep all that crosses their ends. Where values are read long after they
were made, as in a U-Net, it can be better to drop such a value and to compute it again in every
stage that needs it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .facts import Facts
from .plan import Plan, Stage

__all__ = ["evictions"]


_MOST_PASSES = 5  # forward passes of recomputation; nobody wants more


def evictions(facts: Facts, firsts: list[int]) -> Iterator[Plan]:
    """Yield plans with these stages: each drops one value more, at the least seconds per byte."""
    eviction = _Eviction(facts, firsts)
    stages = tuple(Stage(first) for first in firsts)
    for keep in eviction.keeps():
        yield Plan(keep, stages)


class _Eviction:
    def __init__(self, facts: Facts, firsts: list[int]) -> None:
        self._facts = facts
        self._keep = {v for saved in facts.saves for v in saved}
        self._seconds = 0.0
        self._again: list[set[int]] = [set() for _ in firsts]  # the ops that each stage runs again
        # The stages that need a value: for their backward, or for what they recompute.
        self._needed_in: list[set[int]] = [set() for _ in facts.nbytes]
        stage = -1
        for op in range(facts.count):
            stage += op in firsts
            for saved in facts.saves[op]:
                self._needed_in[saved].add(stage)

    def keeps(self) -> Iterator[frozenset[int]]:
        facts = self._facts
        heap = [(0.0, v) for v in sorted(self._keep) if not facts.is_fixed[v]]
        heap = [entry for entry in heap if not facts.outlives[entry[1]] and facts.nbytes[entry[1]]]
        most = _MOST_PASSES * facts.trace.seconds
        while heap and self._seconds <= most:
            _, value = heapq.heappop(heap)
            ops = self._ops_again(value)
            seconds = sum(facts.seconds[op] for chain in ops.values() for op in chain)
            price = seconds / facts.nbytes[value]
            if heap and price > heap[0][0]:  # it has become dearer than the next one may be
                heapq.heappush(heap, (price, value))
                continue
            self._seconds += seconds
            self._evict(value, ops)
            yield frozenset(self._keep)

    def _ops_again(self, value: int) -> dict[int, set[int]]:
        """Return the ops that each stage runs again if a value is dropped, besides others."""
        return {stage: self._chain(value, stage) for stage in self._needed_in[value]}

    def _chain(self, value: int, stage: int) -> set[int]:
        facts, found, todo = self._facts, set[int](), [value]
        while todo:
            op = facts.made_by[todo.pop()]
            if op not in found and op not in self._again[stage]:
                found.add(op)
                todo += [read for read in facts.reads[op] if not self._is_kept(read)]
        return found

    def _is_kept(self, value: int) -> bool:
        facts = self._facts
        return value in self._keep or facts.is_fixed[value] or facts.outlives[value]

    def _evict(self, value: int, ops: dict[int, set[int]]) -> None:
        self._keep.discard(value)
        for stage, chain in ops.items():
            self._again[stage] |= chain
            for op in chain:
                for read in self._facts.reads[op]:
                    self._needed_in[read].add(stage)
