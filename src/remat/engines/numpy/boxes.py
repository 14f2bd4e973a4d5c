"""The arrays that a traced NumPy function sees.

HIPS autograd records through *boxes*. Its own boxes follow operators and ufuncs; ours, which only
appear in traces that remat starts, also follow plain NumPy functions (`__array_function__`, see
`follow.py`) and work in place the way NumPy arrays do:

1. An in-place change gives the box a new value and a new place in the graph; the old array stays
   as it was, since derivative rules still refer to it.
2. A change through `v = x[a:b]` is written back to `x`.
3. Whoever else looks at the same memory (another slice, a reshaped view) does not see the change,
   as it would in NumPy. So using such a view afterwards is an error, never a wrong number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.core import VJPNode, primitive_vjps
from autograd.extend import Box, defvjp, primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.numpy.numpy_vjps import unbroadcast_f
from autograd.tracer import isbox, notrace_primitives, trace_primitives_map

from ...errors import UnsupportedError
from . import follow
from .follow import plain

__all__ = ["Node", "OpLog", "TracedArray", "plain", "root_box"]

Array = Any  # autograd and NumPy share no useful type


class Node(VJPNode):  # type: ignore[misc]
    """A node of a trace that remat started: autograd's, with an error that says what to do."""

    __slots__ = ("is_view", "name", "shape")  # is_view: of the memory of an operand

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
        self.is_view = _looks_at(value, args)
        self.name = getattr(fun, "__name__", str(fun))
        self.shape = _shape(value)

    def initialize_root(self, value: Any) -> None:
        super().initialize_root()
        self.is_view = False
        self.name = "an input"
        self.shape = _shape(value)


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

for _kind in (Node, LoggedNode):
    notrace_primitives[_kind] = notrace_primitives[VJPNode]  # floor, argmax, zeros_like, …


@primitive  # type: ignore[untyped-decorator]
def _replaced(array: Array, index: Any, value: Array) -> Array:
    """Return a copy of `array` in which `array[index]` is `value`."""
    copy = np.array(array)
    copy[index] = value
    return copy


def _last_writer(shape: tuple[int, ...], index: Any, like: Array) -> Array:
    """Tell which of the values that are assigned at `index` is still there afterwards."""
    order = np.arange(like.size).reshape(like.shape)
    writer = np.empty(shape, dtype=np.intp)
    writer[index] = order
    return writer[index] == order


def _taken(g: Array, index: Any) -> Array:
    taken = g[index]
    # Only an index with arrays in it can name a place twice.
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, list | np.ndarray) for part in parts):
        taken = taken * _last_writer(np.shape(g), index, np.zeros(np.shape(taken)))
    return taken


def _value_vjp(ans: Array, array: Array, index: Any, value: Array) -> Any:
    shape = np.shape(value)

    def taken(g: Array) -> Array:
        part = _taken(g, index)
        # NumPy lets a value have leading axes of length 1 that the place does not have.
        extra = len(shape) - np.ndim(part)
        return anp.reshape(part, (1,) * extra + np.shape(part)) if extra > 0 else part

    return unbroadcast_f(value, taken)


defvjp(
    _replaced,
    lambda ans, array, index, value: lambda g: _replaced(g, index, 0.0),
    None,
    _value_vjp,
)

_views: weakref.WeakValueDictionary[int, _Family] = weakref.WeakValueDictionary()


class _Family:
    """The traced views that look at the memory of one array."""

    def __init__(self) -> None:
        self.members: weakref.WeakSet[TracedView] = weakref.WeakSet()


