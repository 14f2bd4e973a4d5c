"""The random generators of a pass: PyTorch's, `numpy.random` and `random`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...random_states import GeneratorStates, RandomStates, Source, default_sources

__all__ = ["GeneratorStates", "Generators"]


class Generators(RandomStates):
    """Default generators of devices in use, of NumPy and of Python, and others that are added."""

    def __init__(self, *, only_torch: bool = False) -> None:
        sources = [_source(torch.default_generator)]
        if not only_torch:
            sources += default_sources()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            sources += map(_source, torch.cuda.default_generators)
        super().__init__(sources)

    def add_generator(self, generator: torch.Generator, state: Tensor) -> None:
        """Add a generator; `state` is what it was before anything was drawn."""
        self.add(_source(generator), state)


def _source(generator: torch.Generator) -> Source:
    return Source(
        generator, f"a {generator.device} generator", generator.get_state, generator.set_state
    )
