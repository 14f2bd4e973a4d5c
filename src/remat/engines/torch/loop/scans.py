"""What a scan hands to each step, and what it collects from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .... import trees
from ....errors import UnsupportedError
from ....loops import StepOutputs
from ..comparing import difference_of
from ..memory.tensors import version_of

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

    def reset_gradients(self) -> None:
        self.gradients = [None] * len(self.leaves)

    def gather(self, step: int, gradients: list[Tensor | None]) -> None:
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                total = self.gradients[i]
                if total is None:
                    total = self.gradients[i] = torch.zeros_like(self.leaves[i])
                total[step] = gradient


class Outputs(StepOutputs):
    """The outputs of a scan over tensors."""

    def __init__(self, steps: int, *, wanted: bool) -> None:
        super().__init__(steps, wanted=wanted)
        self.tracked: list[bool] = []  # whether gradients can come back to them
        self._versions: dict[int, int] = {}  # of stacks, by id, when all steps had been run

    def keep(self, leaves: list[Any], step: int) -> None:
        super().keep(leaves, step)
        tracked = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        self.tracked = [a or b for a, b in zip(tracked, self.tracked or tracked, strict=True)]

    def complete(self) -> None:
        """Take note that the caller gets the stacks now, and may write to them."""
        self._versions = {id(stack): version_of(stack) for stack in self.stacks}

    def as_array(self, leaf: Any) -> Tensor:
        try:
            return torch.as_tensor(leaf).detach()
        except (TypeError, RuntimeError, ValueError) as error:
            raise UnsupportedError(
                f"an output of a step is a {type(leaf).__name__}, and outputs are stacked; return "
                "tensors or numbers, in a tuple, list, dict, named tuple or dataclass"
            ) from error

    def new_stack(self, value: Tensor) -> Tensor:
        return value.new_empty((self.steps, *value.shape))

    def put(self, stack: Tensor, value: Tensor, step: int) -> Tensor:
        common = torch.promote_types(stack.dtype, value.dtype)
        if common is not stack.dtype:
            stack = stack.to(common)
        with torch.no_grad():
            stack[step] = value
        return stack

    def difference(self, stack: Tensor, value: Tensor, step: int) -> str | None:
        if self._versions.get(id(stack), version_of(stack)) != version_of(stack):
            return None  # the caller has written to it
        return difference_of(value.to(stack.dtype), stack[step])
