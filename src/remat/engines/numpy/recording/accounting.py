"""Reports to profilers what a plain pass would hold, and what a region holds."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ....loops import Account
from ..memory_measure import memories

__all__ = ["RegionAccounting", "accounting_of"]


def accounting_of(name: str) -> RegionAccounting | None:
    """Return the accounting of a region that begins; None without a profiler."""
    account = Account()
    account.begin(name)
    return RegionAccounting(account) if account.must_measure else None


class RegionAccounting:
    """Reports arrays by the memory that they are in."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._plain: dict[Hashable, int] = {}
        self._held: dict[Hashable, int] = {}
        self._holders: dict[Hashable, int] = {}  # arrays that are held, by their memory

    def needs(self, array: Any) -> None:
        """A plain pass would hold an array from now on."""
        new = {key: n for key, n in memories(_flat(array)).items() if key not in self._plain}
        if new:
            self._plain |= new
            if self._account.observers:
                self._account.add_measured(0, new)

    def holds(self, array: Any, *, forward: bool) -> None:
        """An array is held from now on."""
        found = memories(_flat(array))
        for key in found:
            self._holders[key] = self._holders.get(key, 0) + 1
        if forward:
            self._held |= found
            self._account.keeps_arrays(found)
        else:
            for key, size in found.items():
                self._account.holds(key, size)

    def frees(self, array: Any) -> None:
        for key in memories(_flat(array)):
            self._holders[key] = left = self._holders.get(key, 1) - 1
            if not left:
                del self._holders[key]
                self._account.frees(key)

    def closes(self) -> None:
        """Report to the call around it, if it is measured, what a plain pass would add."""
        if not self._account.observers:
            dropped = sum(n for key, n in self._plain.items() if key not in self._held)
            self._account.add_measured(dropped, {})

    def recomputed(self, ops: int, seconds: float) -> None:
        self._account.recomputed(ops, seconds)


def _flat(array: Any) -> list[Any]:
    if isinstance(array, list | tuple):
        return [leaf for part in array for leaf in _flat(part)]
    return [array]
