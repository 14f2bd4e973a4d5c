"""Snapshots of random generators: what is drawn after a restore is what was drawn before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from remat.random_states import RandomStates, Source, default_sources, source_of


class Counter(random.Random):
    """A generator with a state of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def random(self) -> float:
        self.count += 1
        return self.count / 100

    def getstate(self) -> Any:
        return (self.count,)

    def setstate(self, state: Any) -> None:
        (self.count,) = state


def of_torch() -> tuple[Source, Callable[[], float]]:
    generator = torch.Generator().manual_seed(3)
    source = Source(generator, "a generator", generator.get_state, generator.set_state)
    return source, lambda: torch.rand((), generator=generator).item()


def of(generator: Any, draw: Callable[[Any], float]) -> tuple[Source, Callable[[], float]]:
    return source_of(generator), lambda: draw(generator)


MAKERS: dict[str, Callable[[], tuple[Source, Callable[[], float]]]] = {
    "numpy.random": lambda: (default_sources()[0], np.random.random),
    "random": lambda: (default_sources()[1], random.random),
    "Random": lambda: of(random.Random(1), lambda g: g.random()),
    "of another class": lambda: of(Counter(), lambda g: g.random()),
    "RandomState": lambda: of(np.random.RandomState(1), lambda g: g.random()),
    "Generator": lambda: of(np.random.default_rng(1), lambda g: g.random()),
    "BitGenerator": lambda: of(np.random.PCG64(1), lambda g: float(g.random_raw())),
    "torch": of_torch,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_restored_generator_draws_the_same_numbers(kind: str) -> None:
    source, draw = MAKERS[kind]()
    states = RandomStates([source])
    draw()
    before = states.snapshot()
    first = [draw() for _ in range(3)]
    after = states.snapshot()
    assert states.difference(before, after) == source.name
    states.restore(before)
    assert states.last_snapshot is before
    assert [draw() for _ in range(3)] == first
    assert states.difference(states.snapshot(), after) is None


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_that_does_not_change_is_kept_once(kind: str) -> None:
    source, draw = MAKERS[kind]()
    states = RandomStates([source])
    before = states.snapshot()
    assert states.snapshot() is before
    draw()
    assert states.snapshot() is not before


def test_generators_that_were_not_drawn_from_are_left_alone() -> None:
    used, unused = random.Random(1), random.Random(2)
    states = RandomStates([source_of(used), source_of(unused)])
    before = states.snapshot()
    first = used.random()
    needed = states.ignore_unused(before)
    assert len(needed) == 1
    assert states.is_used
    expected = random.Random(2)
    assert unused.random() == expected.random()
    states.restore(needed)
    assert used.random() == first
    assert unused.random() == expected.random()  # not set back


def test_none_is_used() -> None:
    states = RandomStates(default_sources())
    assert states.ignore_unused(states.snapshot()) == {}
    assert not states.is_used


def test_a_generator_that_is_added_later_has_its_first_state_in_earlier_snapshots() -> None:
    generator = random.Random(5)
    source = source_of(generator)
    states, state = RandomStates([]), source.read()
    before = states.snapshot()
    first = generator.random()
    states.add(source, state)
    states.add(source, "ignored: it is known")
    assert states.snapshot() != before
    states.restore(before)
    assert generator.random() == first
