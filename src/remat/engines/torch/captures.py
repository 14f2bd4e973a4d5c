"""What a step closes over, found in the graphs that its runs leave behind.

A step's graph ends at leaves: the step's own (its state and its input), or tensors from outside,
which are what the step closes over. Gradients are computed with respect to both, step by step. A
tensor from outside that is part of a graph itself is no leaf, and going back through a step must
not go on into that graph. So a leaf stands in for it while a step runs: a mode puts it into the
place of the tensor wherever that is an argument. The mode is on only if such a tensor is in reach.

Own leaves and stand-ins are guarded: a tensor that a step has computed and put aside (a list of
losses) leads to them, and a gradient that comes to them that way would go no further.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    handle_torch_function,
    has_torch_function_unary,
)

from ...errors import UnsupportedError
from .backend import AccumulateGrad, without_function_modes
from .reach import Reach

__all__ = ["Captures", "Guard", "replaced_by_outer"]


class _Table:
    """Tensors from outside, and the leaves that they are in the graphs of steps."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []  # as the caller knows them
        self.leaves: list[Tensor] = []  # as the graph of a step knows them
        self.met: list[bool] = []  # whether the graph of a step leads to it: `y.detach()` does not
        self.numbers: dict[int, int] = {}  # of leaves, by id; they are held, so ids stay
        self.is_complete = False
        self.guard = Guard()

    def add(self, source: Tensor, leaf: Tensor, *, met: bool = False) -> int:
        number = self.numbers[id(leaf)] = self.numbers[id(source)] = len(self.sources)
        self.sources.append(source)
        self.leaves.append(leaf)
        self.met.append(met)
        return number

    def watch(self, leaf: Tensor) -> None:
        """Guard a leaf that is the loop's own; hooks of the program may join the guard."""
        leaf._backward_hooks = OrderedDict(((_GUARD, self.guard),))

    def is_own(self, leaf: Tensor) -> bool:
        hooks = leaf._backward_hooks
        return hooks is not None and hooks.get(_GUARD) is self.guard


_GUARD = -1  # the key of a guard among hooks; handles of hooks count from 0


