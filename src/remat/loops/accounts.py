"""Memory accounting of a region that is run again as a whole, for profilers.

Four rules:
1. Reported is what the pass itself has made: inputs that were made in the same pass, what the
   region makes, and what it keeps. The caller's own arrays are not counted.
2. What a plain pass would hold is measured in a recorded run. So with a profiler a region is
   recorded already in the forward pass: its *measuring run*. Regions inside it report their
   size only, because without a profiler they would just be called.
3. A region that runs inside another one is part of its tape, with its inputs, its results and what
   it keeps. A profiler of both gets the outer one's tape, and the inner one is not counted again.
4. Everything reported as held is reported as freed when autograd frees the graph of the region.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..observers import Observer, observed_by, observers
from .protocols import LoopObserver

__all__ = ["Account", "LoopEvents", "is_inside_a_region"]


class _ThreadAccount(threading.local):
    def __init__(self) -> None:
        self.account: Account | None = None  # of the innermost region that runs


_threads = _ThreadAccount()


def is_inside_a_region() -> bool:
    """Say whether this code is run by a checkpointed region."""
    return _threads.account is not None


class Account:
    """The account of one region; without a profiler it does nothing."""

    def __init__(self) -> None:
        outer = _threads.account
        self._outer = outer
        self._is_measuring = False
        is_measured = outer is not None and outer._is_measuring
        self.observers: tuple[Observer, ...] = () if is_measured else observers()
        known = () if outer is None else outer.observers
        self._direct_observers = tuple(w for w in self.observers if w not in known)
        self.must_measure = is_measured or bool(self.observers)
        self._inner_excess = 0
        self._numbers: list[int] = []
        self._reported_plain: list[Hashable] = []
        self._reported_held: dict[Hashable, tuple[Observer, ...]] = {}
        self._kept: dict[Hashable, int] = {}  # on the tape of the region around
        self._forward: dict[Hashable, int] = {}  # held since the forward pass
        self._forward_bytes = self._forward_peak = 0

    @property
    def direct_observers(self) -> tuple[Observer, ...]:
        """The observers that get nothing of the region around this one."""
        return self._direct_observers

    def begin(self, name: str) -> None:
        self._numbers = [observer.region_ran(name) for observer in self.observers]

    @contextmanager
    def inside(self, *, measuring: bool = False) -> Iterator[None]:
        """Run a region's own code."""
        before, was_measuring = _threads.account, self._is_measuring
        _threads.account, self._is_measuring = self, measuring
        self._inner_excess = 0
        try:
            with observed_by(self.observers):
                yield
        finally:
            _threads.account, self._is_measuring = before, was_measuring

    @property
    def inner_excess(self) -> int:
        """What plain passes of the regions inside would hold beyond what those keep."""
        return self._inner_excess

    def adds_inside(self, nbytes: int) -> None:
        """Tell the region around this one what a plain pass would hold beyond what this keeps."""
        if self._outer is not None:
            self._outer._inner_excess += nbytes

    def add_measured(self, nbytes: int, arrays: Mapping[Hashable, int]) -> None:
        """Report what a plain pass would hold from now on: bytes, and the memory of arrays."""
        if self._outer is not None:
            self._outer._inner_excess += nbytes
        things: dict[Hashable, int] = {object(): nbytes, **arrays}
        for observer, number in zip(self.observers, self._numbers, strict=True):
            observer.kept(number, plain=sum(things.values()))
        for key, size in things.items():
            self._reported_plain.append(key)
            for observer in self._direct_observers:
                observer.would_hold(key, size)

    def keeps_arrays(self, arrays: Mapping[Hashable, int]) -> None:
        """Report arrays that are held from the forward pass on; a plain pass holds them, too."""
        for key, size in arrays.items():
            self._hold(key, size, self._direct_observers, forward=True)

    def keeps(self, key: Hashable, size: int) -> None:
        """Report what else is held from the forward pass on."""
        if self._hold(key, size, self._direct_observers, forward=True) and self._outer is not None:
            self._outer._inner_excess -= size
            self._kept[key] = size

    def holds(self, key: Hashable, size: int) -> None:
        """Report what is held on the backward pass."""
        self._hold(key, size, self.observers)

    def frees(self, key: Hashable) -> None:
        if self._outer is not None:
            self._outer._inner_excess += self._kept.pop(key, 0)
        self._forward_bytes -= self._forward.pop(key, 0)
        for observer in self._reported_held.pop(key, ()):
            observer.frees(key)

    def recomputed(self, ops: int, seconds: float) -> None:
        for observer, number in zip(self.observers, self._numbers, strict=True):
            observer.recomputed(number, ops, seconds)

    def rounded(self, error: float) -> None:
        if error:
            for observer, number in zip(self.observers, self._numbers, strict=True):
                observer.rounded(number, error)

    def _hold(
        self, key: Hashable, size: int, notified: tuple[Observer, ...], *, forward: bool = False
    ) -> bool:
        if key in self._reported_held:
            return False
        self._reported_held[key] = notified
        if forward:
            self._note_forward(key, size)
        for observer in notified:
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
        for key in list(self._reported_held):
            self.frees(key)
        for key in self._reported_plain:
            for observer in self._direct_observers:
                observer.would_free(key)


class LoopEvents:
    """Forwards the events of a loop runner to the account of the loop and to a progress bar."""

    def __init__(
        self,
        account: Account,
        inputs: Mapping[Hashable, int],
        nbytes: Callable[[Any], int],
        progress: LoopObserver | None,
    ) -> None:
        self.is_forward = True  # then what is held is part of the tape of the region around
        self._nbytes = nbytes  # of a state that is held
        self._account = account
        self._inputs = inputs
        self._progress = progress
        self._tape_bytes = 0
        self._step_bytes = 0  # of a plain pass
        self._steps = self._pending = 0  # run forward, and not yet reported
        self._loop = object()  # for keys of its own

    def add_measured(self, tape_bytes: int, *, plain_bytes: int) -> None:
        """Note the sizes of the first step, which has just been run."""
        self._tape_bytes = tape_bytes
        self._step_bytes = plain_bytes + self._account.inner_excess
        self._account.add_measured(0, self._inputs)
        self._account.keeps_arrays(self._inputs)

    def forward(self, steps: int) -> None:
        if self.is_forward:  # a second backward pass runs forward again: a plain pass would not
            self._steps += steps
            self._pending += steps
            if 64 * self._pending >= self._steps:  # not step by step: an event takes memory, too
                self.settle()
        if self._progress:
            self._progress.forward(steps)

    def settle(self) -> None:
        """Report what a plain pass would hold by now."""
        self._account.add_measured(self._pending * self._step_bytes, {})
        self._pending = 0

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
        report = self._account.keeps if self.is_forward else self._account.holds
        report((self._loop, *what), size)
