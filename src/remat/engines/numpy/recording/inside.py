"""Reports of regions inside of loops: the loop's own account has their memory already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from ....loops import Account
from ....observers import Observer
from ....plans.trace import Trace

__all__ = ["observers_of_region"]


def observers_of_region() -> tuple[Observer, ...]:
    """Return the observers of a region that begins now.

    Those of a loop around it get what the region does, but not what is on the tape of a step. The
    loop is told what a plain step would hold beyond what the region keeps.
    """
    account = Account()
    direct = account.direct_observers
    inside = [each for each in account.observers if each not in direct]
    reports = (_OnTape(each, account if each is inside[0] else None) for each in inside)
    return (*direct, *reports)


class _OnTape:
    """Forwards to an observer that counts the tape which the forward part of a region is on."""

    def __init__(self, observer: Observer, account: Account | None) -> None:
        self._observer = observer
        self._account = account  # to be told, if this is the first observer
        self._is_forward = True
        self._plain: dict[Hashable, int] = {}
        self._kept: set[Hashable] = set()
        self._held: Counter[Hashable] = Counter()  # in backward, how often

    def region_ran(self, name: str) -> int:
        return self._observer.region_ran(name)

    def kept(self, region: int, *, plain: int = 0, held: int = 0) -> None:
        self._observer.kept(region, plain=plain, held=held)
        if not plain and self._is_forward:  # it was closed
            self._is_forward = False
            if self._account is not None:
                dropped = sum(n for key, n in self._plain.items() if key not in self._kept)
                self._account.adds_inside(dropped)

    def would_hold(self, key: Hashable, nbytes: int) -> None:
        self._plain[key] = nbytes

    def would_free(self, key: Hashable) -> None: ...

    def holds(self, key: Hashable, nbytes: int) -> None:
        if self._is_forward:
            self._kept.add(key)
        else:
            self._held[key] += 1
            self._observer.holds(key, nbytes)

    def frees(self, key: Hashable) -> None:
        if self._held[key]:
            self._held[key] -= 1
            self._observer.frees(key)

    def allocated(self, key: Hashable, nbytes: int) -> None: ...

    def freed(self, key: Hashable) -> None: ...

    def recomputed(self, region: int, ops: int, seconds: float) -> None:
        self._observer.recomputed(region, ops, seconds)

    def rounded(self, region: int, error: float) -> None: ...

    def traced(self, region: int, trace: Trace) -> None:
        self._observer.traced(region, trace)
