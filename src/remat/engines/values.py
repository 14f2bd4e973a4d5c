"""What transformed loops ask about values, of whatever framework the program has loaded.

No framework is imported here: a value of one can only exist if the program has done so.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from .compiling import is_compiling

__all__ = ["LoadedValues"]


class LoadedValues:
    """Tells arrays and tensors from other values, and what is being differentiated."""

    def is_compiling(self) -> bool:
        """Say whether a compiler is tracing the code that calls this."""
        return is_compiling()

    def is_differentiating(self) -> bool:
        """Say whether anything may be recorded now."""
        tracer = sys.modules.get("autograd.tracer")
        if tracer is not None and tracer.trace_stack.top >= 0:
            return True
        torch = sys.modules.get("torch")
        return (
            torch is not None and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        )

    def is_array_type(self, kind: type) -> bool:
        return _is_array_type(kind)

    def is_plain_array_type(self, kind: type) -> bool:
        """Say whether values of a type are arrays, and none stands for a number."""
        return _is_plain_array_type(kind)

    def is_tracked(self, leaf: Any) -> bool:
        """Say whether gradients can flow back from a value."""
        kind = type(leaf)
        if _is_box_type(kind):
            return True
        return _is_tensor_type(kind) and bool(leaf.requires_grad)

    def is_traced_number(self, leaf: Any) -> bool:
        """Say whether a value is a Python number that is being differentiated."""
        return _is_box_type(type(leaf)) and type(_plain(leaf)) in (float, complex)

    def is_seen_elsewhere(self, leaf: Any) -> bool:
        """Say whether something else looks at the memory of an array (not: at the object)."""
        if _is_box_type(type(leaf)):
            return hasattr(leaf, "viewed")  # a traced view
        if isinstance(leaf, np.ndarray):
            return leaf.base is not None or not leaf.flags.owndata
        if not _is_tensor_type(type(leaf)):
            return False
        return leaf._is_view() or (leaf.is_leaf and leaf.requires_grad) or _is_shared(leaf)

    def aliased(self, leaf: Any) -> Any:
        """Return a value that is part of a graph as the result of an op that is run now."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        # (Whether it is a leaf cannot be asked here: a mode answers for the leaf in its place.)
        return leaf if isinstance(leaf, torch.nn.Parameter) else leaf.view_as(leaf)

    def copied(self, leaf: Any) -> Any:
        """Return a copy of an array; gradients flow through it."""
        if _is_tensor_type(type(leaf)):
            return leaf.clone()
        if _is_box_type(type(leaf)):
            return leaf * 1
        return leaf.copy(order="K") if isinstance(leaf, np.ndarray) else leaf

    def memory(self, leaf: Any) -> Any:
        """Return what arrays over the same memory have in common; None if nobody can write."""
        if _is_tensor_type(type(leaf)):
            is_strided = str(leaf.layout) == "torch.strided" and not leaf.is_nested
            return ("torch", leaf.untyped_storage()._cdata) if is_strided else None
        owner = _plain(leaf)
        if not isinstance(owner, np.ndarray):
            return None
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return ("numpy", id(owner))

    def is_made(self, leaf: Any) -> bool:
        """Say whether an array may be the result of an op that gradients flow through."""
        if _is_tensor_type(type(leaf)):
            return leaf.grad_fn is not None
        return _is_box_type(type(leaf)) or np.issubdtype(leaf.dtype, np.inexact)

    def content_mark(self, copy: Any, original: Any) -> Any:
        """Return what tells later whether a copy of an array was written to."""
        if _is_tensor_type(type(copy)):
            return None if copy.is_inference() else copy._version
        return _plain(copy) if _is_box_type(type(copy)) else original

    def is_content_changed(self, copy: Any, mark: Any) -> bool:
        if _is_tensor_type(type(copy)):
            return mark is None or bool(copy._version != mark)
        if _is_box_type(type(copy)):
            return _plain(copy) is not mark
        return copy is not mark and not _are_same_bytes(copy, mark)

    def kind(self, leaf: Any) -> tuple[Any, Any]:
        """Return shape and type of the entries of an array."""
        return tuple(np.shape(_plain(leaf))), getattr(leaf, "dtype", None)

    def zeros_like(self, leaf: Any) -> Any:
        if _is_tensor_type(type(leaf)):
            return sys.modules["torch"].zeros_like(leaf, requires_grad=False)
        return np.zeros_like(_plain(leaf))

    def tracked_zero(self, like: Any) -> Any:
        """Return a number that is tracked as an array is."""
        if _is_tensor_type(type(like)):
            return like.sum() * 0  # (a new leaf would be one that a step has made for itself)
        return np.zeros(())

    def numbered(self, steps: int, like: Any) -> Any:
        """Return an array with an entry for each step."""
        if _is_tensor_type(type(like)):
            return sys.modules["torch"].zeros(steps, dtype=sys.modules["torch"].uint8)
        return np.zeros(steps, np.uint8)

    def entries(self, stack: Any, *, owned: bool) -> list[Any]:
        """Return the entries of an array along its first axis; `owned`: they are written to."""
        if _is_tensor_type(type(stack)):
            entries = list(stack.unbind(0))  # which refuse to be written to
        else:
            entries = [stack[i] for i in range(len(stack))]
        return list(map(self.copied, entries)) if owned else entries


@functools.lru_cache(maxsize=1024)
def _is_array_type(kind: type) -> bool:
    return issubclass(kind, np.ndarray | np.generic) or _is_box_type(kind) or _is_tensor_type(kind)


@functools.lru_cache(maxsize=1024)
def _is_plain_array_type(kind: type) -> bool:
    return issubclass(kind, np.ndarray) or _is_tensor_type(kind)


def _is_tensor_type(kind: type) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.Tensor)


def _is_box_type(kind: type) -> bool:
    tracer = sys.modules.get("autograd.tracer")
    return tracer is not None and issubclass(kind, tracer.Box)


def _plain(value: Any) -> Any:
    return sys.modules["autograd.tracer"].getval(value) if _is_box_type(type(value)) else value


def _are_same_bytes(one: Any, other: Any) -> bool:
    is_array = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return is_array and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _is_shared(tensor: Any) -> bool:
    """Say whether other tensors may be over the same storage."""
    from .torch.backend import count_storage_owners  # noqa: PLC0415  (only if torch is there)

    return count_storage_owners(tensor) != 1
