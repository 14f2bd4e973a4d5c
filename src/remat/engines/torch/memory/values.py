"""Values of tensors: made, held, and compared with the tensor that an op returned."""

from __future__ import annotations

from torch import Tensor

from ....core.records import Held, Value
from .geometry import geometry_of
from .tensors import version_of

__all__ = ["current_tensor", "held_by", "lies_like", "note_geometry", "note_views"]


def held_by(tensor: Tensor, *, is_copy: bool = False) -> Held:
    """Return the data of a value that a tensor has. Inference tensors have no version counter."""
    return Held(tensor, -1 if tensor.is_inference() else tensor._version, is_copy=is_copy)


def current_tensor(value: Value) -> Tensor | None:
    """Return the tensor that the op returned, if it is alive and unmodified."""
    made: Tensor | None = value.tensor()
    if made is None or value.is_overwritten or version_of(made) != value.version:
        return None
    return made


def note_views(value: Value) -> None:
    """Note the geometry of the original tensor, because a view of it was made."""
    if value.geometry is None:
        made = value.tensor()
        if made is not None:
            note_geometry(value, made)


def note_geometry(value: Value, tensor: Tensor) -> None:
    value.geometry = geometry = geometry_of(tensor)
    value.size, value.dtype = geometry.size, geometry.dtype


def lies_like(value: Value, tensor: Tensor) -> bool:
    """Return whether a tensor has the geometry of the original one."""
    geometry = value.geometry
    return (
        geometry is not None
        and tensor.shape == geometry.size
        and tensor.stride() == geometry.stride
        and (dtype := tensor.dtype) is geometry.dtype
        and tensor.storage_offset() == geometry.offset
        and not (dtype.is_complex and tensor.is_conj() != geometry.conj)
    )
