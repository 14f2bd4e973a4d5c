"""Memory shared with other libraries: NumPy arrays, DLPack, Python buffers.

Their writes do not increase version counters. Small tensors are copied when they are first read. Of
large ones a checksum is kept; another checksum in the backward pass is an error.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch
from torch import Tensor

from ....core.records import Geometry
from ..backend import below_autograd, without_dispatch_modes, without_function_modes

__all__ = ["SMALL", "checksum", "overlap", "same_bytes"]

SMALL = 1 << 16  # bytes up to which a tensor is copied; larger ones get a checksum
_MUCH = 1 << 26  # bytes up to which a checksum covers everything; above, a sample


def checksum(storage: Any, geometry: Geometry) -> int:
    """Return a checksum of the bytes of a tensor in main memory."""
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
    """Return whether the storages of two tensors have equal bytes; True on other devices."""
    if tensor.device.type != "cpu":
        return True
    return _bytes(tensor.untyped_storage()) == _bytes(other.untyped_storage())


def _bytes(storage: Any) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def overlap(storage: Any, other: Any) -> bool:
    """Return whether two storages overlap in memory."""
    try:
        start, other_start = storage.data_ptr(), other.data_ptr()
    except RuntimeError:  # autograd's tensors of zeros have no memory
        return False
    return bool(
        storage.device == other.device
        and start < other_start + other.nbytes()
        and other_start < start + storage.nbytes()
    )
