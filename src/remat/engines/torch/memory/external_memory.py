"""Memory that others may write to unseen: that of NumPy arrays, DLPack, buffers of Python.

PyTorch does not count such writes. What is small is copied when it is first read. Of what is large
a checksum is kept: if it is another one in the backward pass, that is an error.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch
from torch import Tensor

from ..backend import below_autograd, without_dispatch_modes, without_function_modes
from .geometry import Geometry

__all__ = ["SMALL", "checksum", "overlap", "same_bytes"]

SMALL = 1 << 16  # bytes that are copied; of more, a checksum is kept
_MUCH = 1 << 26  # bytes that a checksum is made of; of more, it is made of some


def checksum(storage: Any, geometry: Geometry) -> int:
    """Return a number that changes with the bytes of a tensor over a storage in main memory."""
    size, stride, offset, dtype, _, _ = geometry
    once = tuple(1 if step == 0 else n for n, step in zip(size, stride, strict=True))
    with without_dispatch_modes(), without_function_modes(), below_autograd():
        tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, once, stride)
        if tensor.nbytes > _MUCH:
            longest = max(range(tensor.dim()), key=tensor.size)
            every = -(-tensor.nbytes // _MUCH)
            tensor = tensor[(slice(None),) * longest + (slice(None, None, every),)]
        tensor = tensor.contiguous()
        return zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def same_bytes(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the storages of two tensors have the same bytes, as far as that is quick."""
    if tensor.device.type != "cpu":
        return True
    return _bytes(tensor.untyped_storage()) == _bytes(other.untyped_storage())


def _bytes(storage: Any) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def overlap(storage: Any, other: Any) -> bool:
    """Return whether two storages lie over the same memory, or parts of it."""
    start, other_start = storage.data_ptr(), other.data_ptr()
    return bool(
        storage.device == other.device
        and start < other_start + other.nbytes()
        and other_start < start + storage.nbytes()
    )
