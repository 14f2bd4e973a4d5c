"""The folder of a pass on disk, and the removal of folders of dead processes.

A process that is killed cannot tidy up. So every folder holds a file `owner` that its process keeps
locked while it lives: the operating system lets go of the lock when the process ends, however it
ends. A lock cannot be mistaken for that of another process with the same number, so it is the lock
that decides, and not the number in the folder's name, which is for people.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
from contextlib import suppress

from .files import refusal

try:
    import fcntl
except ImportError:  # pragma: no cover  (Windows: leftovers stay, since their owner is unknown)
    fcntl = None  # type: ignore[assignment]

__all__ = ["Folder", "sweep"]

_OWNER = "owner"
_NAME = re.compile(r"remat-[0-9]+-[a-z0-9_]+")
_FILE = re.compile(r"owner|[0-9]+\.checkpoint")


class Folder:
    """A new folder, with rights for its owner only."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        try:
            self.path = tempfile.mkdtemp(prefix=f"remat-{os.getpid()}-", dir=parent)
        except OSError as error:
            raise refusal(error, "make a folder for checkpoints in", parent) from error
        self._lock: int | None = None
        try:
            self._lock = _lock_new(os.path.join(self.path, _OWNER))
        except OSError as error:
            self.remove()
            raise refusal(error, "write to", self.path) from error

    def file(self, number: int) -> str:
        """Return the path of a file that may be made here."""
        return os.path.join(self.path, f"{number}.checkpoint")

    def remove(self) -> None:
        """Remove the folder and its files; whatever else stands there is not ours."""
        with suppress(OSError):
            for name in _owner_last(os.listdir(self.path)):
                if _FILE.fullmatch(name):
                    os.unlink(os.path.join(self.path, name))
        with suppress(OSError):
            os.rmdir(self.path)
        if self._lock is not None:  # last: until here it must not look abandoned
            os.close(self._lock)
            self._lock = None


def _lock_new(path: str) -> int | None:
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Written only when it is locked: an owner file without a name is just being created.
        os.write(descriptor, _here())
    except OSError:  # a disk without locks: it is never removed as abandoned
        with suppress(OSError):
            os.unlink(path)
    return descriptor


def _here() -> bytes:
    """Name the machine: on a shared disk, a lock may be seen by its own machine only."""
    return platform.node().encode() or b"?"


def _owner_last(names: list[str]) -> list[str]:
    """If the process is killed meanwhile, the rest can still be recognized as abandoned."""
    return sorted(names, key=_OWNER.__eq__)


def sweep(parent: str) -> None:
    """Remove the folders that dead processes of this user on this machine left behind."""
    if fcntl is None:
        return
    with suppress(OSError):
        for name in os.listdir(parent):
            if _NAME.fullmatch(name):
                with suppress(OSError):  # it is another's, or just being removed
                    _remove_if_dead(os.path.join(parent, name))


def _remove_if_dead(path: str) -> None:
    # Names are looked up inside of the opened folder, so that none can be exchanged for another.
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return
        owner = os.open(_OWNER, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
        try:
            if os.read(owner, 1024) != _here():
                return
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
            names = os.listdir(folder)
            if all(map(_FILE.fullmatch, names)):
                for name in _owner_last(names):
                    os.unlink(name, dir_fd=folder)
                os.rmdir(path)
        finally:
            os.close(owner)
    finally:
        os.close(folder)
