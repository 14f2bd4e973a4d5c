"""Memory that others may write to unseen: that of NumPy arrays, DLPack, buffers of Python.

PyTorch does not count such writes. What is small is copied when it is read, and what is large is
summed up: if the sum is another one in the backward pass, that is an error.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch
from torch import Tensor

from .records import Geometry

__all__ = ["SMALL", "checksum", "overlap", "same_bytes"]

SMALL = 1 << 16  # bytes that are copied rather than summed up
_MUCH = 1 << 26  # bytes that are summed up; of more, some


def checksum(storage: Any, geometry: Geometry) -> int:
    """Return a number that changes with the bytes of a tensor over a storage in main memory."""
    size, stride, offset, dtype, _, _ = geometry
    once = tuple(1 if distance == 0 else n for n, distance in zip(size, stride, strict=True))
    with (
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
        torch._C._AutoDispatchBelowADInplaceOrView(),
    ):
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
    one, two = tensor.untyped_storage(), other.untyped_storage()
    return _bytes(one) == _bytes(two)


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
