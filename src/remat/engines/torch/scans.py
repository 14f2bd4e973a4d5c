"""What a scan hands to each step, and what it collects from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import trees
from ...errors import RecomputeMismatchError
from .comparing import difference_of

__all__ = ["Outputs", "PerStep"]


class PerStep:
    """What a scan hands to each step: the entries of `xs` along the first axis."""

    def __init__(self, leaves: list[Any], structure: trees.Structure | None) -> None:
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tracked = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        self.structure = structure
        self.gradients: list[Tensor | None] = []

    def take(self, step: int) -> list[Any]:
        """Return the entries of a step."""
        return [leaf[step] for leaf in self.leaves]

    def start_gradients(self) -> None:
        self.gradients = [None] * len(self.leaves)

    def gather(self, step: int, gradients: list[Tensor | None]) -> None:
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                total = self.gradients[i]
                if total is None:
                    total = self.gradients[i] = torch.zeros_like(self.leaves[i])
                total[step] = gradient


class Outputs:
    """What a scan collects from each step, and the gradients that come back to it."""

    def __init__(self, steps: int, *, wanted: bool) -> None:
        self.steps = steps
        self.wanted = wanted
        self.are_compared = True  # when a step is run again
        self.structure: trees.Structure | None = None
        self.stacks: list[Tensor] = []
        self.tracked: list[bool] = []
        self.gradients: Sequence[Tensor | None] = ()
        self._next = 0

    def flat(self, output: Any) -> list[Any]:
        if not self.wanted:
            return []
        leaves, structure = trees.flatten(output)
        if self.structure is None:
            self.structure = structure
        elif structure != self.structure:
            raise TypeError(
                f"the output of a step has another structure than that of step 0: "
                f"{trees.describe(structure)} instead of {trees.describe(self.structure)}"
            )
        return leaves

    def keep(self, leaves: list[Any], step: int) -> None:
        if not leaves:
            return None
        values = [torch.as_tensor(leaf).detach() for leaf in leaves]
        if step != self._next:
            return self._compare(values, step) if self.are_compared else None
        self._next += 1
        if step == 0:
            self.tracked = [False] * len(leaves)
            self.stacks = [value.new_empty((self.steps, *value.shape)) for value in values]
        for i, (value, stack) in enumerate(zip(values, self.stacks, strict=True)):
            if value.shape != stack.shape[1:]:
                raise ValueError(
                    f"the output of step {step} has shape {tuple(value.shape)}, that of step 0 had "
                    f"{tuple(stack.shape[1:])}; outputs are stacked, so they must agree"
                )
            common = torch.promote_types(stack.dtype, value.dtype)
            if common is not stack.dtype:
                self.stacks[i] = stack.to(common)
            with torch.no_grad():
                self.stacks[i][step] = value
            self.tracked[i] |= isinstance(leaves[i], Tensor) and leaves[i].requires_grad
        return None

    def _compare(self, values: list[Tensor], step: int) -> None:
        """A step that is run again must give the output that it gave the first time."""
        for stack, value in zip(self.stacks, values, strict=True):
            words = difference_of(value.to(stack.dtype), stack[step])
            if words:
                raise RecomputeMismatchError(
                    f"step {step} was run again and its output {words}. The step does not repeat "
                    "itself: it reads something that changes between calls, or draws from a random "
                    "generator that remat cannot see; make it a function of its state and input"
                )

    def seeds(self, step: int) -> list[Tensor | None]:
        return [None if g is None else g[step] for g in self.gradients]
