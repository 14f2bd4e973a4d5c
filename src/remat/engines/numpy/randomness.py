"""The random generators that a step may draw from.

Always among them are `numpy.random` and `random`; generators that the step closes over are added
by the search in `captures.py`.
"""

from __future__ import annotations

import random
from typing import Any

from ...random_states import (
    GENERATORS,
    GeneratorStates,
    RandomStates,
    default_sources,
    source_of,
)

__all__ = ["GENERATORS", "GeneratorStates", "Randomness"]


class Randomness(RandomStates):
    """All generators together: `snapshot()` and `restore(snapshot)`."""

    def __init__(self, generators: list[Any]) -> None:
        own = [source_of(g) for g in generators if not isinstance(g, random.SystemRandom)]
        super().__init__([*default_sources(), *own])
