"""What a region that is run again as a whole tells those who watch it.

Four rules:
1. Told is what the pass itself has made: arrays that go in and were made in the same pass, what
   the region makes, and what it keeps. What the caller brings is his own.
2. What a plain pass would hold is known from a recorded run, weighed. So whoever is watched is
   recorded already on the way ahead: that is its *rehearsal*. Regions inside a rehearsal tell
   nothing but their weight: without anybody watching they would just be called.
3. A region that runs inside another one stands on its tape, with its inputs, its results and
   what it keeps. Whoever watches both is told of the outer one's tape, and not again.
4. Whatever was told to be held is taken back when the region is gone: when autograd's graph is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..observers import Observer, observed_by, observers
from .runner import Watcher as LoopWatcher

__all__ = ["Account", "LoopTales", "is_inside_a_region"]


class _Threads(threading.local):
    def __init__(self) -> None:
        self.account: Account | None = None  # of the innermost region that runs


_threads = _Threads()


def is_inside_a_region() -> bool:
    """Say whether this code is run by a checkpointed region."""
    return _threads.account is not None


class Account:
    """What one region tells; with nobody watching it says nothing, and costs as little."""

    def __init__(self) -> None:
        outer = _threads.account
        self._outer = outer
        self._is_rehearsing = False
        is_rehearsed = outer is not None and outer._is_rehearsing
        self.observers: tuple[Observer, ...] = () if is_rehearsed else observers()
        known = () if outer is None else outer.observers
        self._strangers = tuple(w for w in self.observers if w not in known)
        self.must_weigh = is_rehearsed or bool(self.observers)
        self._inner_excess = 0
        self._numbers: list[int] = []
        self._told_plain: list[Hashable] = []
        self._told_held: dict[Hashable, tuple[Observer, ...]] = {}
        self._kept: dict[Hashable, int] = {}  # on the tape of the region around
        self._forward: dict[Hashable, int] = {}  # held since the forward pass
        self._forward_bytes = self._forward_peak = 0

    def begin(self, name: str) -> None:
        self._numbers = [observer.region_ran(name) for observer in self.observers]

    @contextmanager
    def inside(self, *, rehearsing: bool = False) -> Iterator[None]:
        """Run a region's own code."""
        before, was_rehearsing = _threads.account, self._is_rehearsing
        _threads.account, self._is_rehearsing = self, rehearsing
        self._inner_excess = 0
        try:
            with observed_by(self.observers):
                yield
        finally:
            _threads.account, self._is_rehearsing = before, was_rehearsing

    @property
    def inner_excess(self) -> int:
        """What plain passes of the regions inside would hold beyond what those keep."""
        return self._inner_excess

    def weighed(self, nbytes: int, arrays: Mapping[Hashable, int]) -> None:
        """Tell what a plain pass would hold from now on: bytes, and the memory of arrays."""
        if self._outer is not None:
            self._outer._inner_excess += nbytes
        things: dict[Hashable, int] = {object(): nbytes, **arrays}
        for observer, number in zip(self.observers, self._numbers, strict=True):
            observer.kept(number, plain=sum(things.values()))
        for key, size in things.items():
            self._told_plain.append(key)
            for observer in self._strangers:
                observer.would_hold(key, size)

    def keeps_arrays(self, arrays: Mapping[Hashable, int]) -> None:
        """Tell which arrays are held from the way ahead on; a plain pass would hold them, too."""
        for key, size in arrays.items():
            self._hold(key, size, self._strangers, forward=True)

    def keeps(self, key: Hashable, size: int) -> None:
        """Tell what else is held from the way ahead on."""
        if self._hold(key, size, self._strangers, forward=True) and self._outer is not None:
            self._outer._inner_excess -= size
            self._kept[key] = size

    def holds(self, key: Hashable, size: int) -> None:
        """Tell what is held on the way back."""
        self._hold(key, size, self.observers)

    def frees(self, key: Hashable) -> None:
        if self._outer is not None:
            self._outer._inner_excess += self._kept.pop(key, 0)
        self._forward_bytes -= self._forward.pop(key, 0)
        for observer in self._told_held.pop(key, ()):
            observer.frees(key)

    def recomputed(self, ops: int, seconds: float) -> None:
        for observer, number in zip(self.observers, self._numbers, strict=True):
            observer.recomputed(number, ops, seconds)

    def rounded(self, error: float) -> None:
        if error:
            for observer, number in zip(self.observers, self._numbers, strict=True):
                observer.rounded(number, error)

    def _hold(
        self, key: Hashable, size: int, told: tuple[Observer, ...], *, forward: bool = False
    ) -> bool:
        if key in self._told_held:
            return False
        self._told_held[key] = told
        if forward:
            self._note_forward(key, size)
        for observer in told:
            observer.holds(key, size)
        return True

    def _note_forward(self, key: Hashable, size: int) -> None:
        """Tell how much the region holds for backward: at most, for loops free states as well."""
        self._forward[key] = size
        self._forward_bytes += size
        more = self._forward_bytes - self._forward_peak
        if more > 0:
            self._forward_peak = self._forward_bytes
            for observer, number in zip(self.observers, self._numbers, strict=True):
                observer.kept(number, held=more)

    def __del__(self) -> None:
        for key in list(self._told_held):
            self.frees(key)
        for key in self._told_plain:
            for observer in self._strangers:
                observer.would_free(key)


class LoopTales:
    """What the runner of a loop says, for the account of the loop and for a progress bar."""

    def __init__(
        self,
        account: Account,
        inputs: Mapping[Hashable, int],
        nbytes: Callable[[Any], int],
        progress: LoopWatcher | None,
    ) -> None:
        self.is_ahead = True  # then what is held stands on the tape of the region around
        self._nbytes = nbytes  # of a state that is held
        self._account = account
        self._inputs = inputs
        self._progress = progress
        self._tape_bytes = 0
        self._step_bytes = 0  # of a plain pass
        self._steps = self._untold = 0  # run ahead, and not yet told
        self._loop = object()  # for keys of its own

    def weighed(self, tape_bytes: int, *, plain_bytes: int) -> None:
        """Take note of what the first step leaves behind, which has just been run."""
        self._tape_bytes = tape_bytes
        self._step_bytes = plain_bytes + self._account.inner_excess
        self._account.weighed(0, self._inputs)
        self._account.keeps_arrays(self._inputs)

    def forward(self, steps: int) -> None:
        if self.is_ahead:  # a second way back runs ahead once more: a plain pass would not
            self._steps += steps
            self._untold += steps
            if 64 * self._untold >= self._steps:  # not step by step: a tale takes memory, too
                self.settle()
        if self._progress:
            self._progress.forward(steps)

    def settle(self) -> None:
        """Tell what a plain pass would hold by now."""
        self._account.weighed(self._untold * self._step_bytes, {})
        self._untold = 0

    def recompute(self, steps: int) -> None:
        if self._progress:
            self._progress.recompute(steps)

    def backward(self, steps: int) -> None:
        if self._progress:
            self._progress.backward(steps)

    def holds_state(self, step: int, state: Any, nbytes: int | None) -> None:
        self._hold(("state", step), self._nbytes(state) if nbytes is None else nbytes)

    def frees_state(self, step: int) -> None:
        self._account.frees((self._loop, "state", step))

    def holds_tape(self, step: int) -> None:
        self._hold(("tape", step), self._tape_bytes)

    def frees_tape(self, step: int) -> None:
        self._account.frees((self._loop, "tape", step))

    def _hold(self, what: tuple[str, int], size: int) -> None:
        tell = self._account.keeps if self.is_ahead else self._account.holds
        tell((self._loop, *what), size)
