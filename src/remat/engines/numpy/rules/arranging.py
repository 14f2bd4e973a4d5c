"""Joining, choosing, copying and turning arrays."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive
from autograd.numpy.numpy_vjps import unbroadcast_f
from autograd.tracer import isbox

from ....errors import UnsupportedError
from ..array_function import as_array, has_box, numpy_functions, plain, refuse, rule_for, rules
from ..views import in_c_order, in_order_of
from .composed import composed

# -- joining ---------------------------------------------------------------------------------------


@rule_for(*numpy_functions("concatenate", "concat"))
def _concatenate(arrays: Sequence[Any], axis: int | None = 0, **options: Any) -> Any:
    refuse("concatenate", options)
    arrays = [as_array(array) for array in arrays]
    if axis is None:
        return anp.concatenate_args(0, *(np.ravel(array) for array in arrays))
    # autograd's rule slices by the axis: it needs the one counted from the front
    return anp.concatenate_args(axis % max(1, np.ndim(arrays[0])), *arrays)


@rule_for(np.stack)
def _stack(arrays: Sequence[Any], axis: int = 0, **options: Any) -> Any:
    refuse("stack", options)
    arrays = [as_array(array) for array in arrays]
    if len({np.shape(array) for array in arrays}) != 1:
        raise ValueError("all input arrays must have the same shape")
    return _concatenate([np.expand_dims(array, axis) for array in arrays], axis)


@rule_for(*numpy_functions("vstack", "row_stack"))
def _vstack(arrays: Sequence[Any], **options: Any) -> Any:
    refuse("vstack", options)
    return _concatenate([np.atleast_2d(as_array(array)) for array in arrays], 0)


@rule_for(np.hstack)
def _hstack(arrays: Sequence[Any], **options: Any) -> Any:
    refuse("hstack", options)
    arrays = [np.atleast_1d(as_array(array)) for array in arrays]
    return _concatenate(arrays, 0 if np.ndim(arrays[0]) == 1 else 1)


@rule_for(np.dstack)
def _dstack(arrays: Sequence[Any]) -> Any:
    return _concatenate([np.atleast_3d(as_array(array)) for array in arrays], 2)


@rule_for(np.column_stack)
def _column_stack(arrays: Sequence[Any]) -> Any:
    def column(array: Any) -> Any:
        return array if np.ndim(array) > 1 else np.reshape(array, (-1, 1))

    return _concatenate([column(as_array(array)) for array in arrays], 1)


@rule_for(np.append)
def _append(arr: Any, values: Any, axis: int | None = None) -> Any:
    return _concatenate([arr, values], axis)


@rule_for(np.block)
def _block(arrays: Any) -> Any:
    def depth(part: Any) -> int:
        return 1 + depth(part[0]) if isinstance(part, list) else 0

    def join(part: Any, level: int, ndim: int) -> Any:
        if not isinstance(part, list):
            return np.reshape(part, (1,) * (ndim - np.ndim(part)) + np.shape(part))
        return _concatenate([join(p, level - 1, ndim) for p in part], -level)

    def widest(part: Any) -> int:
        return max(map(widest, part)) if isinstance(part, list) else np.ndim(part)

    levels = depth(arrays)
    joined = join(arrays, levels, max(levels, widest(arrays)))
    return joined if levels else joined.copy()


# -- taking apart ----------------------------------------------------------------------------------


def _split_by(function: Any, axis_for: Callable[[int], int]) -> None:
    """Return a list of views, as NumPy does."""

    @rule_for(function)
    def split(ary: Any, indices_or_sections: Any, axis: int | None = None) -> list[Any]:
        ary = as_array(ary)
        options = {} if axis is None else {"axis": axis}
        # NumPy says what it does not accept, and how many pieces there are.
        like = function(np.broadcast_to(0.0, np.shape(ary)), indices_or_sections, **options)
        axis = axis_for(np.ndim(ary)) if axis is None else axis % np.ndim(ary)
        if np.ndim(indices_or_sections) == 0:
            cuts = [0, *itertools.accumulate(np.shape(piece)[axis] for piece in like)]
        else:
            cuts = [0, *map(int, indices_or_sections), np.shape(ary)[axis]]
        before = (slice(None),) * axis
        return [ary[(*before, slice(*ends))] for ends in itertools.pairwise(cuts)]


for _function, _axis_for in {
    np.split: lambda ndim: 0,
    np.array_split: lambda ndim: 0,
    np.vsplit: lambda ndim: 0,
    np.hsplit: lambda ndim: 0 if ndim == 1 else 1,
    np.dsplit: lambda ndim: 2,
}.items():
    _split_by(_function, _axis_for)


# -- spreading out ---------------------------------------------------------------------------------


@rule_for(np.meshgrid)
def _meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Any:
    order = list(range(len(xi)))
    if indexing == "xy" and len(xi) > 1:
        order[:2] = 1, 0
    axes = [
        np.reshape(x, [-1 if axis == order[i] else 1 for axis in range(len(xi))])
        for i, x in enumerate(xi)
    ]
    grids = tuple(axes) if sparse else _broadcast_arrays(*axes)
    return tuple(grid.copy() for grid in grids) if copy else grids


@rule_for(np.broadcast_arrays)
def _broadcast_arrays(*arrays: Any, subok: bool = False) -> tuple[Any, ...]:
    shape = np.broadcast_shapes(*map(np.shape, arrays))
    if all(getattr(plain(array), "shape", None) == shape for array in arrays):
        return arrays
    like = np.broadcast_to(0.0, shape)
    return tuple(
        np.broadcast_to(array, shape) if isbox(array) else np.broadcast_arrays(array, like)[0]
        for array in arrays
    )


@primitive  # type: ignore[untyped-decorator]
def _spread(array: Any, shape: tuple[int, ...]) -> Any:
    return np.broadcast_to(array, shape)


defvjp(_spread, lambda ans, array, shape: unbroadcast_f(array, lambda g: g), None)


@rule_for(np.broadcast_to)
def _broadcast_to(array: Any, shape: Any, subok: bool = False) -> Any:
    return _spread(array, (shape,) if isinstance(shape, int) else tuple(shape))


@rule_for(np.repeat)
def _repeat(a: Any, repeats: Any, axis: int | None = None) -> Any:
    if np.ndim(repeats) == 0:
        return anp.repeat(as_array(a), repeats, axis)
    size = np.size(a) if axis is None else np.shape(a)[axis]
    return _take(a, np.repeat(np.arange(size), repeats), axis)


@rule_for(np.tile)
def _tile(A: Any, reps: Any) -> Any:
    reps = (reps,) if np.ndim(reps) == 0 else tuple(reps)
    A = np.reshape(A, (1,) * (len(reps) - np.ndim(A)) + np.shape(A))
    if any(times < 1 for times in reps):
        raise UnsupportedError("np.tile is supported for one copy or more")
    for axis, times in enumerate(reversed(reps), start=1):
        A = _concatenate([A] * times, -axis) if times > 1 else A
    return in_c_order(A) if any(times > 1 for times in reps) else np.copy(A)


@rule_for(np.pad)
def _pad(array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    if mode != "constant" or any(map(has_box, kwargs.values())):
        raise UnsupportedError(f"np.pad is supported with plain constants, not with mode {mode!r}")
    return anp.pad(array, pad_width, mode, **kwargs)


# -- choosing --------------------------------------------------------------------------------------


@primitive  # type: ignore[untyped-decorator]
def _choose(condition: Any, x: Any, y: Any) -> Any:
    return np.where(condition, x, y)


defvjp(
    _choose,
    None,
    lambda ans, c, x, y: unbroadcast_f(x, lambda g: _choose(c, g, np.zeros_like(g))),
    lambda ans, c, x, y: unbroadcast_f(y, lambda g: _choose(c, np.zeros_like(g), g)),
)


@rule_for(np.where)
def _where(condition: Any, *branches: Any) -> Any:
    condition = condition._value if isbox(condition) else condition
    if not branches:
        return np.nonzero(condition)
    return _choose(condition, *map(as_array, branches))


@rule_for(np.select)
def _select(conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> Any:
    if len(conditions) != len(choices):
        raise ValueError("list of cases must be same length as list of conditions")
    result = default
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        result = _where(condition, choice, result)
    return in_c_order(result) if isbox(result) else result


@rule_for(np.take)
def _take(a: Any, indices: Any, axis: int | None = None, **options: Any) -> Any:
    refuse("take", options)
    indices = np.asarray(indices)
    if indices.dtype.kind not in "biu":
        raise UnsupportedError(f"np.take is supported with whole numbers, not {indices.dtype}")
    if indices.dtype.kind == "b":
        indices = indices.astype(np.intp)  # unlike a[mask], np.take counts with them
    if axis is None:
        return np.ravel(a)[indices]
    axis = axis % np.ndim(a)
    taken = a[(slice(None),) * axis + (indices,)]
    return in_c_order(taken) if np.ndim(taken) else taken


@rule_for(np.take_along_axis)
def _take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> Any:
    if axis is None:
        return np.ravel(arr)[indices]
    axis = axis % np.ndim(arr)
    shape = np.shape(indices)
    grid = [
        indices
        if i == axis
        else np.arange(n).reshape([-1 if j == i else 1 for j in range(len(shape))])
        for i, n in enumerate(np.shape(arr))
    ]
    return arr[tuple(grid)]


@rule_for(np.compress)
def _compress(condition: Any, a: Any, axis: int | None = None, **options: Any) -> Any:
    refuse("compress", options)
    return _take(a, np.flatnonzero(condition), axis)


@rule_for(np.delete)
def _delete(arr: Any, obj: Any, axis: int | None = None) -> Any:
    size = np.size(arr) if axis is None else np.shape(arr)[axis]
    taken = _take(arr, np.delete(np.arange(size), obj), axis)
    return in_order_of(taken, np.asfortranarray(plain(taken))) if plain(arr).flags.fnc else taken


@rule_for(np.flip)
def _flip(m: Any, axis: int | tuple[int, ...] | None = None) -> Any:
    axes = range(np.ndim(m)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    back = {a % np.ndim(m) for a in axes}
    return m[tuple(slice(None, None, -1 if i in back else 1) for i in range(np.ndim(m)))]


@rule_for(*numpy_functions("unstack"))
def _unstack(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    return tuple(np.moveaxis(x, axis, 0))


@rule_for(np.clip)
def _clip(a: Any, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
    low, high = options.pop("min", a_min), options.pop("max", a_max)
    refuse("clip", options)
    a, low, high = as_array(a), as_array(low), as_array(high)
    if low is None and high is None:
        a = np.copy(a)
    if low is not None:
        a = _choose(np.less(plain(a), plain(low)), low, a)
    a = a if high is None else _choose(np.greater(plain(a), plain(high)), high, a)
    return a[()] if isinstance(plain(a), np.ndarray) and not np.ndim(a) else a


# -- order of axes ---------------------------------------------------------------------------------


@rule_for(*numpy_functions("transpose", "permute_dims"))
def _transpose(a: Any, axes: Any = None) -> Any:
    axes = (axes,) if isinstance(axes, int | np.integer) else axes
    # autograd's rule sorts the axes, so they have to be counted from the front
    return anp.transpose(a, None if axes is None else tuple(axis % np.ndim(a) for axis in axes))


# -- making and copying ----------------------------------------------------------------------------


@rule_for(np.copy)
def _copy(a: Any, order: str = "K", subok: bool = False) -> Any:
    return a.copy(order) if isinstance(plain(a), np.ndarray) else _spread(a, ()).copy(order)


@rule_for(np.array, np.asarray)  # with like=x, which is how NumPy asks
def _array(a: Any, dtype: Any = None, *, copy: bool | None = True, **options: Any) -> Any:
    refuse("array", options)
    joined = as_array(a)
    joined = _copy(a) if joined is a and copy else joined
    return joined if dtype is None else np.astype(joined, np.dtype(dtype), copy=False)


@rule_for(*numpy_functions("astype"))
def _astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    refuse("astype", {"device": device})
    return x.astype(dtype, copy=copy)


@rule_for(np.full_like)
def _full_like(a: Any, fill_value: Any, dtype: Any = None, shape: Any = None, **_: Any) -> Any:
    shape = np.shape(a) if shape is None else shape
    dtype = np.result_type(a) if dtype is None else dtype
    if isbox(fill_value):
        filled = np.broadcast_to(fill_value.astype(dtype), shape).copy()
        return in_order_of(filled, np.empty_like(plain(a), dtype, shape=shape))
    return np.full_like(plain(a), fill_value, dtype, shape=shape)


@primitive  # type: ignore[untyped-decorator]
def _spaced(start: Any, stop: Any, num: int, endpoint: bool, axis: int) -> Any:
    return np.linspace(start, stop, num, endpoint, axis=axis)


def _spaced_vjp(end: int) -> Any:
    def maker(ans: Any, start: Any, stop: Any, num: int, endpoint: bool, axis: int) -> Any:
        share = np.linspace(0.0, 1.0, num, endpoint)
        share = share if end else 1.0 - share

        def summed(g: Any) -> Any:
            return np.tensordot(share, np.moveaxis(g, axis, 0), axes=1)

        return unbroadcast_f((start, stop)[end], summed)

    return maker


defvjp(_spaced, _spaced_vjp(0), _spaced_vjp(1), None, None, None)


@rule_for(np.linspace)
def _linspace(
    start: Any,
    stop: Any,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: Any = None,
    axis: int = 0,
    **options: Any,
) -> Any:
    refuse("linspace", options)
    start, stop = as_array(start), as_array(stop)
    num = operator.index(num)
    spaced = _spaced(start, stop, num, endpoint, axis)
    if dtype is not None:
        spaced = spaced.astype(dtype)
    if not retstep:
        return spaced
    gaps = num - 1 if endpoint else num
    return spaced, (stop - start) / gaps if gaps > 0 else np.nan


@rule_for(np.imag)
def _imag(val: Any) -> Any:
    val = as_array(val)
    # Real numbers have a read-only part of zeros, which has no gradient.
    return anp.imag(val) if np.iscomplexobj(val) else np.imag(plain(val))


# -- diagonals -------------------------------------------------------------------------------------


def _entries(a: Any, offset: int, axis1: int, axis2: int) -> Any:
    """A copy of a diagonal."""
    a = np.moveaxis(a, (axis1, axis2), (-2, -1))
    rows, columns = np.shape(a)[-2:]
    places = np.arange(max(0, min(rows + min(offset, 0), columns - max(offset, 0))))
    return a[..., places - min(offset, 0), places + max(offset, 0)]


@primitive  # type: ignore[untyped-decorator]
def _diagonal_view(a: Any, offset: int, axis1: int, axis2: int) -> Any:
    return np.diagonal(a, offset, axis1, axis2)


@primitive  # type: ignore[untyped-decorator]
def _embedded(g: Any, shape: tuple[int, ...], offset: int, axis1: int, axis2: int) -> Any:
    """Return zeros of a shape, with `g` as their diagonal."""
    result = np.zeros(shape, np.result_type(g))
    diagonal = np.diagonal(result, offset, axis1, axis2)
    diagonal.flags.writeable = True
    diagonal[...] = g
    return result


defvjp(
    _diagonal_view,
    lambda ans, a, *places: lambda g: _embedded(g, np.shape(a), *places),
    *(None,) * 3,
)
defvjp(
    _embedded,
    lambda ans, g, shape, *places: lambda gg: _entries(gg, *places),
    *(None,) * 4,
)


@rule_for(np.diagonal)
def _diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    return _diagonal_view(as_array(a), offset, axis1, axis2)


@rule_for(np.diag)
def _diag(v: Any, k: int = 0) -> Any:
    v = as_array(v)
    return anp.diag(v, k) if np.ndim(v) == 1 else _diagonal(v, k)


@rule_for(np.trace)
def _trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, **options: Any) -> Any:
    refuse("trace", options)
    return np.sum(_entries(a, offset, axis1, axis2), axis=-1)


@rule_for(*numpy_functions("linalg.diagonal"))
def _linalg_diagonal(x: Any, /, *, offset: int = 0) -> Any:
    return _diagonal(x, offset, -2, -1)


@rule_for(*numpy_functions("linalg.trace"))
def _linalg_trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    refuse("linalg.trace", {"dtype": dtype})
    return np.sum(_entries(x, offset, -2, -1), axis=-1)


@composed(np.gradient)
def _gradient_along(f: Any, step: Any, *, axis: int) -> Any:
    x = np.moveaxis(f, axis, 0)
    inner = (x[2:] - x[:-2]) / (2.0 * step)
    first, last = (x[1:2] - x[:1]) / step, (x[-1:] - x[-2:-1]) / step
    return in_order_of(np.moveaxis(_concatenate([first, inner, last]), 0, axis), f)


_along = rules[np.gradient]


@rule_for(np.gradient)
def _gradient(f: Any, *spacing: Any, axis: Any = None, edge_order: int = 1) -> Any:
    axes = range(np.ndim(f)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    steps = spacing or (1.0,)
    if edge_order != 1 or any(np.ndim(step) for step in steps):
        raise UnsupportedError("np.gradient is supported with even spacing and edge_order=1")
    steps = steps * len(axes) if len(steps) == 1 else steps
    parts = tuple(_along(f, step, axis=axis) for axis, step in zip(axes, steps, strict=True))
    return parts[0] if len(parts) == 1 else parts
