"""Raw bytes in files, checked when they come back; what a disk refuses, said in words."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from io import FileIO

import numpy as np

from ..errors import StoreError
from ..sizes import format_bytes

__all__ = ["check_space", "read_file", "refusal", "write_file"]

_CHUNK = 1 << 22  # bytes at once: few calls, since after each a thread waits for the interpreter
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_ALIGNED = 64  # bytes, as PyTorch has it
_FULL = {errno.ENOSPC, errno.EDQUOT}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT}


def write_file(
    path: str, parts: list[memoryview], wanted: Callable[[], bool] = lambda: True
) -> int:
    """Write a new file that only its owner may read; return its checksum.

    It is not finished if it is not wanted any more.
    """
    checksum = 0
    try:
        descriptor = os.open(path, _NEW, 0o600)
        try:
            for chunk in _chunks(parts):
                if not wanted():
                    break
                checksum = zlib.crc32(chunk, checksum)
                rest = chunk
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)  # (a network disk may say only here that it is full)
    except OSError as error:
        size = format_bytes(sum(map(len, parts)))
        raise refusal(error, f"write a checkpoint of {size} to", path) from error
    return checksum


def read_file(path: str, sizes: list[int], checksum: int) -> list[memoryview]:
    """Read a file into parts of these sizes; it must be as it was written."""
    written, found = sum(sizes), 0
    parts = [_memory(size) for size in sizes]
    try:
        with open(path, "rb", buffering=0) as file:
            length = os.fstat(file.fileno()).st_size
            if length != written:
                raise _altered(path, f"{written} bytes were written, {length} are there")
            for chunk in _chunks(parts):
                _fill(chunk, file, path)
                found = zlib.crc32(chunk, found)
    except FileNotFoundError as error:
        raise _altered(path, f"{written} bytes were written, the file is gone") from error
    except OSError as error:
        raise refusal(error, f"read a checkpoint of {format_bytes(written)} from", path) from error
    if found != checksum:
        raise _altered(path, f"the checksum was {checksum:08x} and is {found:08x}")
    return parts


def _memory(size: int) -> memoryview:
    """Return memory that begins where that of tensors does: elsewhere kernels may sum otherwise."""
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].data


def _chunks(parts: list[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), _CHUNK):
            yield part[start : start + _CHUNK]


def _fill(chunk: memoryview, file: FileIO, path: str) -> None:
    while chunk:
        count = file.readinto(chunk)
        if not count:
            raise _altered(path, f"it ends {len(chunk)} bytes too early")
        chunk = chunk[count:]


def _altered(path: str, words: str) -> StoreError:
    return StoreError(
        f"the checkpoint in {path} is not what was written: {words}. Something else changes files "
        "there; give DiskStore(directory=…) a directory that is left alone"
    )


def check_space(directory: str, needed: int) -> None:
    """Raise a `StoreError` if there is no room for so many bytes."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise refusal(error, "write checkpoints to", directory) from error
    if needed > free:
        raise StoreError(
            f"{directory} has {format_bytes(free)} free and the next checkpoint needs "
            f"{format_bytes(needed)}; give DiskStore(directory=…) another disk, or use fewer "
            "checkpoints"
        )


def refusal(error: OSError, doing: str, path: str) -> StoreError:
    """Say in words what the operating system refused, and what helps."""
    if error.errno in _FULL:
        remedy = "the disk is full: give DiskStore(directory=…) another, or use fewer checkpoints"
    elif error.errno in _CLOSED:
        remedy = "give DiskStore(directory=…) a directory that exists and that you may write to"
    else:
        remedy = "give DiskStore(directory=…) another disk"
    return StoreError(f"could not {doing} {path}: {error.strerror or error}; {remedy}")
