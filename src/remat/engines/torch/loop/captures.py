"""Captured tensors: those that a step closes over, found in the autograd graphs of its runs.

The graph of a step ends at leaves: its own (state and input), or external tensors, the captures.
Gradients are computed with respect to both, step by step. An external tensor with a grad_fn is no
leaf, and the backward of a step must stop there. So, while a step runs, a TorchFunctionMode
replaces captured non-leaf tensors by detached leaves (`DetachedProxies`). It is active only if such
a tensor is in reach.

Own leaves and proxies are guarded. A tensor that a step computes and stores elsewhere (a list of
losses) leads to them, and a gradient that arrives that way would be lost.
"""

from __future__ import annotations

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

from ....errors import UnsupportedError
from ..backend import (
    AccumulateGrad,
    count_function_modes,
    count_graph_nodes,
    function_mode_stack,
    without_function_modes,
)
from .reach import Reach

__all__ = ["CapturedTensors", "LeafGuard", "replace_for_outer_loops"]


class _CaptureTable:
    """Captured tensors, and the leaves that represent them in the graphs of steps."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []  # the captured tensors
        self.leaves: list[Tensor] = []  # in the graph of a step: the tensor itself, or its proxy
        self.used: list[bool] = []  # whether the graph of a step contains it: not with `y.detach()`
        self.numbers: dict[int, int] = {}  # indices by id of source or leaf; both are kept alive
        self.is_complete = False
        self.guard = LeafGuard()

    def add(self, source: Tensor, leaf: Tensor, *, used: bool = False) -> int:
        number = self.numbers[id(leaf)] = self.numbers[id(source)] = len(self.sources)
        self.sources.append(source)
        self.leaves.append(leaf)
        self.used.append(used)
        return number

    def guard_leaf(self, leaf: Tensor) -> None:
        """LeafGuard a leaf of the loop; the program may register more hooks on it."""
        leaf._backward_hooks = OrderedDict(((_GUARD, self.guard),))

    def is_own(self, leaf: Tensor) -> bool:
        hooks = leaf._backward_hooks
        return hooks is not None and hooks.get(_GUARD) is self.guard


_GUARD = -1  # the key of a guard among hooks; handles of hooks count from 0


class CapturedTensors:
    """The tensors that get gradients beside state and inputs."""

    def __init__(self, reach: Reach) -> None:
        self._table = _CaptureTable()
        self._mode = DetachedProxies(self._table, reach.graphs) if reach.has_graphs else None
        self._outer = _active_proxies()  # of loops around this one
        self._marks: list[tuple[int, int]] = []  # versions and addresses
        self._recorded: set[int] = set()  # numbers of those that recordings use
        self._own_used: set[int] = set()  # ids of own leaves that the last new step has used
        self._is_checked = False
        self._steps = self._used = 0  # new steps, and the number of captures that they used in all
        self._start = 0  # the number of the first node that a step may make
        if torch.is_grad_enabled():
            self._start = count_graph_nodes()
            if self._mode is not None:
                self._mode.start = self._start

    def __len__(self) -> int:
        return len(self._table.sources)

    @property
    def sources(self) -> list[Tensor]:
        """The captured tensors, in the order in which steps used them."""
        return self._table.sources

    @property
    def leaves(self) -> list[Tensor]:
        """Their leaves in the graphs of steps."""
        return self._table.leaves

    @property
    def used(self) -> list[bool]:
        """Whether the graph of any step contains them."""
        return self._table.used

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run steps with proxies in the place of captured non-leaf tensors."""
        with ExitStack() as stack:
            # (Autograd runs the backward of an outer loop's step without its mode.)
            active = _active_proxies()
            for mode in self._outer:
                if mode not in active:
                    stack.enter_context(mode)
            if self._mode is not None:
                stack.enter_context(self._mode)
            stack.enter_context(self._table.guard.disabled())
            yield

    def replaced(self, values: list[Any]) -> list[Any]:
        """Return results of a step with proxies in the place of captured non-leaf tensors."""
        return values if self._mode is None else [_as_argument(value) for value in values]

    def was_given(self, leaves: list[Any]) -> list[int]:
        """Return the indices of those leaves that the last new step has used."""
        return [position for position, leaf in enumerate(leaves) if id(leaf) in self._own_used]

    def guard_leaf(self, leaf: Tensor) -> None:
        """LeafGuard a leaf that a step gets, and recognize it in the graph of another step."""
        self._table.guard_leaf(leaf)

    def captured_by(self, ends: list[Tensor], given: list[Tensor], step: int) -> list[int]:
        """Return the indices of the captures of a new step: the leaves of its graph.

        `given` are the step's own leaves, or results of the step before in the same recording.
        """
        own = {id(leaf) for leaf in given}
        behind = {leaf.grad_fn for leaf in given}
        found = self._walk(ends, own, step, behind, self._start)
        self._steps += 1
        self._used += len(found)
        for number in found:
            self._table.used[number] = True
        return found

    def release(self, leaves: int) -> None:
        """Forget captures from index `leaves` on that nothing else refers to.

        Called when the graph of a step is freed. A leaf that the step has made for itself is gone
        then, and its gradient cannot be asked for.
        """
        table = self._table
        parts = zip(table.sources[leaves:], table.leaves[leaves:], table.used[leaves:], strict=True)
        added = [(ref(source), ref(leaf), used) for source, leaf, used in parts]
        table.numbers = {key: number for key, number in table.numbers.items() if number < leaves}
        del table.leaves[leaves:], table.sources[leaves:], table.used[leaves:], parts
        for source, leaf, used in added:
            living = source(), leaf()
            if living[0] is not None and living[1] is not None:
                table.add(living[0], living[1], used=used)

    def recorded(self, numbers: Iterable[int]) -> None:
        """Note what a recording uses."""
        self._recorded.update(numbers)

    def check_recorded(self) -> None:
        """Raise if a leaf that was used in the forward pass was used by no recording.

        Only once: in a second backward pass, recordings of the first forward pass are gone, with
        the leaves that a step made for itself there.
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

    def captures_used_by(
        self, ends: list[Tensor], own: Iterable[Tensor], start: int, stop: int
    ) -> Sequence[int]:
        """Return the numbers of those that the graph of steps may lead to; `own` are its leaves.

        To search the graph takes as long as to make it. If most steps use most of them, all are
        named instead: those that are not used get no gradient. Unless it is still open whether
        every one is ever used by a recording.
        """
        count, length = len(self), stop - start
        if len(self._recorded) == count and count * self._steps <= 2 * self._used * length:
            return range(count)
        return self._walk(ends, {id(leaf) for leaf in own}, start, set(), 0)

    def _walk(
        self, ends: list[Tensor], own: set[int], step: int, behind: set[Any], start: int
    ) -> list[int]:
        found: dict[int, None] = {}
        self._own_used = set()
        seen = set(behind)
        nodes: list[Any] = []
        for end in ends:
            node = end.grad_fn
            if node is None:
                self._add_leaf(end, own, step, found)
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
                if is_leaf:
                    self._add_leaf(below.variable, own, step, found)
                else:
                    nodes.append(below)
            if is_last and node._sequence_nr() < start:
                _refuse(
                    step, f"computed before the loop ({node.name()}), where remat does not look"
                )
        return list(found)

    def _add_leaf(self, leaf: Tensor, own: set[int], step: int, found: dict[int, None]) -> None:
        """Note a leaf of a graph, or one that a step returned as it is."""
        if id(leaf) in own:
            self._own_used.add(id(leaf))
        elif leaf.requires_grad:
            self._add(leaf, step, found)

    def complete(self) -> None:
        """Called when all steps have run: there are no more captures."""
        self._table.is_complete = True
        if self._mode is not None:
            self._mode.outside = {}
        self._marks = [(source._version, _address(source)) for source in self.sources]

    def check(self) -> None:
        """Raise, as autograd does, if a capture was modified since."""
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

    def _add(self, leaf: Tensor, step: int, found: dict[int, None]) -> None:
        """Add a leaf that is not the step's own."""
        number = self._table.numbers.get(id(leaf))
        if number is None:
            if self._table.is_own(leaf):
                _refuse(step, "made by an earlier step and stored")
            if self._table.is_complete:
                return  # made by the step for itself
            number = self._table.add(leaf, leaf)
        found[number] = None


