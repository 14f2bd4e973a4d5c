"""What can be done with a few layers in a row, besides to keep all of their tapes or nothing.

What crosses their ends is held. Of what their backward needs, one value after the other is dropped
(`eviction.py`), and what is dropped is recomputed in one go when backward comes to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from .chain import Part
from .eviction import cheapest_first, ops_again
from .facts import Facts
from .layers import LayerChain

__all__ = ["find_parts"]

_TOGETHER = 4  # layers at most
_WAYS = 8  # of each row of layers, from all of its tapes to none


class _Way(NamedTuple):
    nbytes: int
    keep: frozenset[int]
    again: frozenset[int]  # ops


def find_parts(facts: Facts, chain: LayerChain) -> Iterator[Part]:
    """Generate what can be done with all rows of a few layers."""
    count = len(chain.layers)
    for first in range(count):
        for stop in range(first + 1, min(first + _TOGETHER, count) + 1):
            row = _Row(facts, chain, first, stop)
            yield from map(row.part, row.ways())


class _Row:
    """Layers from `first` up to `stop`."""

    def __init__(self, facts: Facts, chain: LayerChain, first: int, stop: int) -> None:
        self._facts, self._chain = facts, chain
        self._layers = first, stop
        self._ops = range(chain.cuts[first], chain.cuts[stop])
        own = {v for op in self._ops for v in facts.makes[op]}
        self._saved = own.intersection(v for op in self._ops for v in facts.saves[op])
        bound = {v for v in own if facts.is_bound[v]}
        self._forced = bound | (own & chain.crossing[stop])

    def ways(self) -> list[_Way]:
        """Return some ways, evenly from what holds the most bytes to what holds the fewest."""
        found = list(self._evict())
        most, least = found[0].nbytes, found[-1].nbytes
        levels = (most - (most - least) * n // (_WAYS - 1) for n in range(_WAYS))
        chosen = [next(way for way in found if way.nbytes <= level) for level in levels]
        return list(dict.fromkeys(chosen))

    def _evict(self) -> Iterator[_Way]:
        facts, start = self._facts, self._ops.start
        keep, again = self._saved | self._forced, set[int]()

        def is_there(value: int) -> bool:
            maker = facts.made_by[value]
            return value in keep or maker < start or maker in again

        def ops_of(value: int) -> dict[int, None]:
            return ops_again([value], facts.made_by.__getitem__, facts.reads.__getitem__, is_there)

        def price(value: int) -> float:
            if value not in keep:
                return 0.0
            return sum(facts.seconds[op] for op in ops_of(value)) / max(1, facts.nbytes[value])

        nbytes = sum(facts.held_bytes[v] for v in keep)
        yield _Way(nbytes, frozenset(keep), frozenset())
        for value in cheapest_first([(0.0, v) for v in sorted(keep - self._forced)], price):
            if value in keep:
                ops = ops_of(value)
                again.update(ops)
                # What comes with an op that runs again need not be kept.
                gone = {v for op in ops for v in facts.makes[op]} & keep - self._forced
                keep -= gone
                nbytes -= sum(facts.held_bytes[v] for v in gone)
                yield _Way(nbytes, frozenset(keep), frozenset(again))

    def part(self, way: _Way) -> Part:
        facts, (first, stop) = self._facts, self._layers
        missing = self._saved - way.keep
        replayed = self._replay_bytes(way) + self._chain.gradient_bytes(self._chain.crossing[stop])
        passing = max(la.forward_workspace_bytes for la in self._chain.layers[first:stop])
        gradients = self._chain.gradients[self._ops.start : self._ops.stop]
        return Part(
            first,
            stop,
            sum(facts.seconds[op] for op in way.again),
            way.nbytes,
            way.nbytes + passing,
            way.nbytes + sum(facts.held_bytes[v] for v in missing) + max(replayed, *gradients),
            way.keep,
        )

    def _replay_bytes(self, way: _Way) -> int:
        """Return the most bytes that a recomputation makes and nothing but itself needs."""
        facts, last = self._facts, dict[int, int]()
        for op in sorted(way.again):
            last.update(dict.fromkeys((*facts.makes[op], *facts.reads[op]), op))
        change: dict[int, int] = {}
        for op in sorted(way.again):
            for made in facts.makes[op]:
                if made not in self._saved:
                    change[op] = change.get(op, 0) + facts.nbytes[made]
                    change[last[made] + 1] = change.get(last[made] + 1, 0) - facts.nbytes[made]
        return max(accumulate(change[op] for op in sorted(change)), default=0)
