"""Detached tensors: aliases, copies, versions, and the parts of sparse tensors and wrappers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from ..backend import (
    Guards,
    below_autograd,
    conj_view,
    neg_view,
    set_version,
    with_version_counters,
    without_dispatch_modes,
    without_modes,
    without_subclass_functions,
)

__all__ = [
    "EXACT_TYPES",
    "PLAIN_TYPES",
    "alias",
    "copy_extent",
    "copy_storage",
    "counters",
    "flat",
    "is_plain",
    "nbytes_of",
    "parts_of",
    "share_a_counter",
    "storage_number",
    "version_of",
]

_numbers = itertools.count()
EXACT_TYPES = {Tensor, Parameter}
PLAIN_TYPES: set[type] = {Tensor, Parameter}  # and subclasses without their own dispatch

without_dispatch = Guards(without_dispatch_modes)
counters = Guards(with_version_counters)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided memory without dispatch of its own."""
    kind = type(tensor)
    if kind not in PLAIN_TYPES:
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return False
        PLAIN_TYPES.add(kind)
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def alias(tensor: Tensor) -> Tensor:
    """Return a detached tensor with the same storage and version counter, without any mode."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        with without_modes():
            return tensor.detach()
    # If an op is being dispatched, the key that shares version counters is disabled.
    off, on = without_dispatch.take(), counters.take()
    try:
        with off, on:
            if type(tensor) in EXACT_TYPES:
                return tensor.detach()
            with without_subclass_functions():
                return tensor.detach()
    finally:
        without_dispatch.give(off)
        counters.give(on)


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor; -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def share_a_counter(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share a version counter."""
    if tensor.is_inference():
        return False
    before, seen = tensor._version, version_of(other)
    set_version(tensor, before + 1)
    try:
        return version_of(other) != seen
    finally:
        set_version(tensor, before)


def copy_storage(tensor: Tensor) -> Tensor:
    """Return a tensor with the same geometry over a copy of the whole storage."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # or the copy would have no version counter
            return copy_storage(tensor)
    if not is_plain(tensor):
        with without_modes():
            return tensor.detach().clone()
    with without_dispatch_modes(), below_autograd():
        storage = tensor.untyped_storage()
        if _covers_as_vector(tensor, storage):
            return tensor.clone().detach()  # faster, for statistics
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            storage.clone(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        if tensor.is_conj():
            copy = conj_view(copy)
        return neg_view(copy) if tensor.is_neg() else copy


def copy_extent(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, of only the part of the storage that it covers.

    Call it below autograd.
    """
    size, stride, itemsize = tensor.size(), tensor.stride(), tensor.element_size()
    length = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * itemsize,
        (length * itemsize if tensor.numel() else 0,),
        (1,),
    )
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        whole.clone().untyped_storage(), 0, size, stride
    )
    if tensor.is_conj():
        copy = conj_view(copy)
    return neg_view(copy) if tensor.is_neg() else copy


def _covers_as_vector(tensor: Tensor, storage: Any) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.dim() == 1
        and tensor.nbytes == storage.nbytes()
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse tensor or a wrapper consists of, without any mode."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = (getattr(tensor, name) for name in flatten()[0])
        return [part for part in parts if isinstance(part, Tensor)]  # a DTensor has a mesh, too
    names = _PARTS.get(tensor.layout, ())
    with without_dispatch_modes(), below_autograd():
        return [getattr(tensor, name)() for name in names]


_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: (*_BY_ROW, "values"),
    torch.sparse_bsr: (*_BY_ROW, "values"),
    torch.sparse_csc: (*_BY_COLUMN, "values"),
    torch.sparse_bsc: (*_BY_COLUMN, "values"),
}


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes that a tensor keeps alive: those of its storage."""
    if is_plain(tensor):
        return tensor.untyped_storage().nbytes()
    if tensor.layout in _PARTS:
        return sum(part.nbytes for part in parts_of(tensor))
    return 0 if tensor.layout is not torch.strided else tensor.nbytes


def flat(out: Any) -> list[Any]:
    """Return the outputs of an op as a flat list."""
    if not isinstance(out, list | tuple):
        return [out]
    return [leaf for part in out for leaf in flat(part)]


def storage_number(storage: UntypedStorage) -> int:
    """Return the unique number of a storage."""
    number: int | None = getattr(storage, "_remat_number", None)
    if number is None:
        number = storage._remat_number = next(_numbers)  # type: ignore[attr-defined]
    return number
