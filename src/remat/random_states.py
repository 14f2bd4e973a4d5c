"""Snapshot and restore of random generators: those of NumPy and Python, and others of engines.

A state that does not change is kept once, so a loop without random numbers holds one snapshot for
all of its checkpoints.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "GENERATORS",
    "GeneratorStates",
    "RandomStates",
    "Source",
    "default_sources",
    "source_of",
]

# (The source of random.SystemRandom cannot be restored: a second run is found to differ.)
GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)

GeneratorStates = Mapping[Hashable, Any]  # by the key of the source


class Source(NamedTuple):
    """A generator: how its state is read and written."""

    key: Hashable
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


class RandomStates:
    """The states of several generators: `snapshot()` and `restore(snapshot)`.

    >>> states = RandomStates(default_sources())
    >>> before = states.snapshot()
    >>> states.snapshot() is before
    True
    >>> first = random.random()
    >>> states.restore(before)
    >>> random.random() == first
    True
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = {source.key: source for source in sources}
        self._first = {key: source.read() for key, source in self._sources.items()}
        self._latest: GeneratorStates = dict(self._first)

    @property
    def last_snapshot(self) -> GeneratorStates:
        """The latest snapshot."""
        return self._latest

    @property
    def is_used(self) -> bool:
        """Whether numbers may have been drawn from any of them."""
        return bool(self._sources)

    def add(self, source: Source, state: Any) -> None:
        """Add a generator; `state` is what it was before anything was drawn."""
        if source.key not in self._sources:
            self._sources[source.key] = source
            self._first[source.key] = state
            self._latest = {**self._latest, source.key: state}

    def snapshot(self) -> GeneratorStates:
        """Return the states of all; the same object as before if none has changed."""
        known = self._latest
        changed = {}
        for key, source in self._sources.items():
            now = source.read()
            if not _same(now, known[key]):
                changed[key] = now
        if changed:
            self._latest = {**known, **changed}
        return self._latest

    def restore(self, states: GeneratorStates) -> None:
        """Set all to their states in a snapshot; one that it lacks was not drawn from by then."""
        if states.keys() != self._sources.keys():
            states = {key: states.get(key, self._first[key]) for key in self._sources}
        for key, source in self._sources.items():
            source.write(states[key])
        self._latest = states  # the same object: later snapshots share it

    def ignore_unused(self, before: GeneratorStates) -> GeneratorStates:
        """Leave those alone that were not drawn from since `before`; return what is left of it."""
        now, then = self.snapshot(), {**self._first, **before}
        used = [key for key in self._sources if now[key] is not then[key]]
        self._sources = {key: self._sources[key] for key in used}
        self._latest = {key: now[key] for key in used}
        return {key: then[key] for key in used}

    def difference(self, one: GeneratorStates, other: GeneratorStates) -> str | None:
        """Name the first generator whose states differ."""
        for key, source in self._sources.items():
            if one[key] is not other[key] and not _same(one[key], other[key]):
                return source.name
        return None


def default_sources() -> list[Source]:
    """Return the generators behind the functions of `numpy.random` and `random`."""
    legacy = Source(
        "numpy.random",
        "numpy.random",
        lambda: np.random.get_state(legacy=False),
        np.random.set_state,
    )
    return [legacy, source_of(_python_generator())]


def source_of(generator: Any) -> Source:
    """Return one of `GENERATORS` as a source. It is kept alive, so its id is a key."""
    key, name = id(generator), f"a {type(generator).__name__}"
    if isinstance(generator, random.Random):
        name = "random" if generator is _python_generator() else name
        return Source(
            key, name, lambda: _packed(generator), lambda state: _unpack(generator, state)
        )
    if isinstance(generator, np.random.RandomState):
        return Source(key, name, lambda: generator.get_state(legacy=False), generator.set_state)
    bits = getattr(generator, "bit_generator", generator)

    def write(state: Any) -> None:
        bits.state = state

    return Source(id(bits), name, lambda: bits.state, write)


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
    if hasattr(one, "equal"):  # a tensor
        return bool(one.equal(other))
    return bool(one == other)
