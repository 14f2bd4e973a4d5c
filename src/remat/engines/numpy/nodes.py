"""The nodes of a trace that remat started: what an op gave, and whose memory that is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from autograd.builtins import container_take
from autograd.core import VJPNode, VSpace, primitive_vjps, sparse_add
from autograd.tracer import isbox, notrace_primitives

from ...errors import UnsupportedError
from .follow import memory_of, plain
from .recording.records import Value
from .recording.region import free, threads

__all__ = ["LoggedNode", "Node", "OpLog", "cast", "memory_of", "shape_and_dtype"]


class Node(VJPNode):  # type: ignore[misc]
    """A node of a trace that remat started: autograd's, with an error that says what to do."""

    # is_view: of the memory of an operand; for a list, one for each part.
    # is_sum: of gradients, in a trace around a backward pass.
    # value: what the recording of a region knows it as; None outside of regions.
    __slots__ = ("argnums", "dtype", "is_marked", "is_sum", "is_view", "name", "shape", "value")

    def __init__(
        self, value: Any, fun: Any, args: Any, kwargs: Any, argnums: Any, parents: Any
    ) -> None:
        if fun not in primitive_vjps:
            name = getattr(fun, "__name__", str(fun))
            raise UnsupportedError(
                f"np.{name} has no derivative rule; write it with other functions, or define one "
                "with autograd.extend.primitive and defvjp"
            )
        super().__init__(value, fun, args, kwargs, argnums, parents)
        self.is_view = _viewing(value, fun, args, parents)
        self.is_sum = fun in _SUMS_OF_GRADIENTS
        self.name = getattr(fun, "__name__", str(fun))
        self.shape, self.dtype = shape_and_dtype(value)
        self.is_marked = False
        self.argnums: Any = argnums
        self.value: Value | None = None
        region = threads.region
        if region is not None and not any(map(isbox, args)):
            region.record(self, value, fun, args, kwargs)

    def free(self) -> None:
        """Let go of all arrays: the backward pass has gone through this node, and is the last."""
        self.vjp = None  # type: ignore[misc]  # (a slot of autograd's)
        if self.value is not None:
            free(self.value)

    def initialize_root(self, value: Any) -> None:
        super().initialize_root()
        self.is_view = self.is_sum = self.is_marked = False
        self.argnums = ()
        self.value = None
        self.name = "an input"
        self.shape, self.dtype = shape_and_dtype(value)


class LoggedNode(Node):
    """A node that enters its op into the log of its trace: `log(name, value)`."""

    __slots__ = ("log",)

    def __init__(
        self, value: Any, fun: Any, args: Any, kwargs: Any, argnums: Any, parents: Any
    ) -> None:
        super().__init__(value, fun, args, kwargs, argnums, parents)
        self.log: OpLog = parents[0].log
        self.log(self.name, value)


OpLog = Callable[[str, Any], None]

_SUMS_OF_GRADIENTS = {
    sparse_add,
    *(getattr(VSpace, name) for name in ("mut_add", "add", "scalar_mul", "inner_prod", "covector")),
}

for _kind in (Node, LoggedNode):
    notrace_primitives[_kind] = notrace_primitives[VJPNode]  # floor, argmax, zeros_like, …


def shape_and_dtype(value: Any) -> tuple[Any, Any]:
    """What a gradient must have; None for what is no array."""
    value = plain(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.shape, value.dtype
    if isinstance(value, float | complex):
        return (), np.dtype(type(value))
    return None, None


def cast(gradient: Any, dtype: np.dtype[Any]) -> Any:
    """Return a gradient, traced or not, in the type of the value that it belongs to."""
    found = getattr(plain(gradient), "dtype", None)
    if found is None or found == dtype:
        return gradient
    if found.kind == "c" and dtype.kind == "f":
        gradient = gradient.real
    return gradient.astype(dtype)


def _viewing(value: Any, fun: Any, args: Any, parents: Any) -> Any:
    if fun is container_take:  # a part of a result looks at what the result looks at
        views = getattr(parents[0], "is_view", False)
        return views[args[1]] if isinstance(views, list | dict) else False
    if getattr(fun, "copies_on_write", False):
        return False
    return _looks_at(plain(value), args)


def _looks_at(value: Any, operands: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_looks_at(part, operands) for part in value]
    if isinstance(value, dict):
        return {key: _looks_at(part, operands) for key, part in value.items()}
    if not isinstance(value, np.ndarray):
        return False
    memory = memory_of(value)  # itself, if a function has returned its operand
    for operand in operands:
        operand = plain(operand)  # noqa: PLW2901
        if isinstance(operand, np.ndarray):
            if memory_of(operand) is memory:
                return True
        elif isinstance(operand, list | tuple) and _looks_at(value, operand):
            return True
    return False
