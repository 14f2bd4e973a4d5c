"""Writes checkpoints to disk in a background thread, and prefetches the next one.

Small checkpoints are written and read synchronously as long as the disk is fast: that takes less
time than to wake up a thread.

A shelf and its thread share a `Writer`. The writer has no reference to the shelf, so an unused
shelf is freed at once, and its finalizer closes the writer. `close` takes no lock, so it is safe at
any time, also in the garbage collector and in the thread itself.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from ..errors import StoreError
from .base import Arrays, distinct
from .files import check_space, read_file, write_file
from .folders import Folder

__all__ = ["Checkpoint", "Writer"]

_IN_FLIGHT = 2  # checkpoints in memory that are not yet written
_SMALL = 1 << 18  # bytes; up to here, waking up a thread takes longer than the I/O …
_SLOW = 1e-3  # seconds; … unless the disk needs that long


class Checkpoint:
    """One checkpoint: in memory until it is written, then in a file, for a while in both."""

    def __init__(self, arrays: Arrays, leaves: list[Any], path: str) -> None:
        once, self._places = distinct(leaves)
        self._kinds: list[Hashable] = [arrays.kind(leaf) for leaf in once]
        paired = list(zip(once, self._kinds, strict=True))
        # What has no spec has no bytes (and pickle is not for files): it stays here.
        self._others = [leaf if kind is None else None for leaf, kind in paired]
        self.parts: list[memoryview] | None = [
            arrays.to_bytes(leaf) for leaf, kind in paired if kind is not None
        ]
        self.sizes = [len(part) for part in self.parts]
        self.nbytes = sum(self.sizes)
        self.path = path
        self.checksum: int | None = None  # until it is written
        self.dropped = False

    def leaves(self, arrays: Arrays, parts: list[memoryview]) -> list[Any]:
        """Make leaves over these bytes."""
        rest = iter(parts)
        once = [
            other if kind is None else arrays.from_bytes(next(rest), kind)
            for other, kind in zip(self._others, self._kinds, strict=True)
        ]
        return [once[place] for place in self._places]

    def read(self) -> list[memoryview]:
        assert self.checksum is not None
        return read_file(self.path, self.sizes, self.checksum)

    def unlink(self) -> None:
        with suppress(OSError):  # it may never have been written, and the folder goes in the end
            os.unlink(self.path)


class Writer:
    """Runs one job after the other in the background."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.process = os.getpid()
        self.closed = False
        self.failure: str | None = None  # (text only: an exception would keep its frames alive)
        # (Functions, not bound methods: those would make a reference cycle.)
        self._jobs: queue.SimpleQueue[tuple[Job, Checkpoint] | None] = queue.SimpleQueue()
        self._thread: _Thread | None = None
        self._changed = threading.Condition()  # guards all that follows, and checkpoints' parts
        self._is_fast = True  # until writing a small checkpoint took too long
        self._unfinished = 0
        self._waiting: list[Checkpoint] = []  # waiting, or being written
        self._prefetched: Checkpoint | None = None  # to be read, or read
        self._reading: Checkpoint | None = None

    # -- called by the shelf -------------------------------------------------------------------

    def wait_for_room(self) -> None:
        """Wait until another checkpoint may wait to be written."""
        self._wait_while(lambda: len(self._waiting) >= _IN_FLIGHT)

    def check_space(self, needed: int) -> None:
        try:
            check_space(self.folder.path, needed + self._waiting_bytes())
        except StoreError:
            # Files that are about to be removed still count, so look again after that.
            self._wait_while(lambda: self._unfinished > 0)
            check_space(self.folder.path, needed)

    def write(self, checkpoint: Checkpoint) -> None:
        with self._changed:
            self._waiting.append(checkpoint)
        if not self._is_synchronous(checkpoint):
            self._do(Writer._write, checkpoint)
            return
        started = time.perf_counter()
        self._write(checkpoint)
        self._is_fast = time.perf_counter() - started < _SLOW

    def drop(self, checkpoint: Checkpoint) -> None:
        with self._changed:
            checkpoint.dropped = True
            checkpoint.parts = None
            is_written = checkpoint.checksum is not None
        if is_written:  # otherwise the job that writes it sees the flag
            if self._is_synchronous(checkpoint):
                checkpoint.unlink()
            else:
                self._do(Writer._unlink, checkpoint)

    def fetch(self, checkpoint: Checkpoint) -> list[memoryview]:
        """Return the bytes of a checkpoint; the memory is the caller's if they are in a file."""
        self._wait_while(lambda: self._reading is checkpoint)
        with self._changed:
            parts = checkpoint.parts
            if checkpoint.checksum is not None:
                self._forget_prefetched(checkpoint)
        return checkpoint.read() if parts is None else parts

    def prefetch(self, checkpoint: Checkpoint) -> None:
        """Read the checkpoint in the background that will be asked for next; forget any other."""
        if self._is_synchronous(checkpoint):
            return
        with self._changed:
            if checkpoint is self._prefetched or checkpoint.checksum is None:
                return
            if self._prefetched is not None:  # pragma: no cover  (a matter of timing)
                self._forget_prefetched(self._prefetched)
            self._prefetched = checkpoint
        self._do(Writer._read, checkpoint)

    def close(self) -> None:
        """End the thread and remove the folder, unless they are those of the parent process."""
        if os.getpid() != self.process or self.closed:
            return
        self.closed = True
        self._jobs.put(None)
        if self._thread is None:
            self.folder.remove()
        elif not isinstance(threading.current_thread(), _Thread):
            self._thread.join()  # (writer threads do not wait for one another)

    # -- jobs: in the background, or by the caller if a checkpoint is small ---------------------

    def _write(self, checkpoint: Checkpoint) -> None:
        with self._changed:
            parts = checkpoint.parts
        try:
            if parts is not None:  # or it is dropped already
                checksum = write_file(checkpoint.path, parts, lambda: self._wants(checkpoint))
                with self._changed:
                    checkpoint.checksum, checkpoint.parts = checksum, None
                if checkpoint.dropped:
                    checkpoint.unlink()
        finally:
            with self._changed:
                self._waiting.remove(checkpoint)

    def _wants(self, checkpoint: Checkpoint) -> bool:
        return not (checkpoint.dropped or self.closed)

    def _read(self, checkpoint: Checkpoint) -> None:
        with self._changed:
            if checkpoint is not self._prefetched or checkpoint.dropped:
                return
            self._reading = checkpoint
        parts = None
        with suppress(Exception):  # the caller that asks for it reads it again, and gets the error
            parts = checkpoint.read()
        with self._changed:
            self._reading = None
            if checkpoint is self._prefetched and not checkpoint.dropped:
                checkpoint.parts = parts

    def _unlink(self, checkpoint: Checkpoint) -> None:
        checkpoint.unlink()

    def _serve(self) -> None:
        """Run jobs until the writer is closed, then remove the folder."""
        while (task := self._jobs.get()) is not None and not self.closed:
            if self.failure is None:
                self.failure = self._failure_of(*task)
            del task  # no reference is held while waiting
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()
        self.folder.remove()
        while not self._jobs.empty():
            self._jobs.get()
        with self._changed:
            self._waiting.clear()
            self._prefetched = None
            self._changed.notify_all()

    def _failure_of(self, job: Job, checkpoint: Checkpoint) -> str | None:
        try:
            job(self, checkpoint)
        except StoreError as error:
            return str(error)
        except BaseException as error:  # such as MemoryError: must not be lost in the thread
            return f"a checkpoint could not be stored on disk: {error!r}"
        return None

    # -- helpers -------------------------------------------------------------------------------

    def _is_synchronous(self, checkpoint: Checkpoint) -> bool:
        """Say whether a checkpoint is written and read by the caller, not in the background."""
        return self._is_fast and checkpoint.nbytes <= _SMALL

    def _do(self, job: Job, checkpoint: Checkpoint) -> None:
        with self._changed:
            self._unfinished += 1
        self._jobs.put((job, checkpoint))
        if self._thread is None:
            thread = _Thread(target=self._serve, name="remat disk store", daemon=True)
            thread.start()
            self._thread = thread

    def _wait_while(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            while condition() and self.failure is None and not self.closed:
                self._changed.wait()

    def _forget_prefetched(self, checkpoint: Checkpoint) -> None:
        checkpoint.parts = None
        if self._prefetched is checkpoint:
            self._prefetched = None

    def _waiting_bytes(self) -> int:
        with self._changed:
            return sum(checkpoint.nbytes for checkpoint in self._waiting)


class _Thread(threading.Thread):
    """The thread of a writer; its class tells it from other threads."""


Job = Callable[[Writer, Checkpoint], None]
