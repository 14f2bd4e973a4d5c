"""Checkpoints on disk, bit for bit.

The checkpoints of a pass are ranges of one temporary file without a name, so nothing is left behind
however the pass or the process ends.

A background thread writes large checkpoints and reads the next one ahead. It refers to a
`_DiskCheckpoint` while it works on it, never to the `DiskCheckpoints`: if nobody else does,
these are freed at once, and the executor ends its thread.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any

from ..errors import StoreError
from ..sizes import shown
from .base import Arrays, CheckpointsByKey, distinct
from .scratch_file import ScratchFile

__all__ = ["DiskCheckpoints", "DiskStore"]

_IN_FLIGHT = 2  # checkpoints in memory that are not yet written
_SMALL = 1 << 18  # bytes; up to here, waking up a thread takes longer than the I/O …
_SLOW = 1e-3  # seconds; … unless the disk needs that long


class DiskStore:
    """Keeps checkpoints on disk, bit for bit.

    Every pass has a temporary file of its own, without a name, in `directory` (which must exist)
    or else in the system's directory for temporary files. The operating system removes it when
    the pass is over, when it fails, and when the process ends, also if it is killed.

    A background thread writes checkpoints, at most 2 of which wait in memory, and reads the next
    one ahead in backward. Small checkpoints are written and read by the caller, which is faster.
    A full disk, a directory that cannot be written to, and a checkpoint that does not come back as
    it was written are a `StoreError`.

    >>> DiskStore("/scratch")
    DiskStore('/scratch')
    """

    on_disk = True

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        if directory is not None and not isinstance(directory, str | os.PathLike):
            raise TypeError(f"directory must be a path or None, got {shown(directory)}")
        self.directory = None if directory is None else os.fspath(directory)
        if os.path.isfile(self.directory or ""):
            raise ValueError(f"directory must be a directory, got the file {self.directory!r}")

    def open(self, arrays: Arrays) -> DiskCheckpoints:
        """Return the checkpoints of one pass: none yet."""
        return DiskCheckpoints(arrays, ScratchFile(self._directory()))

    def measure(self, arrays: Arrays, leaves: list[Any]) -> tuple[float, float]:
        """Return the seconds to write and to read such a state: the median of five times.

        What was just written may be read from memory that the operating system has to spare; in a
        pass that is so as well.
        """
        found = [_measure(arrays, leaves, ScratchFile(self._directory())) for _ in range(5)]
        return median(write for write, _ in found), median(read for _, read in found)

    def free_bytes(self) -> int:
        """Return the free space of the disk."""
        try:
            return shutil.disk_usage(self._directory()).free
        except OSError as error:
            raise StoreError(f"{error}; give DiskStore(directory=…) another directory") from error

    def _directory(self) -> str:
        try:
            directory = tempfile.gettempdir() if self.directory is None else self.directory
        except FileNotFoundError as error:
            raise StoreError(f"{error}; give DiskStore(directory=…) one") from error
        return os.path.abspath(directory)

    def __repr__(self) -> str:
        return "DiskStore()" if self.directory is None else f"DiskStore({self.directory!r})"


def _measure(arrays: Arrays, leaves: list[Any], file: ScratchFile) -> tuple[float, float]:
    try:
        start = time.perf_counter()
        checkpoint = _DiskCheckpoint(arrays, leaves, file)
        checkpoint.write()
        middle = time.perf_counter()
        checkpoint.leaves(arrays, checkpoint.read())
        return middle - start, time.perf_counter() - middle
    finally:
        file.close()


class _DiskCheckpoint:
    """One checkpoint: its bytes are in memory until they are in the file."""

    def __init__(self, arrays: Arrays, leaves: list[Any], file: ScratchFile) -> None:
        once, self._places = distinct(leaves)
        self._kinds: list[Hashable] = [arrays.kind(leaf) for leaf in once]
        paired = list(zip(once, self._kinds, strict=True))
        # What has no kind has no bytes (and pickle is not for files): it stays here.
        self._others = [leaf if kind is None else None for leaf, kind in paired]
        self.parts: list[memoryview] | None = [
            arrays.to_bytes(leaf) for leaf, kind in paired if kind is not None
        ]
        self._sizes = list(map(len, self.parts))
        self.nbytes = sum(self._sizes)
        self._file = file
        self._start = file.allocate(self.nbytes)
        self._checksum = 0

    def write(self) -> None:
        parts = self.parts
        if parts is not None:  # or it was dropped meanwhile
            self._checksum = self._file.write(self._start, parts)
            self.parts = None

    def read(self) -> list[memoryview]:
        return self._file.read(self._start, self._sizes, self._checksum)

    def drop(self) -> None:
        self.parts = None
        self._file.release(self._start, self.nbytes)

    def leaves(self, arrays: Arrays, parts: list[memoryview]) -> list[Any]:
        """Make leaves over these bytes."""
        rest = iter(parts)
        once = [
            other if kind is None else arrays.from_bytes(next(rest), kind)
            for other, kind in zip(self._others, self._kinds, strict=True)
        ]
        return [once[place] for place in self._places]


class DiskCheckpoints(CheckpointsByKey[_DiskCheckpoint]):
    """The checkpoints of one pass. They belong to the process that made them."""

    exact = True
    in_memory = False
    error = 0.0

    def __init__(self, arrays: Arrays, file: ScratchFile) -> None:
        super().__init__()
        self._arrays = arrays
        self._file = file
        self._process = os.getpid()
        self._executor = ThreadPoolExecutor(1, "remat disk store")  # one: writes stay in order
        self._writes: deque[Future[None]] = deque()  # the oldest first
        self._ahead: tuple[_DiskCheckpoint, Future[list[memoryview]]] | None = None
        self._is_fast = True  # until writing a small checkpoint took too long
        self._failure: str | None = None  # (text: an exception would keep its frames alive)
        self._is_reported = False

    @property
    def nbytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self._held.values())

    def put(self, key: int, leaves: list[Any]) -> None:
        self._check(in_flight=_IN_FLIGHT - 1)
        checkpoint = _DiskCheckpoint(self._arrays, leaves, self._file)
        if key in self._held:
            self.drop(key)
        self._held[key] = checkpoint
        # Only if no write is under way: it may be to the same range, of a dropped checkpoint.
        if self._is_small(checkpoint) and not self._writes:
            start = time.perf_counter()
            checkpoint.write()
            self._is_fast = time.perf_counter() - start < _SLOW
        else:
            self._writes.append(self._executor.submit(checkpoint.write))

    def get(self, key: int) -> list[Any]:
        self._check()
        checkpoint = self._held[key]
        leaves = checkpoint.leaves(self._arrays, self._fetch(checkpoint))
        # A loop goes backward, so the nearest one below comes next.
        below = max((k for k in self._held if k < key), default=None)
        if below is not None:
            self._read_ahead(self._held[below])
        return leaves

    def drop(self, key: int) -> None:
        checkpoint = self._held.pop(key)
        if self._ahead is not None and self._ahead[0] is checkpoint:
            self._forget_ahead()
        checkpoint.drop()

    def close(self) -> None:
        super().close()
        if os.getpid() != self._process or not self._file.close.alive:
            return
        self._forget_ahead()
        self._executor.shutdown(cancel_futures=True)
        self._file.close()
        self._collect(0)
        if self._failure is not None and not self._is_reported:
            self._raise_failure()

    def _check(self, in_flight: int = _IN_FLIGHT) -> None:
        """Raise if this cannot go on; wait until so few writes are in flight."""
        if os.getpid() != self._process:
            raise StoreError(
                f"these checkpoints on disk belong to process {self._process}, of which "
                f"this one ({os.getpid()}) is a fork; run the whole pass in one process"
            )
        self._collect(in_flight)
        if self._failure is not None:
            self._raise_failure()
        if not self._file.close.alive:
            raise StoreError("these checkpoints on disk were removed: their pass is over")

    def _collect(self, in_flight: int) -> None:
        """Remember failures of writes that are done; wait until so few are in flight."""
        while self._writes and (len(self._writes) > in_flight or self._writes[0].done()):
            error = None if self._writes[0].cancelled() else self._writes[0].exception()
            self._writes.popleft()
            if isinstance(error, StoreError):
                self._failure = self._failure or str(error)
            elif error is not None:  # such as MemoryError: must not be lost in the thread
                self._failure = f"a checkpoint could not be stored on disk: {error!r}"

    def _raise_failure(self) -> None:
        self._is_reported = True
        raise StoreError(self._failure)

    def _is_small(self, checkpoint: _DiskCheckpoint) -> bool:
        """Say whether the caller writes and reads a checkpoint, and not the thread."""
        return self._is_fast and checkpoint.nbytes <= _SMALL

    def _fetch(self, checkpoint: _DiskCheckpoint) -> list[memoryview]:
        """Return the bytes of a checkpoint; the memory is the caller's if they are in the file."""
        parts = checkpoint.parts  # (read once: the thread clears it)
        if parts is not None:
            return parts
        if self._ahead is not None and self._ahead[0] is checkpoint:
            _, future = self._ahead
            self._ahead = None
            if not future.cancel():
                return future.result()
        return checkpoint.read()

    def _read_ahead(self, checkpoint: _DiskCheckpoint) -> None:
        """Read the checkpoint that will be asked for next; forget any other."""
        if checkpoint.parts is not None or self._is_small(checkpoint):
            return
        if self._ahead is None or self._ahead[0] is not checkpoint:
            self._forget_ahead()
            self._ahead = checkpoint, self._executor.submit(checkpoint.read)

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None
