"""Fourier transforms of real numbers, of any length: autograd's rules cover even ones only.

A gradient `g` of complex numbers is autograd's: the change of the result is the real part of
sum(g * change). So going back through a linear map is its transpose, without conjugation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from autograd.extend import defvjp, primitive

from ..array_function import as_array, rule_for


@primitive  # type: ignore[untyped-decorator]
def _rfft(a: Any, n: int, axis: int, norm: Any) -> Any:
    return np.fft.rfft(a, n, axis, norm)


@primitive  # type: ignore[untyped-decorator]
def _irfft(a: Any, n: int, axis: int, norm: Any) -> Any:
    return np.fft.irfft(a, n, axis, norm)


def _fitted(a: Any, size: int, axis: int) -> Any:
    """Cut an axis to a length, or fill it up with zeros."""
    have = np.shape(a)[axis]
    if have >= size:
        return a[(slice(None),) * (axis % np.ndim(a)) + (slice(size),)]
    widths = [(0, 0)] * np.ndim(a)
    widths[axis] = (0, size - have)
    return np.pad(a, widths)


def _rfft_vjp(ans: Any, a: Any, n: int, axis: int, norm: Any) -> Callable[[Any], Any]:
    size = np.shape(a)[axis]
    return lambda g: _fitted(np.real(np.fft.fft(g, n, axis, norm)), size, axis)


def _irfft_vjp(ans: Any, a: Any, n: int, axis: int, norm: Any) -> Callable[[Any], Any]:
    size, half = np.shape(a)[axis], n // 2 + 1
    # All but the first, and the last if n is even, stand for two numbers of the whole transform;
    # of those two only the real part counts.
    shape = [-1 if i == axis % np.ndim(a) else 1 for i in range(np.ndim(a))]
    single = np.array([k == 0 or 2 * k == n for k in range(half)]).reshape(shape)

    def vjp(g: Any) -> Any:
        whole = _fitted(np.fft.ifft(g, n, axis, norm), half, axis)
        parts = np.where(single, np.real(whole) + 0j, 2 * whole)
        back = _fitted(parts, size, axis)
        return back if np.iscomplexobj(a) else np.real(back)

    return vjp


defvjp(_rfft, _rfft_vjp, None, None, None)
defvjp(_irfft, _irfft_vjp, None, None, None)


@rule_for(np.fft.rfft)
def _one_forward(
    a: Any, n: int | None = None, axis: int = -1, norm: Any = None, out: Any = None
) -> Any:
    a = as_array(a)
    return _rfft(a, np.shape(a)[axis] if n is None else n, axis, norm)


@rule_for(np.fft.irfft)
def _one_inverse(
    a: Any, n: int | None = None, axis: int = -1, norm: Any = None, out: Any = None
) -> Any:
    a = as_array(a)
    return _irfft(a, 2 * (np.shape(a)[axis] - 1) if n is None else n, axis, norm)


def _sizes(
    a: Any, s: Sequence[int] | None, axes: Sequence[int] | None, *, inverse: bool
) -> list[tuple[int, int]]:
    """Return each axis with the length of its transform."""
    if axes is None:
        axes = range(np.ndim(a)) if s is None else range(-len(s), 0)
    shape = np.shape(a)
    sizes = [shape[axis] for axis in axes] if s is None else list(s)
    if s is None and inverse:
        sizes[-1] = 2 * (sizes[-1] - 1)
    # (-1 stands for the length that there is.)
    pairs = zip(axes, sizes, strict=True)
    return [(axis, shape[axis] if size == -1 else size) for axis, size in pairs]


def _many(forward: Any, inverse: Any, default: tuple[int, ...] | None) -> None:
    @rule_for(forward)
    def transform(
        a: Any, s: Any = None, axes: Any = default, norm: Any = None, out: Any = None
    ) -> Any:
        a = as_array(a)
        *others, (last, size) = _sizes(a, s, axes, inverse=False)
        a = _rfft(a, size, last, norm)
        for axis, length in reversed(others):
            a = np.fft.fft(a, length, axis, norm)
        return a

    @rule_for(inverse)
    def inverse_transform(
        a: Any, s: Any = None, axes: Any = default, norm: Any = None, out: Any = None
    ) -> Any:
        a = as_array(a)
        *others, (last, size) = _sizes(a, s, axes, inverse=True)
        for axis, length in others:
            a = np.fft.ifft(a, length, axis, norm)
        return _irfft(a, size, last, norm)


_many(np.fft.rfft2, np.fft.irfft2, (-2, -1))
_many(np.fft.rfftn, np.fft.irfftn, None)
