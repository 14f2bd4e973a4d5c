"""Sums, means and products over axes."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive

from ....errors import UnsupportedError
from ..array_function import as_array, numpy_functions, refuse, rule_for
from ..views import in_order_of
from .composed import composed

# -- sums and means --------------------------------------------------------------------------------


def _reduction(name: str) -> None:
    ours = getattr(anp, name)  # autograd's own wrapper: a list becomes an array first

    @rule_for(getattr(np, name))
    def reduce(a: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(name, {"out": kwargs.get("out")})
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


def _check_prod(a: Any, axis: Any = None, dtype: Any = None, *rest: Any, **options: Any) -> None:
    refuse("prod", {"dtype": dtype})
    if isinstance(axis, tuple):
        raise UnsupportedError(f"np.prod is supported over one axis or over all, not {axis}")


@composed(np.prod, check=_check_prod)
def _prod(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False, **_: Any
) -> Any:
    if not np.ndim(a):
        return _product(np.reshape(a, (1,)), 0)
    result = _product(np.ravel(a), 0) if axis is None else _product(a, axis)
    if not keepdims:
        return result
    return np.reshape(result, (1,) * np.ndim(a)) if axis is None else np.expand_dims(result, axis)


@composed(np.average)
def _average(a: Any, axis: Any = None, weights: Any = None, *, keepdims: bool = False) -> Any:
    if weights is None:
        return np.mean(a, axis=axis, keepdims=keepdims)
    weights = _spread(a, axis, weights)
    total = np.sum(weights, axis=axis, keepdims=keepdims)
    return np.sum(a * weights, axis=axis, keepdims=keepdims) / total


def _spread(a: Any, axis: Any, weights: Any) -> Any:
    """Return weights in the shape of what they belong to."""
    weights = as_array(weights)
    if np.shape(weights) != np.shape(a):
        axes = [i % np.ndim(a) for i in (axis if isinstance(axis, tuple) else (axis,))]
        order = sorted(range(len(axes)), key=axes.__getitem__)
        shape = [n if i in axes else 1 for i, n in enumerate(np.shape(a))]
        weights = np.reshape(np.transpose(weights, order), shape)
    return weights * np.ones(np.shape(a))


@composed(np.ptp)
def _ptp(a: Any, axis: Any = None, **options: Any) -> Any:
    return np.max(a, axis=axis, **options) - np.min(a, axis=axis, **options)


@composed(np.median)
def _median(
    a: Any,
    axis: Any = None,
    out: Any = None,
    overwrite_input: bool = False,
    keepdims: bool = False,
) -> Any:
    a = as_array(a)
    if isinstance(axis, tuple):
        axes = [i % np.ndim(a) for i in axis]
        kept = [1 if i in axes else n for i, n in enumerate(np.shape(a))]
        last = np.moveaxis(a, axes, list(range(-len(axes), 0)))
        joined = np.reshape(last, (*np.shape(last)[: np.ndim(a) - len(axes)], -1))
        middle = _median(joined, -1)
        return np.reshape(middle, kept) if keepdims else middle
    flat = np.ravel(a) if axis is None else np.moveaxis(a, axis, 0)
    ordered = np.take_along_axis(flat, np.argsort(flat, axis=0), axis=0)
    size = np.shape(ordered)[0]
    middle = (ordered[(size - 1) // 2] + ordered[size // 2]) / 2
    if not keepdims:
        return middle
    return np.reshape(middle, (1,) * np.ndim(a)) if axis is None else np.expand_dims(middle, axis)


@composed(np.nansum)
def _nansum(a: Any, *args: Any, **kwargs: Any) -> Any:
    return np.sum(np.where(np.isnan(a), 0.0, a), *args, **kwargs)


@composed(np.nanmean)
def _nanmean(a: Any, axis: Any = None, **kwargs: Any) -> Any:
    there = np.sum(~np.isnan(a), axis=axis, **kwargs)
    return _nansum(a, axis=axis, **kwargs) / there


@rule_for(np.cumsum)
def _cumsum(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    a = as_array(a)
    a = np.reshape(a, (1,)) if not np.ndim(a) else a
    return anp.cumsum(a if dtype is None else np.astype(a, np.dtype(dtype)), axis)


@composed(np.cumprod)
def _cumprod(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
    a = a if dtype is None else np.astype(a, np.dtype(dtype))
    a = a if np.ndim(a) else np.reshape(a, (1,))
    flat = np.ravel(a) if axis is None else np.moveaxis(a, axis, 0)
    rows: list[Any] = []
    for row in flat:
        rows.append(rows[-1] * row if rows else row)
    joined = np.stack(rows) if rows else flat.copy()
    return joined if axis is None else in_order_of(np.moveaxis(joined, 0, axis), a)


@composed(*numpy_functions("trapezoid", "trapz"))
def _trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Any:
    y = np.moveaxis(y, axis, -1)
    width = (
        dx if x is None else np.diff(x) if np.ndim(x) == 1 else np.diff(np.moveaxis(x, axis, -1))
    )
    return np.sum(width * (y[..., 1:] + y[..., :-1]) / 2.0, axis=-1)
