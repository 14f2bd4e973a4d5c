"""States of a loop between its steps: live, held, and those around a recording."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....errors import UnsupportedError
from ....loops import HeldState
from ...hidden_results import refuse_hidden
from ..memory.tensors import is_plain, version_of
from .side_effects import Snapshot

__all__ = [
    "Gradients",
    "LiveState",
    "StepGraph",
    "TensorContext",
    "TorchState",
    "as_non_leaf",
    "compact",
    "is_floating",
    "is_object",
    "is_tracked",
    "refuse_graph_inside",
    "refuse_shared",
    "state_of",
    "tensors_of",
    "versions_of",
]

Gradients = list[Tensor | None]  # one for each leaf of the state; None is zero


class LiveState(NamedTuple):
    """A state between two steps: its leaves, without history, and which of them had one."""

    leaves: list[Any]
    tracked: list[bool]


class TensorContext(NamedTuple):
    """What belongs to a state that is held."""

    tracked: list[bool]  # which of its leaves had a history
    versions: list[int]
    effects: Snapshot


TorchState = HeldState[TensorContext]


class StepGraph(NamedTuple):
    """The tape of steps: the graph behind their results."""

    own: list[Any]  # leaves of the graph: the state
    inputs: list[list[Any]]  # and the entries of `xs`, for each step
    results: list[Any]  # the state, with its graph
    outputs: list[list[Any]]  # for each step
    used: list[int]  # numbers of captures


def state_of(results: list[Any]) -> LiveState:
    """Return a state without its history."""
    if len(results) == 1 and type(results[0]) is Tensor:
        return LiveState([compact(results[0].detach())], [results[0].requires_grad])
    leaves, tracked = [], []
    known: dict[int, Any] = {}
    for result in results:
        if isinstance(result, Tensor):
            leaf = known.get(id(result))
            if leaf is None:
                leaf = known[id(result)] = compact(result.detach())
            leaves.append(leaf)
            tracked.append(result.requires_grad)
        else:
            leaves.append(result)
            tracked.append(False)
    return LiveState(leaves, tracked)


def refuse_shared(leaves: list[Any], step: int) -> None:
    """Refuse tensors that lie over the same memory, if steps write to them."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for tensor in {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values():
        if not is_plain(tensor) or not tensor.numel():
            continue
        start = int(tensor.storage_offset())
        last, overlaps = 0, False
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            overlaps |= size > 1 and stride <= last  # rows over one another: expand, unfold
            last += stride * (size - 1)
        span = start * tensor.element_size(), (start + last + 1) * tensor.element_size()
        known = spans.setdefault(tensor.untyped_storage()._cdata, [])
        if overlaps or any(span[0] < end and begin < span[1] for begin, end in known):
            raise UnsupportedError(
                f"step {step} works in place, and two tensors of its state, or parts of one, lie "
                "over the same memory, so that one changes with the other; clone() one of them"
            )
        known.append(span)


_LEAVES = (Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))


def is_object(leaf: Any) -> bool:
    """Say whether a leaf of a state is something that may hold tensors."""
    return not isinstance(leaf, _LEAVES)


def refuse_graph_inside(leaf: Any, what: str) -> None:
    """Refuse an object that is no pytree if gradients would have to flow through it."""
    if is_object(leaf):
        refuse_hidden(leaf, is_tracked, what)


def as_non_leaf(value: Any) -> Any:
    """Return a view of a leaf: a tracker of modules may hook what modules get.

    Such hooks (`register_multi_grad_hook`) cannot be on the very leaves that gradients are asked
    for.
    """
    is_leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    return value.view_as(value) if is_leaf else value


def is_tracked(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def versions_of(leaves: list[Any]) -> list[int]:
    try:
        return [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
    except RuntimeError:  # tensors of inference mode do not count
        return [version_of(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]


_ALIGNED = 64  # bytes; kernels may sum in another order where memory begins elsewhere


def compact(leaf: Tensor) -> Tensor:
    """Make the layout of a state independent of how it came about, and hold no more than it."""
    if leaf.layout is not torch.strided or leaf.is_nested:
        return leaf
    if not leaf.storage_offset() and leaf.is_contiguous():
        return leaf
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(leaf)
    if is_dense and not (leaf.storage_offset() * leaf.element_size()) % _ALIGNED:
        return leaf
    return leaf.clone(memory_format=torch.preserve_format)
