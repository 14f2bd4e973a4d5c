"""Snapshot and restore of random generators: PyTorch's, `numpy.random` and `random`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["GeneratorStates", "Generators"]


class _Python:
    """The generator behind the functions of `random`."""

    get_state = staticmethod(random.getstate)
    set_state = staticmethod(random.setstate)


class _NumPy:
    """The generator behind the functions of `numpy.random`."""

    get_state = staticmethod(partial(np.random.get_state, legacy=False))
    set_state = staticmethod(np.random.set_state)


Source = torch.Generator | type[_Python] | type[_NumPy]
GeneratorStates = Mapping[Source, Any]


class Generators:
    """The default generators of devices in use, of NumPy and of Python, and others that are added.

    Snapshots share what did not change, so a loop without random numbers holds one for all of its
    checkpoints.
    """

    def __init__(self, *, only_torch: bool = False) -> None:
        self._sources: list[Source] = [torch.default_generator]
        if not only_torch:
            self._sources += [_Python, _NumPy]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._sources += torch.cuda.default_generators
        self._first: dict[Source, Any] = {}  # states before anything was drawn
        self._latest: dict[Source, Any] = {}
        self._first.update(self.snapshot())

    @property
    def are_used(self) -> bool:
        """Whether numbers may have been drawn from any of them."""
        return bool(self._sources)

    def add(self, generator: torch.Generator, state: Tensor) -> None:
        """Add a generator; `state` is what it was before anything was drawn."""
        if generator not in self._sources:
            self._sources.append(generator)
            self._first[generator] = state
            self._latest = {**self._latest, generator: state}

    def snapshot(self) -> GeneratorStates:
        """Return the states of all; the same object as before if none has changed."""
        states = {source: source.get_state() for source in self._sources}
        known = self._latest
        changed = {
            s: now for s, now in states.items() if s not in known or not _same(now, known[s])
        }
        if changed:
            self._latest = {**known, **changed}
        return self._latest

    def restore(self, states: GeneratorStates) -> None:
        """Set all to their states in a snapshot; one that it lacks was not drawn from by then."""
        latest = {}
        for source in self._sources:
            state = states.get(source)
            latest[source] = self._first[source] if state is None else state
            source.set_state(latest[source])
        self._latest = latest

    def ignore_unused(self, before: GeneratorStates) -> None:
        """Leave those alone that were not drawn from since a snapshot."""
        now, then = self.snapshot(), {**self._first, **before}
        self._sources = [source for source in self._sources if now[source] is not then[source]]
        self._latest = {source: now[source] for source in self._sources}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)
