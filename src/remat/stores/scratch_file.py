"""A temporary file without a name: ranges of it are allocated, written, read, checked and freed.

The operating system removes the file when it is closed, which also happens when its process is
killed.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import StoreError
from ..sizes import format_bytes

__all__ = ["ScratchFile"]

_CHUNK = 1 << 22  # bytes at once: few calls, since after each a thread waits for the interpreter
_ALIGNED = 64  # bytes, as PyTorch has it
_FULL = {errno.ENOSPC, errno.EDQUOT}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT}


class ScratchFile:
    """A temporary file without a name, and which ranges of it are in use."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._free: list[tuple[int, int]] = []  # sorted; no two of them touch
        self._end = 0  # of the last range that is in use
        self._position = threading.Lock()
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115
        except OSError as error:
            raise _refusal(error, "make a file for checkpoints in", directory) from error
        # Called once: by the pass, when nothing refers to this any more, or when Python exits.
        self.close = weakref.finalize(self, _close, self._file, os.getpid())

    def allocate(self, size: int) -> int:
        """Return where a free range of this size starts."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        self._check_space(size)
        self._end += size
        return self._end - size

    def release(self, start: int, size: int) -> None:
        """Free a range. Later writes to it must come after those that are still under way."""
        if not size:
            return
        free: list[tuple[int, int]] = []
        for first, last in sorted([*self._free, (start, start + size)]):
            if free and free[-1][1] == first:
                free[-1] = free[-1][0], last
            else:
                free.append((first, last))
        is_last = free[-1][1] == self._end
        end = free.pop()[0] if is_last else self._end
        self._free = free  # first: an interrupt in between loses room, and shares none
        self._end = end

    def _check_space(self, size: int) -> None:
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise _refusal(error, "write checkpoints to", self.directory) from error
        # What waits to be written is not on the disk yet, so it is not in its count either.
        if self._end + size - os.fstat(self._file.fileno()).st_size > free:
            raise StoreError(
                f"{self.directory} has {format_bytes(free)} free and the next checkpoint needs "
                f"{format_bytes(size)}; give DiskStore(directory=…) another disk, or use fewer "
                "checkpoints"
            )

    def write(self, start: int, parts: list[memoryview]) -> int:
        """Write to a range; return the checksum."""
        checksum = 0
        try:
            for chunk in _chunks(parts):
                checksum = zlib.crc32(chunk, checksum)
                start = self._transfer(self.write_some, start, chunk)
        except OSError as error:
            size = format_bytes(sum(map(len, parts)))
            raise _refusal(error, f"write a checkpoint of {size} to", self.directory) from error
        return checksum

    def read(self, start: int, sizes: list[int], checksum: int) -> list[memoryview]:
        """Read parts of these sizes; they must be as they were written."""
        parts, found = list(map(_memory, sizes)), 0
        try:
            for chunk in _chunks(parts):
                start = self._transfer(self.read_some, start, chunk)
                found = zlib.crc32(chunk, found)
        except OSError as error:
            size = format_bytes(sum(sizes))
            raise _refusal(error, f"read a checkpoint of {size} from", self.directory) from error
        if found != checksum:
            raise self._altered(f"the checksum was {checksum:08x} and is {found:08x}")
        return parts

    def _transfer(self, some: Callable[[memoryview], int], start: int, chunk: memoryview) -> int:
        while chunk:
            with self._position:  # of the file: the thread may read while the caller writes
                self._file.seek(start)
                count = some(chunk)
            if not count:
                raise self._altered(f"it ends {len(chunk)} bytes too early")
            start, chunk = start + count, chunk[count:]
        return start

    def write_some(self, chunk: memoryview) -> int:
        return self._file.write(chunk)

    def read_some(self, chunk: memoryview) -> int:
        return self._file.readinto(chunk)

    def _altered(self, words: str) -> StoreError:
        return StoreError(
            f"a checkpoint on disk in {self.directory} is not what was written: {words}. The disk "
            "may be failing; give DiskStore(directory=…) another disk"
        )


def _close(file: Any, process: int) -> None:
    if os.getpid() == process:  # a fork shares the file: its space is free without waiting for it
        file.truncate(0)
    file.close()


def _chunks(parts: list[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), _CHUNK):
            yield part[start : start + _CHUNK]


def _memory(size: int) -> memoryview:
    """Return memory that begins where that of tensors does: elsewhere kernels may sum otherwise."""
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].data


def _refusal(error: OSError, doing: str, directory: str) -> StoreError:
    """Say what the operating system refused, and what helps."""
    if error.errno in _FULL:
        remedy = "the disk is full: give DiskStore(directory=…) another, or use fewer checkpoints"
    elif error.errno in _CLOSED:
        remedy = "give DiskStore(directory=…) a directory that exists and that you may write to"
    else:
        remedy = "give DiskStore(directory=…) another disk"
    return StoreError(f"could not {doing} {directory}: {error.strerror or error}; {remedy}")
