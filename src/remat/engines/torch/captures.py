"""What a step closes over, found in the graphs that its runs leave behind.

A step's graph ends at leaves: the step's own (its state and its input), or tensors from outside,
which are what the step closes over. Gradients are computed with respect to both, step by step. A
tensor from outside that is part of a graph itself is no leaf, and going back through a step must
not go on into that graph. So a leaf stands in for it while a step runs: a mode puts it into the
place of the tensor wherever that is an argument. The mode is on only if such a tensor is in reach.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import RecomputeMismatchError, UnsupportedError
from .reach import Reach

__all__ = ["Captures", "mark_as_own"]

_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class _Table:
    """Tensors from outside, and the leaves that they are in the graphs of steps."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []  # as the caller knows them
        self.leaves: list[Tensor] = []  # as the graph of a step knows them
        self.numbers: dict[int, int] = {}  # of leaves, by id; they are held, so ids stay
        self.is_complete = False

    def add(self, source: Tensor, leaf: Tensor) -> int:
        number = self.numbers[id(leaf)] = len(self.sources)
        self.sources.append(source)
        self.leaves.append(leaf)
        return number


class Captures:
    """Tensors that gradients have to reach, beside state and inputs."""

    def __init__(self, reach: Reach) -> None:
        self._table = _Table()
        self._mode = _StandIns(self._table) if reach.has_graphs else None
        self._marks: list[tuple[int, int]] = []  # versions and addresses
        self._start = 0  # the number of the first node that a step may make
        if torch.is_grad_enabled():
            node: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
            self._start = node._sequence_nr()
            if self._mode is not None:
                self._mode.start = self._start

    @property
    def sources(self) -> list[Tensor]:
        """The tensors as the caller knows them, in the order in which steps met them."""
        return self._table.sources

    @property
    def leaves(self) -> list[Tensor]:
        """The same as leaves of a step's graph."""
        return self._table.leaves

    def standing_in(self) -> AbstractContextManager[Any]:
        """Run steps with leaves in the place of parts of graphs, if there are any."""
        return nullcontext() if self._mode is None else self._mode

    def met_by(self, ends: list[Tensor], given: list[Tensor], step: int) -> list[int]:
        """Return the numbers of what a new step closes over: what its graph leads to.

        What it was given belongs to it, with or without a graph behind it.
        """
        own = {id(leaf) for leaf in given}
        behind = {leaf.grad_fn for leaf in given}
        return self._walk(ends, own, step, behind, self._start)

    def used_by(self, ends: list[Tensor], own: set[int], step: int) -> list[int]:
        """Return the numbers of those that a graph leads to; `own` are ids of its own leaves."""
        return self._walk(ends, own, step, set(), 0)

    def _walk(
        self, ends: list[Tensor], own: set[int], step: int, behind: set[Any], start: int
    ) -> list[int]:
        found: dict[int, None] = {}
        seen = set(behind)
        nodes: list[Any] = []
        for end in ends:
            node = end.grad_fn
            if node is None:
                if end.requires_grad and id(end) not in own:
                    found[self._number(end, step)] = None
            elif node not in seen:
                seen.add(node)
                nodes.append(node)
        while nodes:
            node = nodes.pop()
            if start and node._sequence_nr() < start:
                _refuse(
                    step, f"computed before the loop ({node.name()}), where remat does not look"
                )
            for below, _ in node.next_functions:
                if below is None or below in seen:
                    continue
                seen.add(below)
                if type(below) is not _AccumulateGrad:
                    nodes.append(below)
                elif id(below.variable) not in own:
                    found[self._number(below.variable, step)] = None
        return list(found)

    def complete(self) -> None:
        """Take note that all steps have been run: what they use now is all that they use."""
        self._table.is_complete = True
        self._marks = [(source._version, _address(source)) for source in self.sources]

    def check(self) -> None:
        """Raise, as autograd does, if one was written to since."""
        for source, (version, address) in zip(self.sources, self._marks, strict=True):
            if (source._version, _address(source)) != (version, address):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: [{source.dtype} {list(source.shape)}], which the step of "
                    f"a checkpointed loop closes over, is at version {source._version}; the loop "
                    f"ran with version {version} and runs its steps again now. Write to a copy, "
                    "or after the backward pass"
                )

    def _number(self, leaf: Tensor, step: int) -> int:
        number = self._table.numbers.get(id(leaf))
        if number is not None:
            return number
        if hasattr(leaf, "_remat_step"):
            _refuse(step, "made by an earlier step and put aside")
        if self._table.is_complete:
            raise RecomputeMismatchError(
                f"step {step} was run again and uses a tensor of shape {list(leaf.shape)} that "
                "requires grad and that no step had used before. The step does not repeat itself; "
                "make it a function of its state"
            )
        return self._table.add(leaf, leaf)


class _StandIns(TorchFunctionMode):
    """Puts leaves into the place of tensors that are parts of graphs from outside."""

    def __init__(self, table: _Table) -> None:
        super().__init__()
        self._table = table
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor, its stand-in
        self.start = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [self._instead(arg) for arg in args]
        return func(*given, **{name: self._instead(v) for name, v in (kwargs or {}).items()})

    def _instead(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            pair = self._leaves.get(id(value))
            if pair is not None:
                return pair[1]
            node: Any = value.grad_fn
            if node is None or self._table.is_complete or node._sequence_nr() >= self.start:
                return value
            leaf = value.detach().requires_grad_()
            self._leaves[id(value)] = value, leaf
            self._table.add(value, leaf)
            return leaf
        if type(value) in (list, tuple):
            return type(value)([self._instead(part) for part in value])
        return value


def mark_as_own(leaf: Tensor) -> None:
    """Mark a leaf that a step was given, to be known if it is found behind another step."""
    leaf._remat_step = True  # type: ignore[attr-defined]


def _refuse(step: int, why: str) -> NoReturn:
    raise UnsupportedError(
        f"step {step} uses a tensor that was {why}. Put it into the state, into the xs of "
        "remat.checkpointed_scan, or compute it inside of the step"
    )


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return 0
