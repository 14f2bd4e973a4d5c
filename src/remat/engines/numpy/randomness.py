"""Snapshot and restore of the random generators that a step may draw from.

Always among them are `numpy.random` and `random`; generators that the step closes over are added
by the search in `captures.py`. A state that does not change is kept once, so a loop without
randomness pays nothing for each checkpoint.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["GENERATORS", "GeneratorStates", "Randomness"]

# (Where random.SystemRandom gets its numbers cannot be held: a re-run is found to differ.)
GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)

GeneratorStates = tuple[Any, ...]  # one for each generator


class _Source(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


class Randomness:
    """All generators together: `snapshot()` and `restore(snapshot)`."""

    def __init__(self, generators: list[Any]) -> None:
        self._sources = [
            _Source("numpy.random", lambda: np.random.get_state(legacy=False), np.random.set_state),
            _source(_python_generator()),
            *(_source(g) for g in generators if not isinstance(g, random.SystemRandom)),
        ]
        self._known: list[Any] = [source.read() for source in self._sources]
        self._active = list(range(len(self._sources)))

    @property
    def last_snapshot(self) -> GeneratorStates:
        """The latest snapshot."""
        return tuple(self._known)

    @property
    def is_used(self) -> bool:
        return bool(self._active)

    def snapshot(self) -> GeneratorStates:
        """Return the state of every generator; one that did not change is the same object."""
        for i in self._active:
            now = self._sources[i].read()
            if not _same(now, self._known[i]):
                self._known[i] = now
        return tuple(self._known)

    def difference(self, one: GeneratorStates, other: GeneratorStates) -> str | None:
        """Name the first generator whose states differ."""
        for source, a, b in zip(self._sources, one, other, strict=True):
            if a is not b and not _same(a, b):
                return source.name
        return None

    def restore(self, state: GeneratorStates) -> None:
        """Set every generator to its state in a snapshot."""
        for i in self._active:
            self._sources[i].write(state[i])
            self._known[i] = state[i]

    def track_only_used(self, before: GeneratorStates, after: GeneratorStates) -> GeneratorStates:
        """Ignore the generators that were not drawn from; return what is needed of `before`."""
        self._active = [i for i in self._active if before[i] is not after[i]]
        self._known = [now if i in self._active else None for i, now in enumerate(self._known)]
        return tuple(then if i in self._active else None for i, then in enumerate(before))


def _source(generator: Any) -> _Source:
    name = f"a {type(generator).__name__}"
    if isinstance(generator, random.Random):
        name = "random" if generator is _python_generator() else name
        return _Source(name, lambda: _packed(generator), lambda state: _unpack(generator, state))
    if isinstance(generator, np.random.RandomState):
        return _Source(name, lambda: generator.get_state(legacy=False), generator.set_state)
    bits = getattr(generator, "bit_generator", generator)

    def write(state: Any) -> None:
        bits.state = state

    return _Source(name, lambda: bits.state, write)


def _python_generator() -> random.Random:
    """Return the generator behind the functions of `random`."""
    generator: random.Random = random.random.__self__  # type: ignore[attr-defined]
    return generator


def _packed(generator: random.Random) -> Any:
    """Return the state of a generator in a tenth of the memory: as bytes, not as 625 numbers."""
    state = generator.getstate()
    version, numbers, rest = state if len(state) == 3 else (None, None, None)
    if version != 3 or type(numbers) is not tuple:  # of another class: as it is
        return state
    return version, array("L", numbers).tobytes(), rest


def _unpack(generator: random.Random, state: Any) -> None:
    if type(state) is tuple and len(state) == 3 and type(state[1]) is bytes:
        version, packed, rest = state
        state = version, tuple(array("L", packed)), rest
    generator.setstate(state)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