class Captures:
    """Tensors that gradients have to reach, beside state and inputs."""

    def __init__(self, reach: Reach) -> None:
        self._table = _Table()
        self._mode = _StandIns(self._table, reach.graphs) if reach.has_graphs else None
        self._outer = tuple(_thread.active)  # of loops around this one
        self._marks: list[tuple[int, int]] = []  # versions and addresses
        self._recorded: set[int] = set()  # numbers of those that recordings use
        self._own_met: set[int] = set()  # ids of what the last new step was given and uses
        self._is_checked = False
        self._steps = self._met = 0  # on the way ahead, and how many captures they met in all
        self._start = 0  # the number of the first node that a step may make
        if torch.is_grad_enabled():
            node: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
            self._start = node._sequence_nr()
            if self._mode is not None:
                self._mode.start = self._start

    def __len__(self) -> int:
        return len(self._table.sources)

    @property
    def sources(self) -> list[Tensor]:
        """The tensors as the caller knows them, in the order in which steps met them."""
        return self._table.sources

    @property
    def leaves(self) -> list[Tensor]:
        """The same as leaves of a step's graph."""
        return self._table.leaves

    @property
    def met(self) -> list[bool]:
        """Whether the graph of any step leads to them."""
        return self._table.met

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Run steps with leaves in the place of parts of graphs, if there are any."""
        with ExitStack() as stack:
            # (Backward of a step of an outer loop passes by its mode, which step needs it.)
            for mode in self._outer:
                if mode not in _thread.active:
                    stack.enter_context(mode)
            if self._mode is not None:
                stack.enter_context(self._mode)
            stack.enter_context(self._table.guard.off_duty())
            yield

    def replaced(self, values: list[Any]) -> list[Any]:
        """Return what a step gave, with leaves in the place of parts of graphs from outside."""
        return values if self._mode is None else [_as_argument(value) for value in values]

    def was_given(self, leaves: list[Any]) -> list[int]:
        """Return the places of those leaves that the last new step has used."""
        return [place for place, leaf in enumerate(leaves) if id(leaf) in self._own_met]

    def mark_as_own(self, leaf: Tensor) -> None:
        """Guard a leaf that a step was given, and know it if it is found behind another step."""
        self._table.watch(leaf)

    def met_by(self, ends: list[Tensor], given: list[Tensor], step: int) -> list[int]:
        """Return the numbers of what a new step closes over: what its graph leads to.

        What it was given belongs to it, with or without a graph behind it.
        """
        own = {id(leaf) for leaf in given}
        behind = {leaf.grad_fn for leaf in given}
        found = self._walk(ends, own, step, behind, self._start)
        self._steps += 1
        self._met += len(found)
        for number in found:
            self._table.met[number] = True
        return found

    def release(self, leaves: int) -> None:
        """Forget those that were met since there were so many, and that nobody else refers to.

        To be called when the graph of a step is gone: a leaf that the step has made for itself is
        gone then, and nobody can ask for its gradient.
        """
        table = self._table
        parts = zip(table.sources[leaves:], table.leaves[leaves:], table.met[leaves:], strict=True)
        added = [(ref(source), ref(leaf), met) for source, leaf, met in parts]
        table.numbers = {key: number for key, number in table.numbers.items() if number < leaves}
        del table.leaves[leaves:], table.sources[leaves:], table.met[leaves:], parts
        for source, leaf, met in added:
            living = source(), leaf()
            if living[0] is not None and living[1] is not None:
                table.add(living[0], living[1], met=met)

    def recorded(self, numbers: Iterable[int]) -> None:
        """Take note of what a recording uses."""
        self._recorded.update(numbers)

    def check_recorded(self) -> None:
        """Raise if a leaf that was used on the way ahead was used by no recording, ahead or back.

        Once: a second way back knows nothing of a recording that was made on the way ahead, and
        of leaves that the step made for itself there.
        """
        if self._is_checked:
            return
        self._is_checked = True
        pairs = zip(self.sources, self.leaves, strict=True)
        for number, (source, leaf) in enumerate(pairs):
            if source is leaf and number not in self._recorded:
                raise UnsupportedError(
                    f"a step makes a tensor of shape {list(leaf.shape)} that requires grad, and "
                    "keeps it; when the step is run again it makes another one, and the first gets "
                    "no gradient. Make it before the loop"
                )

    def used_by(
        self, ends: list[Tensor], own: Iterable[Tensor], start: int, stop: int
    ) -> Sequence[int]:
        """Return the numbers of those that the graph of steps may lead to; `own` are its leaves.

        To search the graph takes as long as to make it. If most steps use most of them, all are
        named instead: those that are not used get no gradient. Unless it is still open whether
        every one is ever used by a recording.
        """
        count, length = len(self), stop - start
        if len(self._recorded) == count and count * self._steps <= 2 * self._met * length:
            return range(count)
        return self._walk(ends, {id(leaf) for leaf in own}, start, set(), 0)

    def _walk(
        self, ends: list[Tensor], own: set[int], step: int, behind: set[Any], start: int
    ) -> list[int]:
        found: dict[int, None] = {}
        own_met = self._own_met = set()
        seen = set(behind)
        nodes: list[Any] = []
        for end in ends:
            node = end.grad_fn
            if node is None:
                self._meet_end(end, own, step, found)
            elif node not in seen:
                seen.add(node)
                nodes.append(node)
        for node in nodes:  # which grow on the way
            is_last = True  # on its way down
            for below, _ in node.next_functions:
                if below is None:
                    continue
                is_leaf = type(below) is AccumulateGrad
                is_last &= is_leaf
                if below in seen:
                    continue
                seen.add(below)
                if not is_leaf:
                    nodes.append(below)
                elif id(variable := below.variable) in own:
                    own_met.add(id(variable))
                else:
                    self._meet(variable, step, found)
            if is_last and node._sequence_nr() < start:
                _refuse(
                    step, f"computed before the loop ({node.name()}), where remat does not look"
                )
        return list(found)

    def _meet_end(self, end: Tensor, own: set[int], step: int, found: dict[int, None]) -> None:
        """Note what a step returned as it is."""
        if id(end) in own:
            self._own_met.add(id(end))
        elif end.requires_grad:
            self._meet(end, step, found)

    def complete(self) -> None:
        """Take note that all steps have been run: what they use now is all that they use."""
        self._table.is_complete = True
        if self._mode is not None:
            self._mode.outside = {}
        self._marks = [(source._version, _address(source)) for source in self.sources]

    def check(self) -> None:
        """Raise, as autograd does, if one was written to since."""
        for source, (version, address) in zip(self.sources, self._marks, strict=True):
            if not source.requires_grad:
                raise RuntimeError(
                    f"a tensor [{source.dtype} {list(source.shape)}] that the step of a "
                    "checkpointed loop closes over required grad when the loop ran and does not "
                    "now, when its steps run again; call requires_grad_(False) after the backward "
                    "pass"
                )
            if (source._version, _address(source)) != (version, address):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: [{source.dtype} {list(source.shape)}], which the step of "
                    f"a checkpointed loop closes over, is at version {source._version}; the loop "
                    f"ran with version {version} and runs its steps again now. Write to a copy, "
                    "or after the backward pass"
                )

    @contextmanager
    def no_new_hooks(self) -> Iterator[None]:
        """Raise if steps that are run again register hooks on what they close over."""
        before = [len(leaf._backward_hooks or ()) for leaf in self.leaves]
        yield
        for count, leaf in zip(before, self.leaves, strict=True):
            if len(leaf._backward_hooks or ()) > count:
                raise _registers_hooks(leaf)

    def _meet(self, leaf: Tensor, step: int, found: dict[int, None]) -> None:
        """Note a leaf that is not the step's own."""
        number = self._table.numbers.get(id(leaf))
        if number is None:
            if self._table.is_own(leaf):
                _refuse(step, "made by an earlier step and put aside")
            if self._table.is_complete:
                return  # a leaf that the step has made for itself
            number = self._table.add(leaf, leaf)
        found[number] = None


