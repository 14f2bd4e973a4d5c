"""Views of traced arrays: how they are made, made again, and written through.

A traced array is never written to: an in-place change gives its box another value. So a view cannot
see a change through its memory. Instead, it knows the functions that lead to it from the array that
it is a view of, its owner:

1. If the owner has changed since, the functions are called once more, on what the owner is now.
2. A write to the view becomes a write to the owner: to a copy of it, at the place to which the same
   functions lead.

Both need the copy to have the strides of the original: whether a reshape is a view depends on them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, final

import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive
from autograd.numpy.numpy_vjps import unbroadcast_f
from numpy.lib.array_utils import byte_bounds

from ...errors import UnsupportedError
from .array_function import memory_of, plain

__all__ = [
    "Link",
    "ViewChain",
    "ViewOrigin",
    "duplicate",
    "has_strides_of",
    "in_c_order",
    "in_order_of",
    "make_link",
    "refuse_overlap",
    "replaced",
    "written",
]

Array = Any  # autograd and NumPy share no useful type


class Link(NamedTuple):
    """A call of a view function, without the array that it is a view of."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int  # of that array among `args`

    def __call__(self, array: Array) -> Array:
        args = (*self.args[: self.place], array, *self.args[self.place + 1 :])
        return self.function(*args, **self.kwargs)


