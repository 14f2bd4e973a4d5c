"""Guards of PyTorch's dispatcher that are made once and entered often.

To make one takes as long as to run a small op, to enter it again a tenth of that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

__all__ = ["Guards"]

Guard = AbstractContextManager[None]


class Guards:
    """Guards of one kind. A guard is nobody else's between `take` and `give`.

    So a thread, or a call inside of a call, never enters one that another is inside of.

    >>> from contextlib import nullcontext
    >>> guards = Guards(nullcontext)
    >>> first, second = guards.take(), guards.take()
    >>> first is second
    False
    >>> guards.give(first)
    >>> guards.take() is first
    True
    """

    def __init__(self, make: Callable[[], Guard]) -> None:
        self._make = make
        self._idle: list[Guard] = []
        self.give = self._idle.append

    def take(self) -> Guard:
        try:
            return self._idle.pop()
        except IndexError:
            return self._make()