class DetachedProxies(TorchFunctionMode):
    """Replaces captured non-leaf tensors by detached leaves in the arguments of functions."""

    def __init__(self, table: _CaptureTable, outside: list[Tensor]) -> None:
        super().__init__()
        self._table = table
        self.outside = {id(tensor): tensor for tensor in outside}  # known captures, kept alive
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor, its proxy
        self.start = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if count_function_modes():  # those of outer loops would show their proxies
            with without_function_modes():
                given, named = self._replaced(args, kwargs)
        else:
            given, named = self._replaced(args, kwargs)
        if func is Tensor.register_hook and given[0] is not args[0]:
            raise _registers_hooks(given[0])
        return func(*given, **named)

    def _replaced(self, args: tuple[Any, ...], kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        named = {name: self._instead(arg) for name, arg in kwargs.items()} if kwargs else {}
        return [self._instead(arg) for arg in args], named

    def _instead(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            pair = self._leaves.get(id(value))
            if pair is not None:
                return pair[1]
            node: Any = value.grad_fn
            if node is None or self._table.is_complete:
                return value
            if node._sequence_nr() >= self.start and id(value) not in self.outside:
                return value  # (sequence numbers are per thread, so they alone do not prove it)
            leaf = value.detach().requires_grad_()
            self._table.guard_leaf(leaf)
            self._leaves[id(value)] = value, leaf
            self._table.add(value, leaf)
            return leaf
        if type(value) in (list, tuple):
            return type(value)([self._instead(part) for part in value])
        return value


def _active_proxies() -> list[DetachedProxies]:
    """Return the modes of loops whose steps run now, from the outermost to the innermost."""
    if not count_function_modes():
        return []
    return [mode for mode in function_mode_stack() if isinstance(mode, DetachedProxies)]


def replace_for_outer_loops(values: list[Any]) -> list[Any]:
    """Return inputs of a loop with the proxies that steps of outer loops use."""
    return [_as_argument(value) for value in values] if _active_proxies() else values


def _as_argument(value: Any) -> Any:
    """Return a tensor as a function of torch would get it: function modes may replace it."""
    if isinstance(value, Tensor) and has_torch_function_unary(value):
        return handle_torch_function(_as_argument, (value,), value)
    return value


class LeafGuard:
    """Raises if a gradient comes to a leaf of a loop outside of its forward and backward."""

    def __init__(self) -> None:
        self._runs = 0  # passes that are running

    def __call__(self, gradient: Tensor) -> None:
        if not self._runs:
            raise UnsupportedError(
                "a gradient came to a tensor that a step of a checkpointed loop has computed and "
                "stored (in a list, in an attribute), and gradients do not flow from there; "
                "return it instead: in the state, or as an output of remat.checkpointed_scan"
            )

    @contextmanager
    def disabled(self) -> Iterator[None]:
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