class _StandIns(TorchFunctionMode):
    """Puts leaves into the place of tensors that are parts of graphs from outside."""

    def __init__(self, table: _Table, outside: list[Tensor]) -> None:
        super().__init__()
        self._table = table
        self.outside = {id(tensor): tensor for tensor in outside}  # known to be, held meanwhile
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor, its stand-in
        self.start = 0

    def __enter__(self) -> Any:
        _thread.active.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _thread.active.remove(self)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with without_function_modes():  # those of outer loops would show leaves of their own
            given = [self._instead(arg) for arg in args]
            named = {name: self._instead(arg) for name, arg in (kwargs or {}).items()}
        if func is Tensor.register_hook and given[0] is not args[0]:
            raise _registers_hooks(given[0])
        _thread.active.remove(self)
        try:
            return func(*given, **named)
        finally:
            _thread.active.append(self)

    def _instead(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            pair = self._leaves.get(id(value))
            if pair is not None:
                return pair[1]
            node: Any = value.grad_fn
            if node is None or self._table.is_complete:
                return value
            if node._sequence_nr() >= self.start and id(value) not in self.outside:
                return value  # (other threads count by themselves, so numbers alone do not tell)
            leaf = value.detach().requires_grad_()
            self._table.watch(leaf)
            self._leaves[id(value)] = value, leaf
            self._table.add(value, leaf)
            return leaf
        if type(value) in (list, tuple):
            return type(value)([self._instead(part) for part in value])
        return value


class _Thread(threading.local):
    def __init__(self) -> None:
        self.active: list[_StandIns] = []  # from the outermost loop to the innermost


_thread = _Thread()


def replaced_by_outer(values: list[Any]) -> list[Any]:
    """Return what goes into a loop as the steps of loops around it are to see it."""
    return [_as_argument(value) for value in values] if _thread.active else values


def _as_argument(value: Any) -> Any:
    """Return a tensor as a function of torch would get it as an argument: the modes see it."""
    if isinstance(value, Tensor) and has_torch_function_unary(value):
        return handle_torch_function(_as_argument, (value,), value)
    return value


class Guard:
    """Stops gradients that come to a loop's leaves while the loop neither runs nor goes back."""

    def __init__(self) -> None:
        self._runs = 0  # ahead and back, now

    def __call__(self, gradient: Tensor) -> None:
        if not self._runs:
            raise UnsupportedError(
                "a gradient came to a tensor that a step of a checkpointed loop has computed and "
                "put aside (in a list, in an attribute), and gradients do not flow from there; "
                "return it instead: in the state, or as an output of remat.checkpointed_scan"
            )

    @contextmanager
    def off_duty(self) -> Iterator[None]:
        self._runs += 1
        try:
            yield
        finally:
            self._runs -= 1


def _registers_hooks(tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"a step registers a hook on a tensor of shape {list(tensor.shape)} that it closes over; "
        "steps are run again, and so it would be registered too often. Register it before the loop"
    )


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