class TracedArray(ArrayBox):  # type: ignore[misc]
    """An array in a trace of remat."""

    __slots__ = ("__weakref__",)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return follow.call(func, args, kwargs)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise UnsupportedError(
            "a traced array cannot become a plain one: its gradient would be lost. Instead of "
            "np.array([a, b]) write np.stack([a, b]); instead of filling a plain array, start "
            "from a traced one (x * 0) or collect the parts and np.concatenate them"
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if kwargs.get("where", True) is not True:
            raise UnsupportedError(
                f"np.{ufunc.__name__} is not followed with where=; use np.where on its result"
            )
        if method != "__call__":
            result = follow.ufunc_method(ufunc, method, inputs, kwargs)
        else:
            wrapper = trace_primitives_map.get(ufunc)
            if wrapper is None:
                return NotImplemented
            result = wrapper(*inputs, called_by_autograd_dispatcher=True, **kwargs)
        return result if out is None else _write(out, result)

    # -- in place ------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, TracedView) and value.comes_from(self, index):
            return  # `x[i] += y` has written through the view already
        self._become(_replaced(self, index, follow.as_array(value)))

    def __getitem__(self, index: Any) -> Any:
        taken = ArrayBox.__getitem__(self, index)
        if isinstance(taken, TracedView):
            taken.owner, taken.index = self, index
        return taken

    def fill(self, value: Any) -> None:
        self[...] = value

    def _update(self, result: Any) -> Any:
        """Take over `result` as NumPy's augmented assignment does."""
        if not isinstance(plain(self), np.ndarray):
            return result  # numbers are not changed in place: the name gets another one
        if np.shape(result) != self.shape:
            raise ValueError(
                f"non-broadcastable output operand with shape {self.shape} doesn't match the "
                f"broadcast shape {np.shape(result)}"
            )
        if result.dtype != self.dtype:
            if not np.can_cast(result.dtype, self.dtype, "same_kind"):
                raise TypeError(f"cannot cast {result.dtype} to {self.dtype} in place")
            result = result.astype(self.dtype)
        self._become(result if isbox(result) else _replaced(self, ..., result))
        return self

    def _become(self, result: Any) -> None:
        if not isbox(result) or result._trace != self._trace:
            raise UnsupportedError(
                "a traced value was written into an array of an outer trace; return it instead"
            )
        self._forget_views()
        # (The slots are autograd's, which mypy does not see.)
        self._value = result._value  # type: ignore[misc]
        self._node = result._node  # type: ignore[misc]

    def _forget_views(self) -> None:
        """Views of the old memory would not see the change."""
        memory = _memory(self._value)
        family = _views.get(id(memory))
        for view in list(family.members) if family else ():
            if view is not self:
                view.stale = True

    def __iadd__(self, other: Any) -> Any:
        return self._update(self + other)

    def __isub__(self, other: Any) -> Any:
        return self._update(self - other)

    def __imul__(self, other: Any) -> Any:
        return self._update(self * other)

    def __itruediv__(self, other: Any) -> Any:
        return self._update(self / other)

    def __ipow__(self, other: Any) -> Any:
        return self._update(self**other)

    def __imatmul__(self, other: Any) -> Any:
        return self._update(self @ other)

    def __imod__(self, other: Any) -> Any:
        return self._update(self % other)

    def __ifloordiv__(self, other: Any) -> Any:
        return self._update(self // other)

    # -- what autograd's boxes lack ------------------------------------------------------------

    def __pos__(self) -> Any:
        return self * 1

    def __floordiv__(self, other: Any) -> Any:
        return anp.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return anp.floor_divide(other, self)

    def copy(self, order: str = "C") -> Any:
        return self * 1

    def astype(self, dtype: Any, *args: Any, copy: bool = True, **kwargs: Any) -> Any:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        if np.dtype(dtype).kind not in "fc":  # whole numbers have no slope
            return plain(self).astype(dtype, *args, **kwargs)
        return super().astype(dtype, *args, **kwargs)

    def dot(self, other: Any) -> Any:
        return anp.dot(self, other)

    def transpose(self, *axes: Any) -> Any:
        order = axes[0] if len(axes) == 1 else axes or None
        return follow.call(np.transpose, (self, order), {})

    def prod(self, axis: Any = None, **kwargs: Any) -> Any:
        return follow.call(np.prod, (self, axis), kwargs)

    def clip(self, min: Any = None, max: Any = None, **kwargs: Any) -> Any:
        return follow.call(np.clip, (self, min, max), kwargs)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
        return follow.call(np.diagonal, (self, offset, axis1, axis2), {})

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return follow.call(np.trace, (self, *args), kwargs)

    def cumprod(self, axis: int | None = None) -> Any:
        return follow.call(np.cumprod, (self, axis), {})

    def take(self, indices: Any, axis: int | None = None) -> Any:
        return follow.call(np.take, (self, indices, axis), {})

    def compress(self, condition: Any, axis: int | None = None) -> Any:
        return follow.call(np.compress, (condition, self, axis), {})

    def ptp(self, axis: Any = None) -> Any:
        return follow.call(np.ptp, (self, axis), {})

    def conj(self) -> Any:
        return anp.conj(self)

    conjugate = conj
    real = property(lambda self: follow.call(np.real, (self,), {}))
    imag = property(anp.imag)
    mT = property(lambda self: anp.swapaxes(self, -1, -2))
    nbytes = property(lambda self: np.asarray(self._value).nbytes)
    itemsize = property(lambda self: np.asarray(self._value).itemsize)


class TracedView(TracedArray):
    """A traced array that looks at the memory of another one."""

    __slots__ = ("family", "index", "owner", "stale", "viewed")

    def __init__(self, value: Any, trace: int, node: Any) -> None:
        self.stale = False
        self.owner: TracedArray | None = None
        self.index: Any = None
        super().__init__(value, trace, node)
        memory = _memory(value)
        family = _views.get(id(memory))
        if family is None:
            _views[id(memory)] = family = _Family()
        self.family = family
        family.members.add(self)

    @property
    def _value(self) -> Any:
        if self.stale:
            raise UnsupportedError(
                "this view was taken before the array under it was changed in place; take the "
                "view after the change, or change a copy"
            )
        return self.viewed

    @_value.setter
    def _value(self, value: Any) -> None:
        self.viewed = value

    def comes_from(self, owner: TracedArray, index: Any) -> bool:
        return self.owner is owner and _same_index(self.index, index)

    def _become(self, result: Any) -> None:
        owner, index = self.owner, self.index
        if owner is None:
            raise UnsupportedError(
                "an in-place change of a reshaped, transposed or split view is not followed; "
                "change the array itself, or write it out of place"
            )
        # First the owner: it forgets its other views. This one goes on as a slice of the new value.
        owner._become(_replaced(owner, index, result))
        fresh = owner[index]
        self.viewed, self._node, self.stale = fresh.viewed, fresh._node, False
        self.family = fresh.family
        self.family.members.add(self)


def _memory(value: Any) -> Any:
    """Return the array that owns the memory which `value` looks at."""
    value = plain(value)
    while isinstance(getattr(value, "base", None), np.ndarray):
        value = value.base
    return value


def _shape(value: Any) -> Any:
    """The shape that a gradient must have; None for what is no array."""
    value = plain(value)
    return np.shape(value) if isinstance(value, np.ndarray | np.generic | float | complex) else None


def _looks_at(value: Any, operands: Any) -> bool:
    value = plain(value)
    if not isinstance(value, np.ndarray) or not isinstance(value.base, np.ndarray):
        return False
    memory = _memory(value)
    for operand in map(plain, operands):
        parts = operand if isinstance(operand, list | tuple) else (operand,)
        if any(isinstance(plain(part), np.ndarray) and _memory(part) is memory for part in parts):
            return True
    return False


def _same_index(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays among the parts
        return one is other


def _write(out: tuple[Any, ...], result: Any) -> Any:
    (target,) = out
    if not isinstance(target, TracedArray):
        raise UnsupportedError(
            "a traced value cannot be written into a plain array (out=, or an in-place operator "
            "on it): its gradient would be lost; write `x = x + y` instead of `x += y`"
        )
    return target._update(result)


def _box_of(value: Any, trace: int, node: Any) -> Any:
    """Make the box for a result: ours in our traces, autograd's in others."""
    if not isinstance(node, Node):
        return ArrayBox(value, trace, node)
    return (TracedView if node.is_view else TracedArray)(value, trace, node)


def root_box(value: Any, trace: int, log: OpLog | None = None) -> TracedArray:
    """Box an input of a trace; it counts as the owner of its memory."""
    if log is None:
        return TracedArray(value, trace, Node.new_root(value))
    node = LoggedNode.new_root(value)
    node.log = log
    return TracedArray(value, trace, node)


def _install() -> None:
    for value_type, maker in list(Box.type_mappings.items()):
        if maker is ArrayBox and value_type is not ArrayBox:
            Box.type_mappings[value_type] = _box_of
    for cls in (TracedArray, TracedView):
        Box.types.add(cls)
        Box.type_mappings[cls] = _box_of


_install()
