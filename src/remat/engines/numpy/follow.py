"""Plain NumPy functions on traced arrays (the `__array_function__` protocol).

Three sources, in this order:
1. the functions written below, for what autograd lacks or gets wrong (lists of arrays,
   broadcasting in `where`, aliases that NumPy 2 added);
2. autograd's wrapper of the same function, if it has a derivative rule or needs none;
3. otherwise an error that names the function. Never a plain array in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import autograd.numpy as anp
import autograd.numpy.fft
import autograd.numpy.linalg
import numpy as np
from autograd.core import VJPNode, primitive_vjps
from autograd.extend import defvjp, notrace_primitive, primitive
from autograd.numpy.numpy_vjps import unbroadcast_f
from autograd.tracer import isbox, notrace_primitives

from ...errors import UnsupportedError

__all__ = ["as_array", "call", "plain", "ufunc_method"]

_ours: dict[Any, Callable[..., Any]] = {}


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a NumPy function some of whose arguments are, or contain, traced arrays."""
    _refuse_options(func, args, kwargs)
    if func in _ours:
        return _ours[func](*args, **kwargs)
    wrapper = _wrapper(func)
    if wrapper is None:
        name = f"{func.__module__}.{func.__name__}".replace("numpy", "np")
        raise UnsupportedError(
            f"{name} is not followed on traced arrays; write it with other NumPy functions, or "
            "give it a rule with autograd.extend.primitive and defvjp"
        )
    args, kwargs = _positional(func, args, kwargs)
    try:
        result = wrapper(*map(as_array, args), **kwargs)
    except (KeyError, AssertionError, AttributeError, RecursionError, NotImplementedError) as error:
        raise UnsupportedError(
            f"np.{func.__name__} is not followed with these arguments ({error})"
        ) from error
    return _with_names(_same_if_alias(result, args))


def ufunc_method(ufunc: Any, method: str, inputs: Any, kwargs: Any) -> Any:
    """`np.add.reduce(x)` and its kind."""
    same = {
        (np.add, "reduce"): np.sum,
        (np.multiply, "reduce"): np.prod,
        (np.maximum, "reduce"): np.max,
        (np.minimum, "reduce"): np.min,
        (np.add, "accumulate"): np.cumsum,
    }.get((ufunc, method))
    if same is None:
        raise UnsupportedError(f"np.{ufunc.__name__}.{method} is not followed on traced arrays")
    if len(inputs) < 2:
        kwargs.setdefault("axis", 0)  # unlike np.sum, np.add.reduce goes over the first axis
    return call(same, inputs, kwargs)


def as_array(value: Any) -> Any:
    """Join traced values that stand in a list or tuple into one traced array."""
    return anp.array(value) if isinstance(value, list | tuple) and _has_box(value) else value


def plain(value: Any) -> Any:
    """Look through the boxes."""
    while isbox(value):
        value = value._value
    return value


def _has_box(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_box, value))
    return bool(isbox(value))


@lru_cache(maxsize=512)
def _wrapper(func: Any) -> Callable[..., Any] | None:
    places = {
        "numpy": anp,
        "numpy.linalg": autograd.numpy.linalg,
        "numpy.fft": autograd.numpy.fft,
    }
    place = places.get(func.__module__)
    wrapper = getattr(place, func.__name__, None)
    known = wrapper in primitive_vjps or wrapper in notrace_primitives[VJPNode]
    return wrapper if known else None


