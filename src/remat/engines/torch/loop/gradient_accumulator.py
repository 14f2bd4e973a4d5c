"""Backward through recorded steps, one recording at a time, with sums over all recordings.

Autograd computes the gradients of the state before a recording and of its captures. Those of
captures are summed from recording to recording, in the order of a plain loop. Hooks on captures are
not called for partial sums.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .captures import CapturedTensors, LeafGuard
from .states import Gradients, StepGraph, tensors_of

__all__ = ["GradientAccumulator"]


class GradientAccumulator:
    """Goes backward through recordings, and sums the gradients of captures."""

    def __init__(self, captures: CapturedTensors) -> None:
        self._captures = captures
        self._sums: dict[int, Tensor] = {}  # by the numbers of captures

    def reset(self) -> None:
        """Forget the sums so far."""
        self._sums = {}

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients of captures, in their order."""
        return [self._sums.get(number) for number in range(len(self._captures))]

    def through(self, tape: StepGraph, gradients_of_ends: Gradients) -> Gradients:
        """Go backward from gradients of results and outputs; return those of the tape's leaves.

        First those of its state, then those of its inputs, step by step.
        """
        ends, seeds = [], []
        results = [*tape.results, *itertools.chain(*tape.outputs)]
        for end, seed in zip(results, gradients_of_ends, strict=True):
            if seed is not None and isinstance(end, Tensor) and end.requires_grad:
                ends.append(end)
                seeds.append(seed)
        leaves = [*tape.own, *itertools.chain(*tape.inputs)]
        own = _differentiable(leaves)
        captured = [self._captures.leaves[number] for number in tape.used]
        gradients: Gradients = [None] * len(leaves)
        if not ends or not (own or captured):
            return gradients
        known = [number for number in tape.used if number in self._sums]
        if known:
            sums = [self._sums.pop(number) for number in known]
            ends.append(_PreviousSums.apply(sums, *(self._captures.leaves[n] for n in known)))
            seeds.append(torch.zeros_like(ends[-1]))
            del sums
        found = _gradients_of(ends, [*own.values()], captured, seeds)
        del ends, seeds
        for number, total in zip(tape.used, found[len(own) :], strict=True):
            if total is not None:
                self._sums[number] = total
        for position, part in zip(own, found, strict=False):
            gradients[position] = part
        return gradients

    def dry_run(self, tape: StepGraph) -> None:
        """Go backward to measure memory: the graph is retained, and nothing is summed."""
        ends = [result for result in tensors_of(tape.results) if result.requires_grad]
        own = [*_differentiable([*tape.own, *tape.inputs[0]]).values()]
        captured = [self._captures.leaves[number] for number in tape.used]
        if ends and (own or captured):
            seeds = [torch.zeros_like(end) for end in ends]
            _gradients_of(ends, own, captured, seeds, retain_graph=True)


class _PreviousSums(torch.autograd.Function):
    """A node at the end of a graph that passes the sums so far to the leaves.

    They arrive first, and the steps add to them, as if later steps were part of the graph: so sums
    are the same, bit for bit, as in a plain loop. Autograd adds in place, since it owns the sums.
    """

    @staticmethod
    def forward(ctx: Any, sums: list[Tensor], *leaves: Tensor) -> Tensor:
        ctx.sums = sums
        return leaves[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        sums = None, *ctx.sums
        ctx.sums.clear()
        return sums


class _Thread(threading.local):
    quiet = False  # while parts of gradients are computed


_thread = _Thread()


class _Hook:
    """A user's hook on a capture: called for the whole gradient, not for those of single steps."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, gradient: Tensor) -> Any:
        return None if _thread.quiet else self._hook(gradient)


def _gradients_of(
    ends: Sequence[Tensor],
    own: Sequence[Tensor],
    captured: Sequence[Tensor],
    seeds: Sequence[Tensor],
    *,
    retain_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Compute gradients of own and captured leaves, without calling hooks of captures."""
    hooked = [leaf._backward_hooks for leaf in captured if leaf._backward_hooks]
    for hooks in hooked:
        for key, hook in hooks.items():
            if type(hook) not in (_Hook, LeafGuard):
                hooks[key] = _Hook(hook)
    before, _thread.quiet = _thread.quiet, bool(hooked) or _thread.quiet
    try:
        return torch.autograd.grad(
            ends, [*own, *captured], seeds, allow_unused=True, retain_graph=retain_graph
        )
    except RuntimeError as error:
        if "a second time" in str(error):
            error.add_note(
                "A step of a checkpointed loop uses what an earlier step has computed and "
                "stored; compute it before the loop, or in every step"
            )
        raise
    finally:
        _thread.quiet = before


def _differentiable(own: list[Any]) -> dict[int, Tensor]:
    """Return the leaves to differentiate by, each once, by their first position."""
    seen: set[int] = set()
    found = {}
    for position, leaf in enumerate(own):
        if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in seen:
            seen.add(id(leaf))
            found[position] = leaf
    return found
