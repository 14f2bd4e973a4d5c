"""The rule of what is dropped first: what costs the fewest seconds per byte to compute again.

The seconds are those of all ops that run again for a value, back to what is held. They rise as more
is dropped, so a value is priced when it may be the cheapest, and again when others were dropped
since. A first pass, which nobody has planned yet, follows the same rule as plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import count
from typing import TypeVar

__all__ = ["cheapest_first", "ops_again"]

_V = TypeVar("_V")
_O = TypeVar("_O", bound=Hashable)


def ops_again(
    values: Iterable[_V],
    maker: Callable[[_V], _O],
    reads: Callable[[_O], Iterable[_V]],
    is_there: Callable[[_V], bool],
) -> dict[_O, None]:
    """Return the ops that compute values from what is there, each once.

    >>> list(ops_again("c", {"a": 0, "b": 1, "c": 2}.get, ["", "a", "b"].__getitem__, "a".__eq__))
    [2, 1]
    """
    ops: dict[_O, None] = {}
    todo = list(values)
    while todo:
        op = maker(todo.pop())
        if op not in ops:
            ops[op] = None
            todo += [read for read in reads(op) if not is_there(read)]
    return ops


def cheapest_first(
    candidates: Iterable[tuple[float, _V]], price: Callable[[_V], float]
) -> Iterator[_V]:
    """Yield values, the one with the lowest price first.

    Candidates come with a price that theirs is not below. Whoever takes a value may drop it before
    asking for the next one: a price that has risen is looked at again.

    >>> list(cheapest_first([(0, "a"), (0, "b"), (2, "c")], {"a": 3, "b": 1, "c": 2}.__getitem__))
    ['b', 'c', 'a']
    """
    numbers = count()
    heap = [(least, next(numbers), value) for least, value in candidates]
    heapq.heapify(heap)
    while heap:
        _, number, value = heapq.heappop(heap)
        now = price(value)
        if heap and (now, number) > heap[0][:2]:
            heapq.heappush(heap, (now, number, value))
        else:
            yield value
