"""Checkpoints on disk, bit for bit."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
import weakref
from statistics import median
from typing import Any

from ..errors import StoreError
from ..sizes import shown
from .async_writer import Checkpoint, Writer
from .base import Arrays, HeldCheckpoints
from .files import check_space, write_file
from .folders import Folder, sweep

__all__ = ["DiskShelf", "DiskStore"]


class DiskStore:
    """Keeps checkpoints on disk, bit for bit.

    Every pass has a folder of its own, with rights for its owner only, in `directory` (which must
    exist) or else in the system's directory for temporary files. A background thread writes
    checkpoints, at most 2 of which wait in memory, and prefetches the next one in backward. Small
    checkpoints are written and read synchronously, which is faster.
    A full disk, a directory that cannot be written to, and a file that does not come back as it was
    written are a `StoreError`.

    The folder is removed when the pass is over, when it fails, and when the interpreter ends. A
    process that is killed (SIGKILL, SIGTERM without a handler, a power cut) leaves it behind; the
    next pass of the same user on the same machine with the same directory removes it (not on
    Windows).

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

    def open(self, arrays: Arrays) -> DiskShelf:
        """Return a shelf for one pass."""
        return DiskShelf(arrays, self._folder())

    def measure(self, arrays: Arrays, leaves: list[Any]) -> tuple[float, float]:
        """Return the seconds to write and to read such a state: the median of five times.

        What was just written may be read from memory that the operating system has to spare; in a
        pass that is so as well.
        """
        folder = self._folder()
        try:
            found = [_measure(arrays, leaves, folder) for _ in range(5)]
        finally:
            folder.remove()
        return median(write for write, _ in found), median(read for _, read in found)

    def free_bytes(self) -> int:
        """Return the free space of the disk."""
        try:
            return shutil.disk_usage(self._parent()).free
        except OSError as error:
            raise StoreError(f"{error}; give DiskStore(directory=…) another directory") from error

    def _folder(self) -> Folder:
        parent = self._parent()
        sweep(parent)
        return Folder(parent)

    def _parent(self) -> str:
        try:
            parent = tempfile.gettempdir() if self.directory is None else self.directory
        except FileNotFoundError as error:
            raise StoreError(f"{error}; give DiskStore(directory=…) one") from error
        return os.path.abspath(parent)  # the program may change its working directory

    def __repr__(self) -> str:
        return "DiskStore()" if self.directory is None else f"DiskStore({self.directory!r})"


def _measure(arrays: Arrays, leaves: list[Any], folder: Folder) -> tuple[float, float]:
    start = time.perf_counter()
    checkpoint = Checkpoint(arrays, leaves, folder.file(0))
    check_space(folder.path, checkpoint.nbytes)
    assert checkpoint.parts is not None
    checkpoint.checksum = write_file(checkpoint.path, checkpoint.parts)
    middle = time.perf_counter()
    checkpoint.leaves(arrays, checkpoint.read())
    end = time.perf_counter()
    checkpoint.unlink()
    return middle - start, end - middle


class DiskShelf(HeldCheckpoints[Checkpoint]):
    exact = True
    in_memory = False
    error = 0.0

    def __init__(self, arrays: Arrays, folder: Folder) -> None:
        super().__init__()
        self._arrays = arrays
        self._numbers = itertools.count()  # of files: not by key, which may be reused early
        self._writer = Writer(folder)
        self._is_reported = False  # the writer's failure
        # Called once: by `close`, when the shelf is garbage-collected, or when Python exits.
        self._finish = weakref.finalize(self, self._writer.close)

    @property
    def nbytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self._held.values())

    def put(self, key: int, leaves: list[Any]) -> None:
        self._check()
        self._writer.wait_for_room()
        path = self._writer.folder.file(next(self._numbers))
        checkpoint = Checkpoint(self._arrays, leaves, path)
        self._writer.check_space(checkpoint.nbytes)
        self._check()
        if key in self._held:
            self.drop(key)
        self._held[key] = checkpoint
        self._writer.write(checkpoint)

    def get(self, key: int) -> list[Any]:
        self._check()
        checkpoint = self._held[key]
        parts = self._writer.fetch(checkpoint)
        self._check()
        # A loop goes backward, so the nearest one below comes next.
        below = max((k for k in self._held if k < key), default=None)
        if below is not None:
            self._writer.prefetch(self._held[below])
        return checkpoint.leaves(self._arrays, parts)

    def drop(self, key: int) -> None:
        checkpoint = self._held.pop(key)
        if os.getpid() == self._writer.process and not self._writer.closed:
            self._writer.drop(checkpoint)

    def close(self) -> None:
        super().close()
        self._finish()
        if self._writer.failure is not None and not self._is_reported:
            self._raise_failure()

    def _check(self) -> None:
        if os.getpid() != self._writer.process:
            raise StoreError(
                f"these checkpoints on disk belong to process {self._writer.process}, of which "
                f"this one ({os.getpid()}) is a fork; run the whole pass in one process"
            )
        if self._writer.failure is not None:
            self._raise_failure()
        if self._writer.closed:
            raise StoreError("these checkpoints on disk were removed: their pass is over")

    def _raise_failure(self) -> None:
        self._is_reported = True
        raise StoreError(self._writer.failure)
