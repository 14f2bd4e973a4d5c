"""What a disk can do to a checkpoint is an error that says so, and never a wrong value."""

from __future__ import annotations

import collections
import errno
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from remat.engines.numpy.arrays import NumpyArrays
from remat.errors import StoreError
from remat.stores import DiskStore, async_writer, files

from .test_disk import settled


@pytest.fixture
def shelf(tmp_path: Path):
    shelf = DiskStore(tmp_path).open(NumpyArrays())
    yield shelf
    shelf._finish()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("remat-")] == []


def written(shelf, *keys: int) -> list[Path]:
    """Store states, and return their files."""
    for key in keys:
        shelf.put(key, [np.full(1000, float(key))])
    settled(shelf)
    return [Path(shelf._held[key].path) for key in keys]


def truncate(file: Path) -> str:
    os.truncate(file, 4000)
    return "8000 bytes were written, 4000 are there"


def extend(file: Path) -> str:
    with file.open("ab") as end:
        end.write(b"more")
    return "8000 bytes were written, 8004 are there"


def alter(file: Path) -> str:
    data = bytearray(file.read_bytes())
    data[4321] ^= 1
    file.write_bytes(data)
    return r"the checksum was [0-9a-f]{8} and is [0-9a-f]{8}"


def remove(file: Path) -> str:
    file.unlink()
    return "8000 bytes were written, the file is gone"


def exchange(file: Path) -> str:
    shutil.copy(next(f for f in file.parent.glob("*.checkpoint") if f != file), file)
    return "the checksum was"


def remove_the_folder(file: Path) -> str:
    shutil.rmtree(file.parent)
    return "8000 bytes were written, the file is gone"


DAMAGES = [truncate, extend, alter, remove, exchange, remove_the_folder]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_found_out(shelf, damage) -> None:
    _, file = written(shelf, 1, 2)
    words = damage(file)
    with pytest.raises(
        StoreError, match=f"{re.escape(str(file))} is not what was written: {words}"
    ):
        shelf.get(2)
    shelf.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_that_is_prefetch_is_found_out(shelf, damage) -> None:
    file, _ = written(shelf, 1, 2)
    words = damage(file)
    if damage is not remove_the_folder:
        np.testing.assert_array_equal(shelf.get(2)[0], np.full(1000, 2.0))
    settled(shelf)
    with pytest.raises(StoreError, match=words):
        shelf.get(1)
    shelf.close()


def test_a_file_that_ends_while_it_is_read(shelf, monkeypatch) -> None:
    (file,) = written(shelf, 1)
    os.truncate(file, 3000)
    real = os.fstat
    Stat = collections.namedtuple("Stat", ["st_size"])
    monkeypatch.setattr(files.os, "fstat", lambda _: Stat(8000))
    with pytest.raises(StoreError, match="it ends 5000 bytes too early"):
        shelf.get(1)
    monkeypatch.setattr(files.os, "fstat", real)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device; the disk is full.*another, or use fewer"),
        (errno.EDQUOT, "quota exceeded; the disk is full"),
        (errno.EROFS, "Read-only file system; give .* a directory that exists and that you may"),
        (errno.EACCES, "Permission denied; give DiskStore"),
        (errno.EIO, "Input/output error; give .* another disk"),
    ],
)
@pytest.mark.parametrize("asked", ["put", "get", "close"])
def test_a_write_that_fails_in_the_background_is_told(shelf, monkeypatch, number, words, asked):
    calls = {
        "put": lambda: shelf.put(9, [np.ones(2)]),
        "get": lambda: shelf.get(1),
        "close": shelf.close,
    }

    def write(file: int, data: memoryview) -> int:
        raise OSError(number, os.strerror(number))

    written(shelf, 1)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", write)
        written(shelf, 2)
    with pytest.raises(StoreError, match=rf"write a checkpoint of 8.0 KB to .*: .*{words}"):
        calls[asked]()
    if asked != "close":  # it goes on to be told, so nobody goes on with what is missing
        for call in ("put", "get"):
            with pytest.raises(StoreError, match=words):
                calls[call]()
    shelf.close()  # told once is enough for whoever tidies up
    shelf.close()


def test_a_put_that_waits_for_its_turn_is_told(shelf, monkeypatch) -> None:
    def write(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files.os, "write", write)

    def put_many() -> None:
        for key in range(10):
            shelf.put(key, [np.ones(1000)])

    with pytest.raises(StoreError, match="the disk is full"):
        put_many()


