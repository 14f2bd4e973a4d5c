"""What a scan hands to each step, and what it collects from them.

Outputs are stacked once, and compared when a step is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import trees
from ..errors import RecomputeMismatchError
from .arrays import LoopArrays

__all__ = ["StepInputs", "StepOutputs", "state_and_output"]


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


class StepInputs:
    """What a scan hands to each step, the entries of `xs` along the first axis, and gradients."""

    def __init__(
        self, arrays: LoopArrays, leaves: list[Any], structure: trees.Structure | None
    ) -> None:
        self.leaves = leaves
        self.structure = structure
        self.gradients: list[Any] = []
        self._arrays = arrays

    def take(self, step: int) -> list[Any]:
        """Return the entries of a step."""
        return [leaf[step] for leaf in self.leaves]

    def tree(self, entries: list[Any]) -> Any:
        """Return the entries as the step gets them; None if this is no scan."""
        return None if self.structure is None else trees.unflatten(self.structure, entries)

    def zeros(self) -> list[Any]:
        """Return entries for a step that does not exist."""
        return [self._arrays.zeros((1, *leaf.shape[1:]), leaf)[0] for leaf in self.leaves]

    def reset_gradients(self) -> None:
        self.gradients = [None] * len(self.leaves)

    def gather(self, step: int, gradients: Sequence[Any]) -> None:
        """Note the gradients of the entries of a step."""
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                total = self.gradients[i]
                if total is None:
                    leaf = self.leaves[i]
                    total = self.gradients[i] = self._arrays.zeros(leaf.shape, leaf)
                total[step] = gradient


class StepOutputs:
    """What a scan collects from each step, and the gradients that come back to it."""

    def __init__(self, arrays: LoopArrays, steps: int, *, wanted: bool) -> None:
        self.steps = steps
        self.wanted = wanted
        self.are_compared = True  # when a step is run again
        self.structure: trees.Structure | None = None
        self.stacks: list[Any] = []
        self.gradients: Sequence[Any] = ()
        self._arrays = arrays
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
        values = [self._arrays.as_array(leaf) for leaf in leaves]
        if step != self._next:
            if self.are_compared:
                self._compare(values, step)
            return
        self._next += 1
        if step == 0:
            self.stacks = [self._arrays.empty((self.steps, *v.shape), v) for v in values]
        for stack, value in zip(self.stacks, values, strict=True):
            if tuple(value.shape) != tuple(stack.shape[1:]):
                raise ValueError(
                    f"the output of step {step} has shape {tuple(value.shape)}, that of step 0 had "
                    f"{tuple(stack.shape[1:])}; outputs are stacked, so they must agree"
                )
        put, pairs = self._arrays.put, zip(self.stacks, values, strict=True)
        self.stacks = [put(stack, value, step) for stack, value in pairs]

    def _compare(self, values: list[Any], step: int) -> None:
        for stack, value in zip(self.stacks, values, strict=True):
            words = self.difference(stack, value, step)
            if words:
                raise RecomputeMismatchError(
                    f"step {step} was run again and its output {words}. The step does not repeat "
                    "itself: it reads something that changes between calls, or draws from a random "
                    "generator that remat cannot see; make it a function of its state and input"
                )

    def difference(self, stack: Any, value: Any, step: int) -> str | None:
        """Say how an output differs from that of the first run of its step."""
        return self._arrays.difference_in(stack, value, step)

    def seeds(self, step: int) -> list[Any]:
        """Return the gradients of the outputs of a step."""
        return [None if g is None else g[step] for g in self.gradients]

    def of_no_step(self, leaves: list[Any]) -> list[Any]:
        """Return empty stacks for such outputs."""
        arrays = map(self._arrays.as_array, leaves)
        return [self._arrays.empty((0, *array.shape), array) for array in arrays]
