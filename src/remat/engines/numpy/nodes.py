"""The nodes of a trace that remat started: what an op gave, and whose memory that is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import autograd.numpy as anp
import numpy as np
from autograd.builtins import container_take
from autograd.core import VJPNode, VSpace, primitive_vjps, sparse_add
from autograd.numpy import fft
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import isbox, notrace_primitives

from ...core.records import Value
from ...errors import UnsupportedError
from .adapter import is_pure
from .array_function import memory_of, plain
from .recording.constants import Constant
from .recording.region import threads
from .recording.rule_templates import shape_only
from .recording.rules import checked_rule
from .views import Link, ViewOrigin, make_link

__all__ = ["LoggedNode", "Node", "OpLog", "cast", "memory_of", "shape_and_dtype"]


class BoxReference:
    """A weak reference to the traced array that a node belongs to, while the program has it.

    Calling it returns the plain array. Views ask for the traced one.
    """

    __slots__ = ("_box", "on_release")

    def __init__(self) -> None:
        self._box: Any = None
        self.on_release: Callable[[Any], None] | None = None  # called once the array is gone

    def bind(self, box: Any) -> None:
        self._box = ref(box, self.on_release)

    def leave(self) -> None:
        """The traced array belongs to another node from now on: it was changed in place."""
        self._box = None
        if self.on_release is not None:
            self.on_release(None)

    def traced(self) -> Any:
        return None if self._box is None else self._box()

    def __call__(self) -> Any:
        box = self.traced()
        return None if box is None else box.own_value()


class Node(VJPNode):  # type: ignore[misc]
    """A node of a trace that remat started: autograd's, with an error that says what to do."""

    # origin: whose memory the result is in, None if its own; for a list, one for each part.
    # is_sum: of gradients, in a trace around a backward pass.
    # value: what the recording of a region knows it as; None outside of regions.
    __slots__ = (
        *("argnums", "box", "dtype", "is_marked", "is_sum", "name", "origin", "shape", "value"),
    )

    vjp: Any  # autograd's

    def __init__(
        self, value: Any, fun: Any, args: Any, kwargs: Any, argnums: Any, parents: Any
    ) -> None:
        if fun not in primitive_vjps:
            name = getattr(fun, "__name__", str(fun))
            raise UnsupportedError(
                f"np.{name} has no derivative rule; write it with other functions, or define one "
                "with autograd.extend.primitive and defvjp"
            )
        region = threads.region
        if region is not None and any(map(isbox, args)):
            region = None
        kept = args
        if fun in _OF_SHAPES and type(args[0]) is np.ndarray and args[0].nbytes > _TINY:
            kept = (shape_only(args[0]), *args[1:])
        if region is None:
            self._make_rule(value, fun, kept, kwargs, argnums, parents)
        else:
            super().__init__(value, fun, kept, kwargs, argnums, parents)
        self.box = BoxReference()
        self.origin = _origin(value, fun, args, kwargs, argnums, parents)
        self.is_sum = fun in _SUMS_OF_GRADIENTS
        self.name = getattr(fun, "__name__", str(fun))
        self.shape, self.dtype = shape_and_dtype(value)
        self.is_marked = False
        self.argnums: Any = argnums
        self.value: Value | None = None
        if region is not None and not region.record(self, value, fun, args, kwargs):
            self._make_rule(value, fun, kept, kwargs, argnums, parents)

    def _make_rule(
        self, value: Any, fun: Any, args: Any, kwargs: Any, argnums: Any, parents: Any
    ) -> None:
        """Make autograd's rule, of operands as they are now."""
        large: dict[int, Constant] | None = None
        if not _is_final(fun):
            args, kwargs, large = _as_now(fun, args, kwargs, argnums)
        super().__init__(value, fun, args, kwargs, argnums, parents)
        if large:
            self.vjp = checked_rule(self.vjp, large)

    @property
    def is_view(self) -> bool:
        return type(self.origin) is ViewOrigin

    def initialize_root(self, value: Any) -> None:
        super().initialize_root()
        self.is_sum = self.is_marked = False
        self.name = "an input"
        self.box = BoxReference()
        self.origin = None
        self.argnums = ()
        self.value = None
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
    if type(value) is np.ndarray:  # almost always
        return value.shape, value.dtype
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


