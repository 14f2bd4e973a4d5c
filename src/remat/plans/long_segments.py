"""Long segments that keep nothing but what later ones read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .facts import Facts
from .options import Choices, Option

__all__ = ["LongSegments"]

_LARGEST_PART = 3  # a segment does not save more than one part in so many of all
_NEAR = 64  # ops at the end of a segment whose backward may start its recomputation


class Row(NamedTuple):
    """What the segments that begin at a cut take, for every cut after it: a row of numbers each."""

    kept: Any  # bytes of what later segments read, which is all that is kept
    need: Any
    seconds: Any
    need_inside: Any  # and if nothing of it is kept at all
    seconds_inside: Any


class LongSegments:
    """Long segments that keep nothing but what later ones read: found from sums, in no time.

    All segments that begin at a cut are looked at together; they end at one of the cuts.
    """

    def __init__(self, facts: Facts, cuts: list[int]) -> None:
        self._facts = facts
        self._cuts = np.array(cuts)
        self._rows: dict[int, Row] = {}
        self._largest = facts.trace.saved_bytes / _LARGEST_PART
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
        outlives = np.array([facts.outlives[v] for v in order], dtype=bool)
        fixed = np.array([facts.is_fixed[v] for v in order], dtype=bool)
        self._always = (self._last_use >= 0) & (fixed | outlives)
        self._held = self._nbytes * ~outlives
        # The places of the first cut after a value is made, and of the first that needs it no more.
        self._first_cut = np.searchsorted(self._cuts, self._made, side="right")
        unneeded = np.searchsorted(self._cuts, self._last_use, side="right")
        self._stop_cut = np.maximum(self._first_cut, unneeded)
        self._stop_cut[self._always] = len(cuts)
        self._gone_cut = np.searchsorted(self._cuts, self._end + 2)  # the program holds it no more
        used = np.bincount(self._made, self._nbytes * (self._use >= 0), facts.count)
        saved = np.concatenate([[0], np.cumsum(used)])
        self._saved_before = saved[self._cuts]
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

    def stops(self, first: int) -> range:
        """Return the places of the cuts where a long segment that begins at a cut may end."""
        saved = self._saved_before - self._saved_before[first]
        return range(first + 2, int(np.searchsorted(saved, self._largest, side="right")))

    def choices(self, first: int, stop: int) -> Choices:
        """Return the one choice of a long segment between two cuts."""
        row = self.row(first)
        here = slice(stop, stop + 1)

        def take(_: int) -> Option:
            kept, need = int(row.kept[stop]), int(row.need[stop])
            return Option(self.keep(first, stop), kept, need, float(row.seconds[stop]))

        return Choices(row.kept[here, None], row.need[here, None], row.seconds[here, None], take)

    def keep(self, first: int, stop: int) -> tuple[int, ...]:
        """Return the values that a segment between two cuts keeps."""
        here = slice(self._first_of[self._cuts[first]], self._first_of[self._cuts[stop]])
        is_kept = (self._last_use[here] >= self._cuts[stop]) | self._always[here]
        return tuple(self._values[here][is_kept].tolist())

    def row(self, first: int) -> Row:
        """Return what all segments that begin at a cut take, by the place of their end.

        (Entries up to the cut itself mean nothing.)
        """
        if first not in self._rows:
            self._rows[first] = self._find_row(first)
        return self._rows[first]

    def _find_row(self, first: int) -> Row:
        start, count = int(self._cuts[first]), self._facts.count - int(self._cuts[first])
        here = slice(self._first_of[start], None)
        nbytes, made = self._nbytes[here], self._made[here] - start
        is_used, held = self._use[here] >= 0, self._held[here]
        span = self._first_cut[here], self._stop_cut[here]
        saved = _sums(made, nbytes * is_used, count)
        used = _sums(np.where(is_used, self._use[here] - start, -1), nbytes * is_used, count)
        freed = np.maximum(self._read[here] - start, made) + 1
        between = _sums(made, nbytes * ~is_used, count) - _sums(freed, nbytes * ~is_used, count)
        ended = np.maximum(self._end[here] - start, made) + 1
        forward = _sums(made, nbytes, count) - _sums(ended, nbytes, count)
        nodes = np.maximum.accumulate(used + self._base_at[start:])
        replay = saved + between

        last = np.maximum(self._cuts - start - 1, 0)  # the last op of each segment
        kept = self._over_cuts(*span, held)
        idle = self._over_cuts(np.maximum(span[0], self._gone_cut[here]), span[1], held)
        base = self._bases(start)
        # What is kept is there when a recomputation begins, and is not made once more.
        made_kept = self._made_kept(made, span, held * is_used, count)
        levels = replay[:, None] + kept - made_kept
        replayed = np.max(np.where(np.arange(count)[:, None] <= last, levels, 0), axis=0)
        need = np.maximum(nodes[last], replayed + base)
        return Row(
            kept,
            np.maximum(need, np.maximum.accumulate(forward)[last] + idle),
            self._seconds_again(start, self._needed_from),
            np.maximum(nodes[last], np.maximum.accumulate(replay)[last] + base),
            self._seconds_again(start, self._needed_inside),
        )

    def _over_cuts(self, begin: Any, end: Any, amounts: Any) -> Any:
        """Add up amounts that count from one cut up to another one."""
        width = len(self._cuts) + 1
        change = np.bincount(begin, amounts, width) - np.bincount(
            np.maximum(begin, end), amounts, width
        )
        return np.cumsum(change)[:-1].astype(np.int64)

    def _made_kept(self, made: Any, span: tuple[Any, Any], held: Any, count: int) -> Any:
        """Return, by op and end, the bytes made up to the op that are kept and used."""
        change = np.zeros((count, len(self._cuts) + 1), dtype=np.int64)
        np.add.at(change, (made, span[0]), held)
        np.add.at(change, (made, np.maximum(*span)), -held)
        return np.cumsum(np.cumsum(change[:, :-1], axis=1), axis=0)

    def _bases(self, start: int) -> Any:
        """Return for each end the most bytes of gradients when the recomputation may begin."""
        first = np.maximum(start, self._cuts - _NEAR)
        return np.array(
            [
                max(self._facts.base_before[begin:stop], default=0)
                for begin, stop in zip(first.tolist(), self._cuts.tolist(), strict=True)
            ]
        )

    def _seconds_again(self, start: int, needed: Any) -> Any:
        """Return for each end the seconds of the ops that run again."""
        at = np.maximum(needed[start:], np.arange(start, self._facts.count) + 1)
        places = np.searchsorted(self._cuts, at)
        return np.cumsum(np.bincount(places, self._seconds[start:], len(self._cuts) + 1))[:-1]


def _sums(at: Any, nbytes: Any, count: int) -> Any:
    """Add up bytes that come at ops, counted from the start; those at -1 never come."""
    total = np.bincount(np.where(at < 0, count, np.minimum(at, count)), nbytes, count + 1)
    return np.cumsum(total[:count]).astype(np.int64)
