"""What loops have to know of tensors, and the outputs of a scan over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....errors import UnsupportedError
from ....loops import LoopArrays, StepOutputs
from ..arrays import TorchArrays
from ..comparing import difference_of
from ..memory.tensors import version_of

__all__ = ["TorchLoopArrays", "TorchOutputs"]


class TorchLoopArrays(TorchArrays):
    """Tells loops about tensors."""

    difference = staticmethod(difference_of)

    def as_array(self, leaf: Any) -> Tensor:
        try:
            return torch.as_tensor(leaf).detach()
        except (TypeError, RuntimeError, ValueError) as error:
            raise UnsupportedError(
                f"an output of a step is a {type(leaf).__name__}, and outputs are stacked; return "
                "tensors or numbers, in a tuple, list, dict, named tuple or dataclass"
            ) from error

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_zeros(shape)

    def put(self, stack: Tensor, value: Tensor, step: int) -> Tensor:
        common = torch.promote_types(stack.dtype, value.dtype)
        if common is not stack.dtype:
            stack = stack.to(common)
        with torch.no_grad():
            stack[step] = value
        return stack

    def difference_in(self, stack: Tensor, value: Tensor, step: int) -> str | None:
        return difference_of(value.to(stack.dtype), stack[step])

    def is_zero(self, leaf: Tensor) -> bool:
        return leaf.numel() > 0 and not bool(torch.any(leaf.detach() != 0))


class TorchOutputs(StepOutputs):
    """The outputs of a scan over tensors."""

    def __init__(self, arrays: LoopArrays, steps: int, *, wanted: bool) -> None:
        super().__init__(arrays, steps, wanted=wanted)
        self.tracked: list[bool] = []  # whether gradients can come back to them
        self._versions: dict[int, int] = {}  # of stacks, by id, when all steps had been run

    def keep(self, leaves: list[Any], step: int) -> None:
        super().keep(leaves, step)
        tracked = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        self.tracked = [a or b for a, b in zip(tracked, self.tracked or tracked, strict=True)]

    def complete(self) -> None:
        """Take note that the caller gets the stacks now, and may write to them."""
        self._versions = {id(stack): version_of(stack) for stack in self.stacks}

    def difference(self, stack: Tensor, value: Tensor, step: int) -> str | None:
        if self._versions.get(id(stack), version_of(stack)) != version_of(stack):
            return None  # the caller has written to it
        return self._arrays.difference_in(stack, value, step)
