"""What a scan collects from its steps: stacked once, compared when a step is run again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from .. import trees
from ..errors import RecomputeMismatchError

__all__ = ["StepOutputs", "state_and_output"]


def state_and_output(result: Any) -> tuple[Any, Any]:
    """Return what a step of a scan returned as (state, output).

    Unpacking alone would take an array of length two for a pair.
    """
    if isinstance(result, tuple | list) and len(result) == 2:
        return result[0], result[1]
    kind = type(result).__name__
    if isinstance(result, tuple | list | dict):
        kind = f"{kind} of length {len(result)}"
    elif (shape := getattr(result, "shape", None)) is not None:
        kind = f"{kind} of shape {tuple(shape)}"
    raise TypeError(f"a step of checkpointed_scan returned a {kind}; return (state, output)")


class StepOutputs(ABC):
    """What a scan collects from each step, and the gradients that come back to it.

    An engine knows how its arrays are stacked and compared.
    """

    def __init__(self, steps: int, *, wanted: bool) -> None:
        self.steps = steps
        self.wanted = wanted
        self.are_compared = True  # when a step is run again
        self.structure: trees.Structure | None = None
        self.stacks: list[Any] = []
        self.gradients: Sequence[Any] = ()
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
        """Stack the outputs of a step; if it was run before they must be what they were."""
        values = [self.as_array(leaf) for leaf in leaves]
        if step != self._next:
            if self.are_compared:
                self._compare(values, step)
            return
        self._next += 1
        if step == 0:
            self.stacks = [self.new_stack(value) for value in values]
        for stack, value in zip(self.stacks, values, strict=True):
            if tuple(value.shape) != tuple(stack.shape[1:]):
                raise ValueError(
                    f"the output of step {step} has shape {tuple(value.shape)}, that of step 0 had "
                    f"{tuple(stack.shape[1:])}; outputs are stacked, so they must agree"
                )
        self.stacks = [
            self.put(stack, value, step) for stack, value in zip(self.stacks, values, strict=True)
        ]

    def _compare(self, values: list[Any], step: int) -> None:
        for stack, value in zip(self.stacks, values, strict=True):
            words = self.difference(stack, value, step)
            if words:
                raise RecomputeMismatchError(
                    f"step {step} was run again and its output {words}. The step does not repeat "
                    "itself: it reads something that changes between calls, or draws from a random "
                    "generator that remat cannot see; make it a function of its state and input"
                )

    def seeds(self, step: int) -> list[Any]:
        return [None if g is None else g[step] for g in self.gradients]

    @abstractmethod
    def as_array(self, leaf: Any) -> Any:
        """Return a leaf as an array; it may be a number."""

    @abstractmethod
    def new_stack(self, value: Any) -> Any:
        """Return room for such a value of every step."""

    @abstractmethod
    def put(self, stack: Any, value: Any, step: int) -> Any:
        """Put a value into a stack, which may have to be of another type, and return it."""

    @abstractmethod
    def difference(self, stack: Any, value: Any, step: int) -> str | None:
        """Say how a value differs from that of the same step in a stack."""
