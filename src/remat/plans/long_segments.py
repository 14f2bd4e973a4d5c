"""Long segments that keep nothing but what later ones read."""

from __future__ import annotations

from typing import Any

import numpy as np

from .facts import Facts
from .options import Option

__all__ = ["LongSegments"]

_LARGEST_PART = 3  # a segment does not save more than one part in so many of all


class LongSegments:
    """Long segments that keep nothing but what later ones read: found from sums, in no time."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._largest = facts.trace.saved_bytes / _LARGEST_PART
        self._start = -1
        self._seconds = np.array(facts.seconds)
        self._base_before = np.array(facts.base_before)
        self._base_at = np.array(facts.base_at)
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
        self._needed_from = self._find_needed(is_kept=True)
        self._needed_inside = self._find_needed(is_kept=False)

    def _find_needed(self, *, is_kept: bool) -> Any:
        """Return for each op the first end of a segment with which it has to run again.

        It has to if backward uses in the segment what it makes, or what is made of that. If
        `is_kept`, what is used beyond the end is kept, so nothing runs again for its sake.
        """
        facts, never = self._facts, self._facts.count + 1
        first = [never] * facts.count
        for op in reversed(range(facts.count)):
            for made in facts.makes[op]:
                users, readers = facts.users[made], facts.readers[made]
                if facts.is_fixed[made] or facts.outlives[made]:
                    continue
                use = min([first[r] for r in readers] + [u + 1 for u in users[:1]], default=never)
                if is_kept:
                    use = max([use, *(n + 1 for n in (*readers[-1:], *users[-1:]))])
                first[op] = min(first[op], use)
        return np.array(first, dtype=np.int64)

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
        self._replay = self._saved + between
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
        here = slice(self._first_of[start], self._first_of[stop])
        keep = (self._last_use[here] >= stop) | self._always[here]
        nbytes = self._nbytes[here] * (keep & ~self._outlives[here])
        is_needed = self._needed_from[start:stop] <= stop
        need = max(
            self._nodes[stop - start - 1],
            self._replay_with(nbytes, start, stop) + self._base(start, stop),
            self._forward[stop - start - 1] + np.sum(nbytes[self._end[here] < stop - 1]),
        )
        values = tuple(self._values[here][keep].tolist())
        seconds = float(np.sum(self._seconds[start:stop][is_needed]))
        return Option(values, int(np.sum(nbytes)), int(need), seconds)

    def _replay_with(self, kept: Any, start: int, stop: int) -> int:
        """Return the most bytes of a recomputation: what is kept is there from its beginning."""
        count = stop - start
        here = slice(self._first_of[start], self._first_of[stop])
        made = np.zeros(count, dtype=np.int64)
        np.add.at(made, self._made[here] - start, kept * (self._use[here] >= 0))
        return int(np.max(self._replay[:count] - np.cumsum(made)) + np.sum(kept))

    def _base(self, start: int, stop: int) -> int:
        """Return the most bytes of gradients when the recomputation may begin."""
        return int(np.max(self._base_before[max(start, stop - 64) : stop]))

    def inside(self, start: int, stop: int) -> tuple[int, float]:
        """Return what a segment needs and costs if nothing of it is kept at all."""
        self._begin(start)
        count = stop - start
        need = max(self._nodes[count - 1], np.max(self._replay[:count]) + self._base(start, stop))
        is_needed = self._needed_inside[start:stop] <= stop
        return int(need), float(np.sum(self._seconds[start:stop][is_needed]))