def _as_now(
    fun: Any, args: Any, kwargs: Any, argnums: Any
) -> tuple[Any, Any, dict[int, Constant] | None]:
    """Return operands as they are now: the program may write to plain arrays that a rule holds.

    (Nobody writes to what is traced.) With those that are too large to be copied, by their ids.
    """
    in_args = len(argnums) < len(args) and any(
        isinstance(arg, _HOLDERS) for i, arg in enumerate(args) if i not in argnums
    )
    if not in_args and not any(isinstance(value, _HOLDERS) for value in kwargs.values()):
        return args, kwargs, None
    large: dict[int, Constant] = {}
    kept, name = threads.constants.kept, f"numpy.{getattr(fun, '__name__', fun)}"
    now = tuple(arg if i in argnums else kept(arg, name, large) for i, arg in enumerate(args))
    return now, kept(kwargs, name, large), large


# Derivative rules that hold their first operand for its shape and type, not for its numbers.
_OF_SHAPES = {
    ArrayBox.__getitem__,
    *(getattr(anp, name) for name in ("reshape", "ravel", "expand_dims", "squeeze")),
    *(getattr(anp, name) for name in ("real", "imag", "real_if_close")),
    *(getattr(fft, name) for name in ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn")),
    *(getattr(fft, name) for name in ("fftshift", "ifftshift")),
}
_TINY = 1 << 10  # bytes that are not worth it

_HOLDERS = (np.ndarray, tuple, list, dict)


def _origin(value: Any, fun: Any, args: Any, kwargs: Any, argnums: Any, parents: Any) -> Any:
    """Return an `ViewOrigin` if a result is in the memory of an operand; for a list, one a part."""
    if fun is container_take:  # a part of a result looks at what the result looks at
        origins = getattr(parents[0], "origin", None)
        found = origins[args[1]] if isinstance(origins, list | dict) else None
        return _then(found, make_link(fun, args, kwargs, 0))
    if getattr(fun, "copies_on_write", False) or _is_its_own(value, args):
        return None
    if fun in _SUMS_OF_GRADIENTS and isinstance(plain(value), list | tuple | dict):
        return None  # (the program gets copies of gradients, so nobody writes to their parts)

    def look(array: Any) -> ViewOrigin | None:
        place = next((i for i, arg in enumerate(args) if _is_in(array, arg)), None)
        if place is None:
            return None
        if place not in argnums:
            return ViewOrigin(None, None)
        return _origin_in(parents[argnums.index(place)], args[place], fun, args, kwargs, place)

    return _for_each(plain(value), look)


def _is_its_own(value: Any, args: Any) -> bool:
    """Tell, for most results at once, that they are in the memory of no operand."""
    if type(value) is not np.ndarray or value.base is not None:
        return isinstance(value, np.generic)
    return not any(value is arg or arg.__class__ is list for arg in args)


def _then(origin: Any, link: Link) -> Any:
    if isinstance(origin, list):
        return [_then(part, link) for part in origin]
    if isinstance(origin, dict):
        return {key: _then(part, link) for key, part in origin.items()}
    return origin and origin.then(link)


def _for_each(value: Any, look: Callable[[Any], ViewOrigin | None]) -> Any:
    if isinstance(value, list | tuple):
        return [_for_each(plain(part), look) for part in value]
    if isinstance(value, dict):
        return {key: _for_each(plain(part), look) for key, part in value.items()}
    return look(value) if isinstance(value, np.ndarray) else None


def _is_in(array: Any, operand: Any) -> bool:
    operand = plain(operand)
    if isinstance(operand, np.ndarray):
        return memory_of(operand) is memory_of(array)
    return isinstance(operand, list | tuple) and any(_is_in(array, part) for part in operand)


def _origin_in(
    parent: Any, operand: Any, fun: Any, args: Any, kwargs: dict[str, Any], place: int
) -> ViewOrigin:
    box = parent.box.traced() if isinstance(parent, Node) else None
    if box is None:
        raise UnsupportedError(
            f"np.{getattr(fun, '__name__', fun)} returns a view of an array in a list; pass the "
            "array itself, or a copy"
        )
    operand = plain(operand)
    owner, chain = box.as_owner(operand)
    if chain is not None and is_pure(fun) and not _is_final(fun):
        return ViewOrigin(owner, chain.then(make_link(fun, args, kwargs, place)))
    return ViewOrigin(owner, None)


def _is_final(function: Any) -> bool:
    """Tell whether it is not to be called again for the sake of a view."""
    return getattr(function, "is_opaque", False) or getattr(function, "is_final", False)