def test_another_error_in_the_background_is_told_as_well(shelf, monkeypatch) -> None:
    def write_file(*args: object) -> int:
        raise MemoryError("no room")

    monkeypatch.setattr(async_writer, "write_file", write_file)
    written(shelf, 1)
    with pytest.raises(StoreError, match=r"could not be stored on disk: MemoryError\('no room'\)"):
        shelf.get(1)


def test_a_read_that_the_system_refuses(shelf) -> None:
    (file,) = written(shelf, 1)
    file.unlink()
    file.mkdir()
    with pytest.raises(StoreError, match=r"read a checkpoint of 8.0 KB from .*directory; give"):
        shelf.get(1)
    file.rmdir()


def test_a_folder_that_is_removed_before_a_write(shelf) -> None:
    (file,) = written(shelf, 1)
    shutil.rmtree(file.parent)
    with pytest.raises(StoreError, match=r"No such file or directory; give DiskStore"):
        shelf.put(2, [np.ones(3)])
    shelf.drop(1)
    shelf.close()


# -- room --------------------------------------------------------------------------------------

Usage = collections.namedtuple("Usage", ["total", "used", "free"])


def test_free_space_is_looked_at_before_a_write(shelf, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: Usage(10**6, 0, 7999))
    place = re.escape(str(tmp_path))
    words = f"{place}.* has 8.0 KB free and the next checkpoint needs 8.0 KB; give DiskStore"
    with pytest.raises(StoreError, match=words):
        shelf.put(1, [np.ones(1000)])
    assert 1 not in shelf
    assert list(tmp_path.glob("*/*.checkpoint")) == []
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: Usage(10**6, 0, 8000))
    shelf.put(1, [np.ones(1000)])


def test_files_that_are_about_to_go_count_as_free(shelf, monkeypatch) -> None:
    folder = Path(shelf._writer.folder.path)

    def disk_usage(path: str) -> Usage:  # a disk with room for two
        used = sum(file.stat().st_size for file in folder.glob("*.checkpoint"))
        return Usage(16_000, used, 16_000 - used)

    monkeypatch.setattr(files.shutil, "disk_usage", disk_usage)
    for key in range(20):
        shelf.put(key, [np.full(1000, float(key))])
        if key > 0:
            shelf.drop(key - 1)
    np.testing.assert_array_equal(shelf.get(19)[0], np.full(1000, 19.0))
    written(shelf, 20)
    with pytest.raises(StoreError, match=r"has 0 B free and the next checkpoint needs 8.0 KB"):
        shelf.put(21, [np.ones(1000)])


# -- directories -------------------------------------------------------------------------------


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"make a folder .*nowhere: No such file.*that exists"):
        DiskStore(tmp_path / "nowhere").open(NumpyArrays())


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("here")
    below = file / "below"
    with pytest.raises(StoreError, match="Not a directory; give DiskStore"):
        DiskStore(below).open(NumpyArrays())
    with pytest.raises(StoreError, match="Not a directory; give DiskStore"):
        DiskStore(below).measure(NumpyArrays(), [np.ones(3)])
    with pytest.raises(ValueError, match=f"directory must be a directory, got the file '{file}'"):
        DiskStore(file)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied; give DiskStore"):
        DiskStore(tmp_path).open(NumpyArrays())
    tmp_path.chmod(0o700)


def test_no_directory_for_temporary_files(monkeypatch) -> None:
    def gettempdir() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in []")

    monkeypatch.setattr("tempfile.gettempdir", gettempdir)
    with pytest.raises(StoreError, match=r"No usable temporary directory.*give DiskStore"):
        DiskStore().open(NumpyArrays())


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, monkeypatch) -> None:
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match="the disk is full"):
            DiskStore(tmp_path).open(NumpyArrays())
    assert list(tmp_path.iterdir()) == []


def test_a_shelf_that_was_closed(shelf) -> None:
    written(shelf, 1)
    shelf.close()
    with pytest.raises(StoreError, match="their pass is over"):
        shelf.put(1, [np.ones(3)])
    with pytest.raises(StoreError, match="their pass is over"):
        shelf.get(1)
    assert list(shelf) == []
    assert shelf.nbytes == 0
