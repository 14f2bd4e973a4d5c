"""Products, linear algebra, single functions, and questions about arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp
import autograd.numpy.linalg
import numpy as np
from autograd.extend import defvjp, notrace_primitive, primitive
from autograd.numpy.numpy_vjps import unbroadcast_f
from autograd.tracer import isbox

from ....errors import UnsupportedError
from ..array_function import as_array, has_box, numpy_functions, plain, refuse, rule_for, rules
from ..views import in_c_order
from .composed import composed, composed_of_list

# -- products and linear algebra -------------------------------------------------------------------


@composed(*numpy_functions("vecdot", "linalg.vecdot"))
def _vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    return np.sum(np.conj(np.moveaxis(x1, axis, -1)) * np.moveaxis(x2, axis, -1), axis=-1)


@rule_for(np.outer, *numpy_functions("linalg.outer"))
def _outer(a: Any, b: Any, out: Any = None) -> Any:
    refuse("outer", {"out": out})
    a, b = (as_array(x) if has_box(x) else np.asarray(x) for x in (a, b))
    if np.ndim(a) == np.ndim(b) == 1:
        return anp.outer(a, b)
    return np.reshape(a, (-1, 1)) * np.reshape(b, (1, -1))


@rule_for(np.einsum)
def _einsum(*operands: Any, optimize: Any = False, **options: Any) -> Any:
    refuse("einsum", options)
    terms, result, _ = anp.parse_einsum_input(*operands)
    terms = terms.split(",")
    if all(len(set(term)) == len(term) for term in terms):
        return anp.einsum(*operands, optimize=optimize)
    arrays = operands[1:] if isinstance(operands[0], str) else operands[: 2 * len(terms) : 2]
    pairs = [_without_repeats(term, x) for term, x in zip(terms, arrays, strict=True)]
    subscripts = ",".join(term for term, _ in pairs) + "->" + result
    return anp.einsum(subscripts, *(x for _, x in pairs), optimize=optimize)


def _without_repeats(term: str, array: Any) -> tuple[str, Any]:
    """Take the diagonal of the axes that have the same name."""
    for name in sorted(set(term)):
        while term.count(name) > 1:
            first, last = term.index(name), term.rindex(name)
            array = np.diagonal(array, 0, first, last)
            term = term[:first] + term[first + 1 : last] + term[last + 1 :] + name
    return term, array


@composed(np.kron)
def _kron(a: Any, b: Any) -> Any:
    ndim = max(np.ndim(a), np.ndim(b))
    shapes = [(1,) * (ndim - np.ndim(x)) + np.shape(x) for x in (a, b)]
    left = np.reshape(a, [n for size in shapes[0] for n in (size, 1)])
    right = np.reshape(b, [n for size in shapes[1] for n in (1, size)])
    return np.reshape(left * right, [m * n for m, n in zip(*shapes, strict=True)])


@composed(np.cross)
def _cross(
    a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None
) -> Any:
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = np.moveaxis(as_array(a), axisa, -1), np.moveaxis(as_array(b), axisb, -1)
    lengths = {np.shape(a)[-1], np.shape(b)[-1]}
    if not lengths <= {2, 3}:
        raise ValueError(f"np.cross takes vectors of length 2 or 3, got {sorted(lengths)}")
    # A third number that is not there is 0.
    (a0, a1, a2), (b0, b1, b2) = (
        (x[..., 0], x[..., 1], x[..., 2] if np.shape(x)[-1] == 3 else 0.0) for x in (a, b)
    )
    if lengths == {2}:
        return a0 * b1 - a1 * b0
    parts = [a1 * b2 - a2 * b1, a2 * b0 - a0 * b2, a0 * b1 - a1 * b0]
    return np.moveaxis(in_c_order(np.stack(parts, axis=-1)), -1, axisc)


@composed(*numpy_functions("linalg.cross"))
def _linalg_cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    return _cross(x1, x2, axis=axis)


@composed(np.vdot)
def _vdot(a: Any, b: Any, /) -> Any:
    return np.dot(np.conj(np.ravel(a)), np.ravel(b))


@composed_of_list(np.linalg.multi_dot)
def _multi_dot(arrays: Sequence[Any]) -> Any:
    result = arrays[0]
    for array in arrays[1:]:
        result = np.dot(result, array)
    return result


@composed(np.linalg.matrix_power)
def _matrix_power(a: Any, n: int) -> Any:
    if n < 0:
        return _matrix_power(np.linalg.inv(a), -n)
    if n == 0:
        identity = np.empty_like(plain(a))
        identity[...] = np.eye(np.shape(a)[-1])
        return identity
    half = _matrix_power(a, n // 2) if n > 1 else None
    square = half @ half if half is not None else a
    return square @ a if n % 2 and n > 1 else square


@rule_for(*numpy_functions("matrix_transpose", "linalg.matrix_transpose"))
def _matrix_transpose(x: Any, /) -> Any:
    return np.swapaxes(x, -1, -2)


@rule_for(np.linalg.norm)
def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    x = as_array(x)
    if isinstance(axis, tuple) and len(axis) == 1:
        (axis,) = axis
    if isinstance(axis, tuple):  # autograd's rule needs axes counted from the front
        axis = tuple(a % np.ndim(x) for a in axis)
    norm = autograd.numpy.linalg.norm(x, ord, axis)
    if not keepdims:
        return norm
    axes = range(np.ndim(x)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    kept = [1 if i in {a % np.ndim(x) for a in axes} else n for i, n in enumerate(np.shape(x))]
    return np.reshape(norm, kept)


@rule_for(np.linalg.solve)
def _solve(a: Any, b: Any) -> Any:
    batch = np.shape(a)[:-2] == np.shape(b)[:-2] and np.ndim(a) == np.ndim(b)
    if not batch and not (np.ndim(a) == 2 and np.ndim(b) == 1):
        raise UnsupportedError(
            f"np.linalg.solve is supported for one system or for batches of a common shape, not "
            f"for {np.shape(a)} and {np.shape(b)}"
        )
    return autograd.numpy.linalg.solve(a, b)


@primitive  # type: ignore[untyped-decorator]
def _full_svd(a: Any) -> Any:
    return np.linalg.svd(a)


def _full_svd_vjp(ans: Any, a: Any) -> Any:
    k = min(np.shape(a)[-2:])
    u, s, vh = ans
    reduced = autograd.numpy.linalg.grad_svd(
        (u[..., :k], s, vh[..., :k, :]), a, full_matrices=False
    )

    def vjp(g: Any) -> Any:
        gu, gs, gvh = g
        if np.any(plain(gu[..., k:])) or np.any(plain(gvh[..., k:, :])):
            raise UnsupportedError(
                f"np.linalg.svd of a matrix of shape {np.shape(a)[-2:]}: the vectors beyond the "
                f"first {k} are not unique and have no derivative; pass full_matrices=False, or "
                f"use the first {k} only"
            )
        return reduced((gu[..., :k], gs, gvh[..., :k, :]))

    return vjp


defvjp(_full_svd, _full_svd_vjp)


@rule_for(np.linalg.svd)
def _svd(
    a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False
) -> Any:
    if hermitian:
        raise UnsupportedError("np.linalg.svd is supported without hermitian=True")
    a = as_array(a)
    if compute_uv and full_matrices:
        return _full_svd(a)
    return autograd.numpy.linalg.svd(a, full_matrices, compute_uv)


def _check_axis(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> None:
    if isinstance(axis, tuple):
        raise UnsupportedError(
            f"np.linalg.vector_norm is supported over one axis or all, not {axis}"
        )


@composed(*numpy_functions("linalg.vector_norm"), check=_check_axis)
def _vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    if axis is None:
        norm = _norm(np.ravel(x), ord)
        return np.reshape(norm, (1,) * np.ndim(x)) if keepdims else norm
    return _norm(x, ord, axis, keepdims)


@composed(np.linalg.eigvalsh)
def _eigvalsh(a: Any, UPLO: Any = "L") -> Any:
    return np.linalg.eigh(a, UPLO)[0]


@composed(*numpy_functions("linalg.svdvals"))
def _svdvals(x: Any, /) -> Any:
    return np.linalg.svd(x, full_matrices=False)[1]


for _alias in ("tensordot", "matmul"):
    for _func in numpy_functions(f"linalg.{_alias}"):
        rules[_func] = getattr(np, _alias)


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


@rule_for(np.interp)
def _interpolate(x: Any, xp: Any, fp: Any, **options: Any) -> Any:
    refuse("interp", options)
    if isbox(xp):
        raise UnsupportedError("np.interp is supported in x and fp, not in xp")
    return _interp(x, xp, fp)


# -- questions: answered on the plain values -------------------------------------------------------

for _func in numpy_functions(
    *("isin", "may_share_memory", "shares_memory", "iscomplexobj", "isrealobj"),
    *("digitize", "array_repr", "array_str", "array2string", "nanargmax"),
    *("nanargmin", "common_type", "min_scalar_type", "can_cast", "broadcast_shapes", "size"),
    *("zeros_like", "ones_like", "empty_like", "tril_indices_from", "triu_indices_from"),
):
    rules[_func] = notrace_primitive(_func)
