"""The geometry of a tensor: how it maps to its storage."""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.records import Geometry
from ..backend import conj_view, neg_view

__all__ = ["geometry_of", "may_overlap", "view_over"]


def geometry_of(tensor: Tensor) -> Geometry:
    """Return the geometry of a tensor. Equal geometries are one object.

    Layers of a network repeat the same geometries.
    """
    geometry = Geometry(
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
    try:
        known = _known.setdefault(geometry, geometry)
    except TypeError:  # symbolic sizes cannot be hashed
        return geometry
    if len(_known) > _MANY:
        _known.clear()
    return known


_known: dict[Geometry, Geometry] = {}
_MANY = 4096


def view_over(base: Tensor, geometry: Geometry) -> Tensor:
    """Return a tensor with this geometry over the storage of `base`. Call it below autograd."""
    size, stride, offset, dtype, conj, neg = geometry
    if dtype is base.dtype and not (conj or neg or base.is_conj() or base.is_neg()):
        return base.as_strided(size, stride, offset)
    view = torch.empty(0, dtype=dtype, device=base.device).set_(
        base.untyped_storage(), offset, size, stride
    )
    if conj:
        view = conj_view(view)
    return neg_view(view) if neg else view


def may_overlap(one: Geometry, other: Geometry) -> bool:
    """Return whether two tensors over one storage may share bytes. If unsure, return True.

    >>> grid = torch.zeros(4, 6)
    >>> left, right = geometry_of(grid[:, :3]), geometry_of(grid[:, 3:])
    >>> may_overlap(left, right), may_overlap(left, geometry_of(grid[2]))
    (False, True)
    """
    if _is_empty(one) or _is_empty(other):
        return False
    start, stop = _extent(one)
    other_start, other_stop = _extent(other)
    if stop <= other_start or other_stop <= start:
        return False
    if one.dtype.itemsize != other.dtype.itemsize:
        return True
    # Both are boxes in a grid whose axes are the strides of both. Boxes that are disjoint along one
    # axis are disjoint.
    axes = sorted({*_steps(one), *_steps(other)} - {0}, reverse=True)
    box, other_box = _box(one, axes), _box(other, axes)
    if box is None or other_box is None:
        return True
    pairs = zip(box, other_box, strict=True)
    return all(first <= last_ and first_ <= last for (first, last), (first_, last_) in pairs)


def _is_empty(geometry: Geometry) -> bool:
    return 0 in geometry.size


def _steps(geometry: Geometry) -> list[int]:
    return [step for step, n in zip(geometry.stride, geometry.size, strict=True) if n > 1]


def _extent(geometry: Geometry) -> tuple[int, int]:
    """Return the first byte, and the byte after the last."""
    size, stride, offset, dtype, _, _ = geometry
    length = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return int(offset) * dtype.itemsize, (int(offset) + length) * dtype.itemsize


def _box(geometry: Geometry, axes: list[int]) -> list[tuple[int, int]] | None:
    """Return the first and last index along each axis, and the remainder; None if it is no box."""
    sizes: dict[int, int] = {}
    for step, n in zip(geometry.stride, geometry.size, strict=True):
        if n > 1 and step:
            if step in sizes:
                return None
            sizes[step] = n
    box = []
    rest = int(geometry.offset)
    for axis, longer in zip(axes, [None, *axes], strict=False):
        first, rest = divmod(rest, axis)
        last = first + sizes.get(axis, 1) - 1
        if longer is not None and (longer % axis or last >= longer // axis):
            return None  # it continues in the next row
        box.append((first, last))
    return [*box, (rest, rest)]
