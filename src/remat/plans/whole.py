"""Long segments that keep nothing but what later ones read."""

from __future__ import annotations

from typing import Any

import numpy as np

from .facts import Facts
from .options import Option

__all__ = ["WholeSegments"]

_LARGEST_PART = 3  # a segment does not save more than one part in so many of all


class WholeSegments:
    """Long segments that keep nothing but what later ones read: found from sums, in no time."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._largest = facts.trace.saved_bytes / _LARGEST_PART
        self._start = -1
        self._seconds = np.array(facts.seconds)
        self._base_before = np.array(facts.base_before)
        self._base_at = np.array(facts.base_at)
        self._needed_from = np.array(self._find_needed())
        # All values in the order of the ops that make them; those of an op begin at `first_of`.
        order = [v for made in facts.makes for v in made]
        self._values = np.array(order, dtype=np.int64)
        self._first_of = np.cumsum([0, *(len(made) for made in facts.makes)])
        self._nbytes = np.array([facts.nbytes[v] for v in order], dtype=np.int64)
        self._made = np.array([facts.made_by[v] for v in order], dtype=np.int64)
        self._use = np.array([(facts.users[v] or [-1])[0] for v in order], dtype=np.int64)
        self._read = np.array([(facts.readers[v] or [-1])[-1] for v in order], dtype=np.int64)
        last = [max(facts.readers[v][-1:] + facts.users[v][-1:], default=-1) for v in order]
        self._last_use = np.array(last, dtype=np.int64)
        self._end = np.array([facts.forward_end[v] for v in order], dtype=np.int64)
        self._outlives = np.array([facts.outlives[v] for v in order], dtype=bool)
        fixed = np.array([facts.is_fixed[v] for v in order], dtype=bool)
        self._always = (self._last_use >= 0) & (fixed | self._outlives)

    def _find_needed(self) -> list[int]:
        """Return for each op the first op of backward that needs what depends on it."""
        facts = self._facts
        first = [facts.count + 1] * facts.count
        for op in reversed(range(facts.count)):
            for made in facts.makes[op]:
                later = [first[r] for r in facts.readers[made]]
                first[op] = min([first[op], *facts.users[made][:1], *later])
        return first

    def fits(self, start: int, stop: int) -> bool:
        """Tell whether a segment is small enough to be looked at."""
        self._begin(start)
        return bool(self._saved[stop - start - 1] <= self._largest)

    def _begin(self, start: int) -> None:
        """Add up everything for segments that begin at an op."""
        if self._start == start:
            return
        self._start = start
        here = slice(self._first_of[start], None)
        nbytes, made = self._nbytes[here], self._made[here] - start
        is_used = self._use[here] >= 0
        self._saved = self._sum(made, nbytes * is_used)
        used = self._sum(np.where(is_used, self._use[here] - start, -1), nbytes * is_used)
        freed = np.maximum(self._read[here] - start, made) + 1
        between = self._sum(made, nbytes * ~is_used) - self._sum(freed, nbytes * ~is_used)
        ended = np.maximum(self._end[here] - start, made) + 1
        forward = self._sum(made, nbytes) - self._sum(ended, nbytes)
        self._nodes = np.maximum.accumulate(used + self._base_at[start:])
        self._replay = np.maximum.accumulate(self._saved + between)
        self._forward = np.maximum.accumulate(forward)

    def _sum(self, at: Any, nbytes: Any) -> Any:
        """Add up bytes that come at ops, counted from the start."""
        count = self._facts.count - self._start
        total = np.zeros(count + 2, dtype=np.int64)  # the last but one: after the end; -1: never
        np.add.at(total, np.minimum(at, count), nbytes)
        return np.cumsum(total[:count])

    def option(self, start: int, stop: int) -> Option:
        """Return the option that keeps what later segments read, and nothing else."""
        self._begin(start)
        last, here = stop - start - 1, slice(self._first_of[start], self._first_of[stop])
        keep = (self._last_use[here] >= stop) | self._always[here]
        kept = int(np.sum((self._nbytes[here] * ~self._outlives[here])[keep]))
        is_needed = self._needed_from[start:stop] < stop
        seconds = float(np.sum(self._seconds[start:stop][is_needed]))
        need = max(self.need_inside(start, stop) + kept, self._forward[last] + kept)
        return Option(tuple(self._values[here][keep].tolist()), kept, int(need), seconds)

    def need_inside(self, start: int, stop: int) -> int:
        """Return what backward needs if nothing of the segment is kept for later ones."""
        self._begin(start)
        last = stop - start - 1
        base = np.max(self._base_before[max(start, stop - 64) : stop])
        return int(max(self._nodes[last], self._replay[last] + base))