@lru_cache(maxsize=512)
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _positional(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Move traced keyword arguments to the front: autograd looks at positional ones only."""
    if not any(_has_box(value) for value in kwargs.values()):
        return args, kwargs
    try:
        bound = _signature(func).bind(*args, **kwargs)
    except ValueError:
        bound = None  # a C function without a signature
    if bound is None or any(_has_box(value) for value in bound.kwargs.values()):
        names = [name for name, value in kwargs.items() if _has_box(value)]
        raise UnsupportedError(f"np.{func.__name__}: pass {names} by position to have it followed")
    return bound.args, bound.kwargs


# Options that autograd's rules leave out of account, and what they may be nevertheless.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "out": (None,),
    "where": (True,),
    "initial": (None,),
    "order": ("C", "K", None),
    "correction": (None,),
    "mean": (None,),
    "casting": ("same_kind", "unsafe"),
    "subok": (False, True),
    "norm": (None, "backward", "ortho"),
}


def _refuse_options(func: Any, args: Any, kwargs: Any) -> None:
    try:
        given = _signature(func).bind(*args, **kwargs).arguments
    except (ValueError, TypeError):  # a C function without a signature, or a wrong call
        given = kwargs
    for name, allowed in _OPTIONS.items():
        value = given.get(name, np._NoValue)
        is_word = isinstance(value, str | bool | type(None))
        if value is not np._NoValue and not (is_word and value in allowed):
            raise UnsupportedError(
                f"np.{func.__name__} is not followed with {name}={value!r}; leave {name} out"
            )
    dtype = given.get("dtype")
    if dtype is not None and np.dtype(dtype).kind not in "fc":
        raise UnsupportedError(f"np.{func.__name__} is not followed with dtype={dtype!r}")


def _same_if_alias(result: Any, args: Any) -> Any:
    """Where NumPy returns its argument itself (np.real of reals), so do we: it stays an alias."""
    for arg in args:
        if isbox(result) and isbox(arg) and result._value is arg._value:
            return arg
    return result


def _with_names(result: Any) -> Any:
    """Give np.linalg's results their names: `np.linalg.eigh(x).eigenvalues`."""
    kind = type(result._value) if isbox(result) else None
    if kind is None or not hasattr(kind, "_fields"):
        return result
    return kind(*(result[i] for i in range(len(result))))


def _for(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(ours: Callable[..., Any]) -> Callable[..., Any]:
        for func in funcs:
            _ours[func] = ours
        return ours

    return register


def _numpy(*names: str) -> list[Any]:
    """The functions of these names that this NumPy has."""
    found = []
    for name in names:
        place: Any = np
        for part in name.split("."):
            place = getattr(place, part, None)
        if place is not None:
            found.append(place)
    return found


# -- joining ---------------------------------------------------------------------------------------


@_for(*_numpy("concatenate", "concat"))
def _concatenate(arrays: Sequence[Any], axis: int | None = 0, **options: Any) -> Any:
    _no_options("concatenate", options)
    arrays = [as_array(array) for array in arrays]
    if axis is None:
        return anp.concatenate_args(0, *(np.ravel(array) for array in arrays))
    # autograd's rule slices by the axis: it needs the one counted from the front
    return anp.concatenate_args(axis % max(1, np.ndim(arrays[0])), *arrays)


@_for(np.stack)
def _stack(arrays: Sequence[Any], axis: int = 0, **options: Any) -> Any:
    _no_options("stack", options)
    arrays = [as_array(array) for array in arrays]
    if len({np.shape(array) for array in arrays}) != 1:
        raise ValueError("all input arrays must have the same shape")
    return _concatenate([np.expand_dims(array, axis) for array in arrays], axis)


@_for(*_numpy("vstack", "row_stack"))
def _vstack(arrays: Sequence[Any], **options: Any) -> Any:
    _no_options("vstack", options)
    return _concatenate([np.atleast_2d(as_array(array)) for array in arrays], 0)


@_for(np.hstack)
def _hstack(arrays: Sequence[Any], **options: Any) -> Any:
    _no_options("hstack", options)
    arrays = [np.atleast_1d(as_array(array)) for array in arrays]
    return _concatenate(arrays, 0 if np.ndim(arrays[0]) == 1 else 1)


@_for(np.dstack)
def _dstack(arrays: Sequence[Any]) -> Any:
    return _concatenate([np.atleast_3d(as_array(array)) for array in arrays], 2)


@_for(np.column_stack)
def _column_stack(arrays: Sequence[Any]) -> Any:
    def column(array: Any) -> Any:
        return array if np.ndim(array) > 1 else np.reshape(array, (-1, 1))

    return _concatenate([column(as_array(array)) for array in arrays], 1)


@_for(np.append)
def _append(arr: Any, values: Any, axis: int | None = None) -> Any:
    return _concatenate([arr, values], axis)


@_for(np.block)
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
    return join(arrays, levels, max(levels, widest(arrays)))


@_for(np.meshgrid)
def _meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> list[Any]:
    order = list(range(len(xi)))
    if indexing == "xy" and len(xi) > 1:
        order[:2] = 1, 0
    axes = [
        np.reshape(x, [-1 if axis == order[i] else 1 for axis in range(len(xi))])
        for i, x in enumerate(xi)
    ]
    return axes if sparse else _broadcast_arrays(*axes)


@_for(np.broadcast_arrays)
def _broadcast_arrays(*arrays: Any, subok: bool = False) -> list[Any]:
    shape = np.broadcast_shapes(*map(np.shape, arrays))
    return [np.broadcast_to(array, shape) for array in arrays]


@primitive  # type: ignore[untyped-decorator]
def _spread(array: Any, shape: tuple[int, ...]) -> Any:
    return np.broadcast_to(array, shape)


defvjp(_spread, lambda ans, array, shape: unbroadcast_f(array, lambda g: g), None)


@_for(np.broadcast_to)
def _broadcast_to(array: Any, shape: Any, subok: bool = False) -> Any:
    return _spread(array, (shape,) if isinstance(shape, int) else tuple(shape))


@_for(np.tile)
def _tile(A: Any, reps: Any) -> Any:
    reps = (reps,) if np.ndim(reps) == 0 else tuple(reps)
    A = np.reshape(A, (1,) * (len(reps) - np.ndim(A)) + np.shape(A))
    for axis, times in enumerate(reversed(reps), start=1):
        if times < 1:
            raise UnsupportedError("np.tile is followed for one copy or more")
        A = _concatenate([A] * times, -axis) if times > 1 else A
    return A


@_for(np.pad)
def _pad(array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    if mode != "constant" or any(map(_has_box, kwargs.values())):
        raise UnsupportedError(f"np.pad is followed with plain constants, not with mode {mode!r}")
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


@_for(np.where)
def _where(condition: Any, *branches: Any) -> Any:
    condition = condition._value if isbox(condition) else condition
    if not branches:
        return np.nonzero(condition)
    return _choose(condition, *map(as_array, branches))


@_for(np.select)
def _select(conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> Any:
    if len(conditions) != len(choices):
        raise ValueError("list of cases must be same length as list of conditions")
    result = default
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        result = _where(condition, choice, result)
    return result


@_for(np.take)
def _take(a: Any, indices: Any, axis: int | None = None, **options: Any) -> Any:
    _no_options("take", options)
    indices = np.asarray(indices)
    if indices.dtype.kind == "b":
        indices = indices.astype(np.intp)  # unlike a[mask], np.take counts with them
    if axis is None:
        return np.ravel(a)[indices]
    axis = axis % np.ndim(a)
    return a[(slice(None),) * axis + (indices,)]


@_for(np.take_along_axis)
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


@_for(np.compress)
def _compress(condition: Any, a: Any, axis: int | None = None, **options: Any) -> Any:
    _no_options("compress", options)
    return _take(a, np.flatnonzero(condition), axis)


@_for(np.delete)
def _delete(arr: Any, obj: Any, axis: int | None = None) -> Any:
    size = np.size(arr) if axis is None else np.shape(arr)[axis]
    return _take(arr, np.delete(np.arange(size), obj), axis)


@_for(np.flip)
def _flip(m: Any, axis: int | tuple[int, ...] | None = None) -> Any:
    axes = range(np.ndim(m)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    back = {a % np.ndim(m) for a in axes}
    return m[tuple(slice(None, None, -1 if i in back else 1) for i in range(np.ndim(m)))]


@_for(*_numpy("unstack"))
def _unstack(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    return tuple(np.moveaxis(x, axis, 0))


@_for(np.clip)
def _clip(a: Any, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
    low, high = options.pop("min", a_min), options.pop("max", a_max)
    _no_options("clip", options)
    a, low, high = as_array(a), as_array(low), as_array(high)
    if low is not None:
        a = _choose(np.less(plain(a), plain(low)), low, a)
    return a if high is None else _choose(np.greater(plain(a), plain(high)), high, a)


# -- order of axes ---------------------------------------------------------------------------------


@_for(*_numpy("transpose", "permute_dims"))
def _transpose(a: Any, axes: Any = None) -> Any:
    # autograd's rule sorts the axes, so they have to be counted from the front
    return anp.transpose(a, None if axes is None else tuple(axis % np.ndim(a) for axis in axes))


# -- sums and means --------------------------------------------------------------------------------


def _reduction(name: str) -> None:
    ours = getattr(anp, name)  # autograd's own wrapper: a list becomes an array first

    @_for(getattr(np, name))
    def reduce(a: Any, *args: Any, **kwargs: Any) -> Any:
        _no_options(name, {"out": kwargs.get("out")})
        return ours(as_array(a), *args, **kwargs)


for _name in ("mean", "std", "var"):
    _reduction(_name)


@primitive  # type: ignore[untyped-decorator]
def _product(a: Any, axis: int) -> Any:
    return np.prod(a, axis=axis)


def _product_vjp(ans: Any, a: Any, axis: int) -> Any:
    def vjp(g: Any) -> Any:
        if np.all(a):
            return np.expand_dims(g * ans, axis) / a
        # The product of the others, without dividing: an entry is 0.
        ones = np.ones_like(np.take(a, [0], axis=axis))
        cut = (slice(None),) * (axis % a.ndim)
        before = np.concatenate([ones, np.cumprod(a, axis=axis)[(*cut, slice(None, -1))]], axis)
        flipped = np.flip(a, axis)
        after = np.concatenate(
            [ones, np.cumprod(flipped, axis=axis)[(*cut, slice(None, -1))]], axis
        )
        return np.expand_dims(g, axis) * before * np.flip(after, axis)

    return vjp


defvjp(_product, _product_vjp, None)


@_for(np.prod)
def _prod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
    keepdims = options.pop("keepdims", False)
    _no_options("prod", {"dtype": dtype})
    if isinstance(axis, tuple):
        raise UnsupportedError(f"np.prod is followed over one axis or over all, not {axis}")
    a = as_array(a)
    if not np.ndim(a):
        return a
    result = _product(np.ravel(a), 0) if axis is None else _product(a, axis)
    if not keepdims:
        return result
    return np.reshape(result, (1,) * np.ndim(a)) if axis is None else np.expand_dims(result, axis)


@_for(np.average)
def _average(a: Any, axis: Any = None, weights: Any = None, *, keepdims: bool = False) -> Any:
    if weights is None:
        return np.mean(a, axis=axis, keepdims=keepdims)
    if np.shape(weights) != np.shape(a):
        assert isinstance(axis, int)
        shape = [1] * np.ndim(a)
        shape[axis] = -1
        weights = np.reshape(weights, shape)
    total = np.sum(weights * np.ones(np.shape(a)), axis=axis, keepdims=keepdims)
    return np.sum(a * weights, axis=axis, keepdims=keepdims) / total


@_for(np.ptp)
def _ptp(a: Any, axis: Any = None, **options: Any) -> Any:
    return np.max(a, axis=axis, **options) - np.min(a, axis=axis, **options)


@_for(np.median)
def _median(a: Any, axis: int | None = None, *, keepdims: bool = False) -> Any:
    ordered = np.sort(np.ravel(a)) if axis is None else np.moveaxis(np.sort(a, axis=axis), axis, 0)
    size = np.shape(ordered)[0]
    middle = (ordered[(size - 1) // 2] + ordered[size // 2]) / 2
    if not keepdims:
        return middle
    return np.reshape(middle, (1,) * np.ndim(a)) if axis is None else np.expand_dims(middle, axis)


@_for(np.nansum)
def _nansum(a: Any, *args: Any, **kwargs: Any) -> Any:
    return np.sum(_where(np.isnan(a), 0.0, a), *args, **kwargs)


@_for(np.nanmean)
def _nanmean(a: Any, axis: Any = None, **kwargs: Any) -> Any:
    there = np.sum(~np.isnan(a), axis=axis, **kwargs)
    return _nansum(a, axis=axis, **kwargs) / there


@_for(np.cumprod)
def _cumprod(a: Any, axis: int | None = None) -> Any:
    flat = np.ravel(a) if axis is None else np.moveaxis(a, axis, 0)
    rows: list[Any] = []
    for row in flat:
        rows.append(rows[-1] * row if rows else row)
    joined = np.stack(rows)
    return joined if axis is None else np.moveaxis(joined, 0, axis)


@_for(*_numpy("trapezoid", "trapz"))
def _trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Any:
    y = np.moveaxis(y, axis, -1)
    width = (
        dx if x is None else np.diff(x) if np.ndim(x) == 1 else np.diff(np.moveaxis(x, axis, -1))
    )
    return np.sum(width * (y[..., 1:] + y[..., :-1]) / 2.0, axis=-1)


# -- making and copying ----------------------------------------------------------------------------


@_for(np.copy)
def _copy(a: Any, order: str = "K", subok: bool = False) -> Any:
    return a * 1


@_for(np.full_like)
def _full_like(a: Any, fill_value: Any, dtype: Any = None, shape: Any = None, **_: Any) -> Any:
    shape = np.shape(a) if shape is None else shape
    dtype = np.result_type(a) if dtype is None else dtype
    if isbox(fill_value):
        return np.broadcast_to(fill_value.astype(dtype), shape) * 1
    return np.full(shape, fill_value, dtype=dtype)


# -- diagonals -------------------------------------------------------------------------------------


@_for(np.diagonal)
def _diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    a = np.moveaxis(a, (axis1, axis2), (-2, -1))
    rows, columns = np.shape(a)[-2:]
    places = np.arange(max(0, min(rows + min(offset, 0), columns - max(offset, 0))))
    return a[..., places - min(offset, 0), places + max(offset, 0)]


@_for(np.diag)
def _diag(v: Any, k: int = 0) -> Any:
    return anp.diag(v, k) if np.ndim(v) == 1 else _diagonal(v, k)


@_for(np.trace)
def _trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, **options: Any) -> Any:
    _no_options("trace", options)
    return np.sum(_diagonal(a, offset, axis1, axis2), axis=-1)


@_for(*_numpy("linalg.diagonal"))
def _linalg_diagonal(x: Any, /, *, offset: int = 0) -> Any:
    return _diagonal(x, offset, -2, -1)


@_for(*_numpy("linalg.trace"))
def _linalg_trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    _no_options("linalg.trace", {"dtype": dtype})
    return np.sum(_diagonal(x, offset, -2, -1), axis=-1)


@_for(np.gradient)
def _gradient(f: Any, *spacing: Any, axis: Any = None, edge_order: int = 1) -> Any:
    axes = range(np.ndim(f)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    steps = spacing or (1.0,)
    if edge_order != 1 or any(np.ndim(step) for step in steps):
        raise UnsupportedError("np.gradient is followed with even spacing and edge_order=1")
    steps = steps * len(axes) if len(steps) == 1 else steps

    def along(axis: int, step: Any) -> Any:
        x = np.moveaxis(f, axis, 0)
        inner = (x[2:] - x[:-2]) / (2.0 * step)
        first, last = (x[1:2] - x[:1]) / step, (x[-1:] - x[-2:-1]) / step
        return np.moveaxis(_concatenate([first, inner, last]), 0, axis)

    parts = tuple(along(axis, step) for axis, step in zip(axes, steps, strict=True))
    return parts[0] if len(parts) == 1 else parts


# -- products and linear algebra -------------------------------------------------------------------


@_for(*_numpy("vecdot", "linalg.vecdot"))
def _vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    return np.sum(np.conj(np.moveaxis(x1, axis, -1)) * np.moveaxis(x2, axis, -1), axis=-1)


@_for(np.outer, *_numpy("linalg.outer"))
def _outer(a: Any, b: Any, out: Any = None) -> Any:
    _no_options("outer", {"out": out})
    if np.ndim(a) == np.ndim(b) == 1:
        return anp.outer(a, b)
    return np.reshape(a, (-1, 1)) * np.reshape(b, (1, -1))


@_for(np.einsum)
def _einsum(*operands: Any, optimize: Any = False, **options: Any) -> Any:
    _no_options("einsum", options)
    terms = operands[0].split("->")[0].split(",") if isinstance(operands[0], str) else []
    indices = [term.replace(".", "").strip() for term in terms]
    if any(len(set(term)) < len(term) for term in indices):
        raise UnsupportedError(
            f"np.einsum({operands[0]!r}) repeats an index of an operand; take its np.diagonal first"
        )
    return anp.einsum(*operands, optimize=optimize)


@_for(np.kron)
def _kron(a: Any, b: Any) -> Any:
    ndim = max(np.ndim(a), np.ndim(b))
    shapes = [(1,) * (ndim - np.ndim(x)) + np.shape(x) for x in (a, b)]
    left = np.reshape(a, [n for size in shapes[0] for n in (size, 1)])
    right = np.reshape(b, [n for size in shapes[1] for n in (1, size)])
    return np.reshape(left * right, [m * n for m, n in zip(*shapes, strict=True)])


@_for(np.cross, *_numpy("linalg.cross"))
def _cross(a: Any, b: Any, *, axis: int = -1, **options: Any) -> Any:
    _no_options("cross", {name: value for name, value in options.items() if value != -1})
    a, b = np.moveaxis(a, axis, -1), np.moveaxis(b, axis, -1)
    if np.shape(a)[-1] != 3 or np.shape(b)[-1] != 3:
        raise UnsupportedError("np.cross is followed for vectors of length 3")
    (a0, a1, a2), (b0, b1, b2) = (tuple(x[..., i] for i in range(3)) for x in (a, b))
    parts = [a1 * b2 - a2 * b1, a2 * b0 - a0 * b2, a0 * b1 - a1 * b0]
    return np.moveaxis(np.stack(parts, axis=-1), -1, axis)


@_for(np.vdot)
def _vdot(a: Any, b: Any, /) -> Any:
    return np.dot(np.conj(np.ravel(a)), np.ravel(b))


@_for(np.linalg.multi_dot)
def _multi_dot(arrays: Sequence[Any], **options: Any) -> Any:
    _no_options("multi_dot", options)
    result = arrays[0]
    for array in arrays[1:]:
        result = np.dot(result, array)
    return result


@_for(np.linalg.matrix_power)
def _matrix_power(a: Any, n: int) -> Any:
    if n < 0:
        return _matrix_power(np.linalg.inv(a), -n)
    if n == 0:
        return np.broadcast_to(np.eye(np.shape(a)[-1], dtype=np.result_type(a)), np.shape(a))
    half = _matrix_power(a, n // 2) if n > 1 else None
    square = half @ half if half is not None else a
    return square @ a if n % 2 and n > 1 else square


@_for(*_numpy("matrix_transpose", "linalg.matrix_transpose"))
def _matrix_transpose(x: Any, /) -> Any:
    return np.swapaxes(x, -1, -2)


@_for(np.linalg.norm)
def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    x = as_array(x)
    if isinstance(axis, tuple):  # autograd's rule needs axes counted from the front
        axis = tuple(a % np.ndim(x) for a in axis)
    norm = autograd.numpy.linalg.norm(x, ord, axis)
    if not keepdims:
        return norm
    axes = range(np.ndim(x)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    kept = [1 if i in {a % np.ndim(x) for a in axes} else n for i, n in enumerate(np.shape(x))]
    return np.reshape(norm, kept)


@_for(np.linalg.solve)
def _solve(a: Any, b: Any) -> Any:
    batch = np.shape(a)[:-2] == np.shape(b)[:-2] and np.ndim(a) == np.ndim(b)
    if not batch and not (np.ndim(a) == 2 and np.ndim(b) == 1):
        raise UnsupportedError(
            f"np.linalg.solve is followed for one system or for batches of a common shape, not for "
            f"{np.shape(a)} and {np.shape(b)}"
        )
    return autograd.numpy.linalg.solve(a, b)


def _fft_of_its_own_size(func: Any) -> None:
    """The rules for real transforms are wrong where the input is cut or padded."""

    @_for(func)
    def transform(a: Any, n: Any = None, *args: Any, **kwargs: Any) -> Any:
        if any(value is not None for value in (n, kwargs.get("s"))):
            raise UnsupportedError(f"np.fft.{func.__name__} is followed without n= or s=")
        return getattr(autograd.numpy.fft, func.__name__)(a, n, *args, **kwargs)


for _func in (np.fft.rfft, np.fft.rfft2, np.fft.rfftn):
    _fft_of_its_own_size(_func)


@_for(*_numpy("linalg.vector_norm"))
def _vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    if axis is None:
        norm = _norm(np.ravel(x), ord)
        return np.reshape(norm, (1,) * np.ndim(x)) if keepdims else norm
    if isinstance(axis, tuple):
        raise UnsupportedError(
            f"np.linalg.vector_norm is followed over one axis or all, not {axis}"
        )
    return _norm(x, ord, axis, keepdims)


@_for(np.linalg.eigvalsh)
def _eigvalsh(a: Any, UPLO: Any = "L") -> Any:
    return np.linalg.eigh(a, UPLO)[0]


@_for(*_numpy("linalg.svdvals"))
def _svdvals(x: Any, /) -> Any:
    return np.linalg.svd(x, full_matrices=False)[1]


for _alias in ("tensordot", "matmul"):
    for _func in _numpy(f"linalg.{_alias}"):
        _ours[_func] = getattr(np, _alias)


# -- single functions that autograd has no rule for -----------------------------------------------

defvjp(anp.cbrt, lambda ans, x: lambda g: g / (3 * ans**2))
defvjp(anp.positive, lambda ans, x: lambda g: g)
defvjp(
    anp.fmod,
    lambda ans, x, y: unbroadcast_f(x, lambda g: g),
    lambda ans, x, y: unbroadcast_f(y, lambda g: -g * anp.trunc(x / y)),
)
defvjp(
    anp.copysign,
    lambda ans, x, y: unbroadcast_f(x, lambda g: g * anp.sign(x) * anp.sign(ans)),
    lambda ans, x, y: unbroadcast_f(y, lambda g: anp.zeros(anp.shape(g))),
)


@primitive  # type: ignore[untyped-decorator]
def _interp(x: Any, xp: Any, fp: Any) -> Any:
    return np.interp(x, xp, fp)


def _interp_slope(x: Any, xp: Any, fp: Any) -> Any:
    cell = np.clip(np.searchsorted(xp, x, side="right") - 1, 0, len(xp) - 2)
    inside = (x >= xp[0]) & (x <= xp[-1])
    return inside * (fp[cell + 1] - fp[cell]) / (xp[cell + 1] - xp[cell])


def _interp_weights(g: Any, x: Any, xp: Any, fp: Any) -> Any:
    x = np.clip(x, xp[0], xp[-1])
    cell = np.clip(np.searchsorted(xp, x, side="right") - 1, 0, len(xp) - 2)
    right = (x - xp[cell]) / (xp[cell + 1] - xp[cell])
    result = np.zeros(np.shape(fp))
    np.add.at(result, cell, g * (1 - right))
    np.add.at(result, cell + 1, g * right)
    return result


defvjp(
    _interp,
    lambda ans, x, xp, fp: lambda g: g * _interp_slope(x, np.asarray(xp), np.asarray(fp)),
    None,
    lambda ans, x, xp, fp: lambda g: _interp_weights(g, x, np.asarray(xp), fp),
    argnums=(0, 1, 2),
)


@_for(np.interp)
def _interpolate(x: Any, xp: Any, fp: Any, **options: Any) -> Any:
    _no_options("interp", options)
    if isbox(xp):
        raise UnsupportedError("np.interp is followed in x and fp, not in xp")
    return _interp(x, xp, fp)


# -- questions: answered on the plain values -------------------------------------------------------

for _func in _numpy(
    *("isin", "may_share_memory", "shares_memory", "iscomplexobj", "isrealobj"),
    *("digitize", "array_repr", "array_str", "array2string", "nanargmax"),
    *("nanargmin", "common_type", "min_scalar_type", "can_cast", "broadcast_shapes", "size"),
    *("zeros_like", "ones_like", "empty_like", "tril_indices_from", "triu_indices_from"),
):
    _ours[_func] = notrace_primitive(_func)


def _no_options(name: str, options: dict[str, Any]) -> None:
    unknown = [key for key, value in options.items() if value is not None]
    if unknown:
        raise UnsupportedError(f"np.{name} is followed without {', '.join(sorted(unknown))}")
