"""Connects the results of a loop with its sources: one autograd node for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import RecomputeMismatchError, UnsupportedError
from ....loops import LoopPass
from .captures import replace_for_outer_loops
from .states import is_floating, is_tracked
from .steps import Steps

__all__ = ["connect", "read_only_checkpoint"]


def connect(loop: LoopPass, steps: Steps, given: list[Any]) -> list[Any]:
    """Return the final state and the outputs of a loop, connected with its sources.

    `given` are the leaves of the initial state and of xs, with their graphs.
    """
    assert loop.run is not None
    if not loop.run.steps:
        return given[: len(loop.initial.leaves)]
    results = [*loop.final.leaves, *steps.outputs.stacks]
    tracked = [*loop.final.tracked, *steps.outputs.tracked]
    if not any(tracked):
        loop.traced = False  # no gradient can be asked for
        return results
    if not loop.run.can_go_backward:
        raise UnsupportedError(
            "nothing in the initial state, in xs and in what step 0 uses requires grad, "
            "but a later step uses something that does, too late to plan for gradients; "
            "call requires_grad_() on a floating-point tensor of the initial state"
        )
    sources = [*given, *replace_for_outer_loops(steps.captures.sources)]
    used = _used(steps, len(loop.initial.leaves), len(given))
    backward = _Backward(
        loop,
        [i for i, requires_grad in enumerate(tracked) if requires_grad],
        [i for i, source in enumerate(sources) if used[i] and is_tracked(source)],
        len(results),
    )
    aliases = [results[i].detach() for i in backward.results]
    tensors = [sources[i] for i in backward.sources]
    for i, tensor in zip(
        backward.results, _LoopNode.apply(backward, aliases, *tensors), strict=True
    ):
        results[i] = tensor
    return results


def _used(steps: Steps, count: int, given: int) -> list[bool]:
    """Say of every source whether the graphs of the steps lead to it.

    To others no gradient can flow. Connected nevertheless, they would get a gradient of None, and
    their hooks would be called with it.
    """
    state = [i in steps.uses_state for i in range(count)]
    inputs = [i in steps.uses_inputs for i in range(given - count)]
    return [*state, *inputs, *steps.captures.used]


class _Backward:
    """The backward pass of a loop, over those results and sources that require grad."""

    def __init__(
        self, loop: LoopPass, results: list[int], sources: list[int], all_results: int
    ) -> None:
        self.results = results
        self.sources = sources
        self._loop = loop
        self._all_results = all_results

    def __call__(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        seeds: list[Tensor | None] = [None] * self._all_results
        for i, gradient in zip(self.results, gradients, strict=True):
            seeds[i] = gradient
        count = len(self._loop.initial.leaves)
        found = self._loop.backward(seeds[:count], seeds[count:])
        connected = set(self.sources)
        if any(gradient is not None and i not in connected for i, gradient in enumerate(found)):
            raise RecomputeMismatchError(
                "a step that was run again uses a tensor for its result that it did not use the "
                "first time, so that its gradient would be lost. Make the step a function of its "
                "state"
            )
        return [found[i] for i in self.sources]


class _LoopNode(torch.autograd.Function):
    """The node of a loop in the graph."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, results: list[Tensor], *sources: Tensor) -> Any:
        ctx.loop_backward = backward
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        with torch.no_grad():
            found = ctx.loop_backward(gradients)
        if torch.is_grad_enabled():  # create_graph=True: what was found has no history
            anchor = torch.zeros((), requires_grad=True)
            found = [None if g is None else _NoSecondDerivative.apply(g, anchor) for g in found]
        return None, None, *found


class _NoSecondDerivative(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor) -> Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(
            "gradients of gradients do not flow through a checkpointed loop; use a plain Python "
            "loop with runs of steps in remat.checkpoint(fn, state), which can be differentiated "
            "twice"
        )


class _ReadOnlyCheckpoint(torch.autograd.Function):
    """A checkpoint that the caller looks at."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, anchor: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(
            "gradients do not flow through the checkpoints that a loop returns; to use states on "
            "the way in a loss, return them as outputs of remat.checkpointed_scan"
        )


def read_only_checkpoint(leaf: Any, anchor: Tensor | None) -> Any:
    """Return a leaf of a checkpoint for the caller; a gradient through it is an error."""
    if anchor is None or not is_floating(leaf):
        return leaf.clone() if isinstance(leaf, Tensor) and anchor is not None else leaf
    return _ReadOnlyCheckpoint.apply(leaf, anchor)