def make_link(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> Link:
    args = tuple(None if i == place else _frozen(arg) for i, arg in enumerate(args))
    return Link(function, args, {key: _frozen(value) for key, value in kwargs.items()}, place)


def _frozen(argument: Any) -> Any:
    """The program may change an index or a shape after the call."""
    if isinstance(argument, np.ndarray):
        return argument.copy()
    if type(argument) in (list, tuple):
        return type(argument)(map(_frozen, argument))
    return argument


@final
class ViewChain:
    """The functions that lead from an array with these strides to a view of it."""

    __slots__ = ("itemsize", "links", "strides")

    def __init__(
        self, strides: tuple[int, ...], itemsize: int, links: tuple[Link, ...] = ()
    ) -> None:
        self.strides = strides
        self.itemsize = itemsize
        self.links = links

    def then(self, link: Link) -> ViewChain:
        return ViewChain(self.strides, self.itemsize, (*self.links, link))

    def __call__(self, array: Array) -> Array:
        for call in self.links:
            array = call(array)
        return array

    def strides_for(self, dtype: np.dtype[Any]) -> tuple[int, ...]:
        """Return the strides of an array of the same layout; a gradient has a type of its own."""
        return tuple(stride * dtype.itemsize // self.itemsize for stride in self.strides)

    def gradient(self, g: Array) -> Array:
        """Return the gradient of what was written to the view."""
        part = self(g)
        # autograd's gradient of x + iy is that of x minus i times that of y.
        return -part if any(call.function is anp.imag for call in self.links) else part


class ViewOrigin(NamedTuple):
    """Whose memory a result is in: of a traced array, or (None) of a plain one."""

    owner: weakref.ref[Any] | None
    chain: ViewChain | None  # None: it cannot be made again

    def then(self, link: Link) -> ViewOrigin:
        return ViewOrigin(self.owner, self.chain and self.chain.then(link))


@primitive  # type: ignore[untyped-decorator]
def written(array: Array, chain: ViewChain, value: Array) -> Array:
    """Return a copy of `array` in which the view to which `chain` leads is `value`."""
    copy = duplicate(array, chain.strides_for(np.asarray(array).dtype))
    view = chain(copy)
    if memory_of(view) is not memory_of(copy) or _may_overlap_itself(view):
        raise UnsupportedError(
            "a write to a view whose entries share memory with one another is not supported; write "
            "to a copy"
        )
    view[...] = value
    return copy


defvjp(
    written,
    lambda ans, array, chain, value: lambda g: written(g, chain, 0.0),
    None,
    lambda ans, array, chain, value: lambda g: chain.gradient(g),  # noqa: PLW0108  (a closure)
)


# -- writes to an index ----------------------------------------------------------------------------


@primitive  # type: ignore[untyped-decorator]
def replaced(array: Array, index: Any, value: Array) -> Array:
    """Return a copy of `array` in which `array[index]` is `value`."""
    copy = duplicate(array)
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
    replaced,
    lambda ans, array, index, value: lambda g: replaced(g, index, 0.0),
    None,
    _value_vjp,
)


def refuse_overlap(array: Array, index: Any, value: Any) -> None:
    """Refuse `array[index] = value` where NumPy reads entries that it has written already.

    It does so for one axis with other strides (`x[::2] = x[:3]`) and for masks, and its result is
    not the one that the statement says. So we ask it, with other numbers in the same places.
    """
    array, value = plain(array), plain(value)
    if not (isinstance(value, np.ndarray) and np.may_share_memory(array, value)):
        return
    ends = [end for each in (array, value) for end in byte_bounds(each)]
    memory = np.zeros(max(ends) - min(ends), np.uint8)
    source, target = (_moved(each, memory, min(ends)) for each in (value, array))
    source[...] = np.arange(target.size, target.size + source.size).reshape(source.shape)
    target[...] = np.arange(target.size).reshape(target.shape)
    right = target.copy()
    right[index] = source.copy()
    target[index] = source
    if not np.array_equal(target, right):
        raise UnsupportedError(
            "an assignment reads entries of the array that it writes to, and NumPy gets them after "
            "they were written; assign a copy (x[::2] = x[:3].copy())"
        )


def _moved(array: Array, memory: Array, start: int) -> Array:
    """Return an array that lies in `memory` as `array` does in what begins at `start`."""
    offset = array.__array_interface__["data"][0] - start
    return np.ndarray(array.shape, array.dtype, memory, offset, array.strides)


# -- strides ---------------------------------------------------------------------------------------


def in_c_order(array: Array) -> Array:
    """Return a traced array as NumPy lays it out in memory where it makes a new one."""
    return _arranged(array, np.empty(np.shape(array), plain(array).dtype).strides)


def in_order_of(array: Array, like: Array) -> Array:
    """Return a traced array that lies in memory as NumPy's `empty_like(like)` does."""
    return _arranged(array, np.empty_like(plain(like), plain(array).dtype).strides)


def _arranged(array: Array, strides: tuple[int, ...]) -> Array:
    found = plain(array)
    return array if _same(found.shape, found.strides, strides) else _with_strides(array, strides)


@primitive  # type: ignore[untyped-decorator]
def _with_strides(array: Array, strides: tuple[int, ...]) -> Array:
    return duplicate(array, strides)


defvjp(_with_strides, lambda ans, array, strides: lambda g: g, None)


def duplicate(array: Array, strides: tuple[int, ...] | None = None) -> Array:
    """Return a copy with the same strides, or with others, also if they leave gaps."""
    strides = np.asarray(array).strides if strides is None else strides
    copy = np.array(array)
    if _same(copy.shape, copy.strides, strides):
        return copy
    if _may_overlap(copy.shape, strides, copy.itemsize):
        raise UnsupportedError(
            "an array whose entries share memory with one another is changed in place; change a "
            "copy (x = x.copy())"
        )
    low = sum(min(0, (n - 1) * stride) for n, stride in zip(copy.shape, strides, strict=True))
    high = sum(max(0, (n - 1) * stride) for n, stride in zip(copy.shape, strides, strict=True))
    buffer = np.zeros(high - low + copy.itemsize, np.uint8)
    spread: Array = np.ndarray(copy.shape, copy.dtype, buffer, -low, strides)
    spread[...] = copy
    return spread


def has_strides_of(one: Array, other: Array) -> bool:
    """Tell whether two arrays of the same shape lie alike in memory."""
    return _same(one.shape, one.strides, other.strides)


def _same(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    if one == other or 0 in shape:
        return True
    return all(a == b for n, a, b in zip(shape, one, other, strict=True) if n > 1)


def _may_overlap_itself(view: Array) -> bool:
    return _may_overlap(view.shape, view.strides, view.itemsize)


def _may_overlap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Tell whether two entries may share memory: certain are those whose axes lie in each other."""
    if 0 in shape:
        return False
    reach = itemsize
    for stride, n in sorted((abs(s), n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += (n - 1) * stride
    return False
