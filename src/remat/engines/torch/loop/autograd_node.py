"""Connects the results of a loop with its sources: one autograd node for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import RecomputeMismatchError, UnsupportedError
from ....loops import LoopPass, no_gradient_of_checkpoints
from .states import TensorContext, is_floating, is_tracked

__all__ = ["connect", "read_only_checkpoint"]


def connect(
    loop: LoopPass[TensorContext],
    sources: list[Any],
    used: list[bool],
    outputs_tracked: list[bool],
) -> list[Any]:
    """Return the final state and the outputs of a loop, connected with its sources.

    `used` says of every source whether the graphs of the steps lead to it. To others no gradient
    can flow. Connected nevertheless, they would get a gradient of None, and their hooks would be
    called with it.
    """
    assert loop.run is not None
    results = loop.results
    tracked = [*loop.final.context.tracked, *outputs_tracked]
    if not any(tracked):
        loop.traced = False  # no gradient can be asked for
        return results
    if not loop.run.can_go_backward:
        raise UnsupportedError(
            "nothing in the initial state, in xs and in what step 0 uses requires grad, "
            "but a later step uses something that does, too late to plan for gradients; "
            "call requires_grad_() on a floating-point tensor of the initial state"
        )
    backward = _LoopBackward(
        loop,
        [i for i, requires_grad in enumerate(tracked) if requires_grad],
        [i for i, source in enumerate(sources) if used[i] and is_tracked(source)],
    )
    aliases = [results[i].detach() for i in backward.results]
    tensors = [sources[i] for i in backward.sources]
    connected = _LoopNode.apply(backward, aliases, *tensors)
    for i, tensor in zip(backward.results, connected, strict=True):
        results[i] = tensor
    return results


class _LoopBackward:
    """The backward pass of a loop, over those results and sources that require grad."""

    def __init__(
        self, loop: LoopPass[TensorContext], results: list[int], sources: list[int]
    ) -> None:
        self.results = results
        self.sources = sources
        self._loop = loop

    def __call__(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        found = self._loop.gradients(self.results, gradients)
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
    def forward(ctx: Any, backward: _LoopBackward, results: list[Tensor], *sources: Tensor) -> Any:
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
        raise no_gradient_of_checkpoints()


def read_only_checkpoint(leaf: Any, anchor: Tensor | None) -> Any:
    """Return a leaf of a checkpoint for the caller; a gradient through it is an error."""
    if anchor is None or not is_floating(leaf):
        return leaf.clone() if isinstance(leaf, Tensor) and anchor is not None else leaf
    return _ReadOnlyCheckpoint.apply(leaf, anchor)
