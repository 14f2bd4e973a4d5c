"""What a disk can do to a checkpoint is an error that says so, and never a wrong value."""

from __future__ import annotations

import collections
import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

from remat.engines.numpy.arrays import NumpyArrays
from remat.errors import StoreError
from remat.stores import DiskStore, scratch_file
from remat.stores.scratch_file import ScratchFile

from .oracles import open_files
from .test_disk import idle


@pytest.fixture
def checkpoints(tmp_path: Path):
    checkpoints = DiskStore(tmp_path).open(NumpyArrays())
    yield checkpoints
    checkpoints._file.close()
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == []


def written(checkpoints, *keys: int) -> None:
    """Store states, until they are on disk."""
    for key in keys:
        checkpoints.put(key, [np.full(1000, float(key))])
    idle(checkpoints)


def truncate(file: Path) -> str:
    os.truncate(file, 4000)
    return "it ends 4000 bytes too early"


def empty(file: Path) -> str:
    os.truncate(file, 0)
    return "it ends 8000 bytes too early"


def alter(file: Path) -> str:
    data = bytearray(file.read_bytes())
    data[4321] ^= 1
    file.write_bytes(data)
    return r"the checksum was [0-9a-f]{8} and is [0-9a-f]{8}"


def exchange(file: Path) -> str:
    data = file.read_bytes()
    file.write_bytes(data[8000:] + data[:8000])
    return "the checksum was"


DAMAGES = [truncate, empty, alter, exchange]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_found_out(checkpoints, tmp_path, damage) -> None:
    written(checkpoints, 1, 2)
    words = damage(*open_files(tmp_path))
    with pytest.raises(
        StoreError, match=f"{re.escape(str(tmp_path))} is not what was written: {words}"
    ):
        checkpoints.get(1)
    checkpoints.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_that_is_read_ahead_is_found_out(checkpoints, tmp_path, damage) -> None:
    written(checkpoints, 1, 2)
    words = damage(*open_files(tmp_path))
    checkpoints._read_ahead(checkpoints._held[1])
    idle(checkpoints)
    with pytest.raises(StoreError, match=words):
        checkpoints.get(1)
    checkpoints.close()


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
def test_a_write_that_fails_in_the_background_is_told(
    checkpoints, monkeypatch, number, words, asked
):
    calls = {
        "put": lambda: checkpoints.put(9, [np.ones(2)]),
        "get": lambda: checkpoints.get(1),
        "close": checkpoints.close,
    }

    def write(file: object, data: memoryview) -> int:
        raise OSError(number, os.strerror(number))

    written(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(ScratchFile, "write_some", write)
        written(checkpoints, 2)
    with pytest.raises(StoreError, match=rf"write a checkpoint of 8.0 KB to .*: .*{words}"):
        calls[asked]()
    if asked != "close":  # it goes on to be told, so nobody goes on with what is missing
        for call in ("put", "get"):
            with pytest.raises(StoreError, match=words):
                calls[call]()
    checkpoints.close()  # told once is enough for whoever tidies up
    checkpoints.close()


def test_a_put_that_waits_for_its_turn_is_told(checkpoints, monkeypatch) -> None:
    def write(file: object, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(ScratchFile, "write_some", write)

    def put_many() -> None:
        for key in range(10):
            checkpoints.put(key, [np.ones(1000)])

    with pytest.raises(StoreError, match="the disk is full"):
        put_many()


def test_another_error_in_the_background_is_told_as_well(checkpoints, monkeypatch) -> None:
    def write(*args: object) -> int:
        raise MemoryError("no room")

    monkeypatch.setattr(ScratchFile, "write", write)
    written(checkpoints, 1)
    with pytest.raises(StoreError, match=r"could not be stored on disk: MemoryError\('no room'\)"):
        checkpoints.get(1)


def test_a_read_that_the_system_refuses(checkpoints, monkeypatch) -> None:
    def read(file: object, data: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    written(checkpoints, 1)
    monkeypatch.setattr(ScratchFile, "read_some", read)
    words = r"read a checkpoint of 8.0 KB from .*: Input/output error; give .* another disk"
    with pytest.raises(StoreError, match=words):
        checkpoints.get(1)


def test_a_directory_that_is_removed_before_a_write(tmp_path: Path) -> None:
    directory = tmp_path / "scratch"
    directory.mkdir()
    checkpoints = DiskStore(directory).open(NumpyArrays())
    written(checkpoints, 1)
    directory.rmdir()
    with pytest.raises(StoreError, match=r"No such file or directory; give DiskStore"):
        checkpoints.put(2, [np.ones(3)])
    np.testing.assert_array_equal(checkpoints.get(1)[0], np.full(1000, 1.0))
    checkpoints.drop(1)
    checkpoints.close()


# -- room --------------------------------------------------------------------------------------

Usage = collections.namedtuple("Usage", ["total", "used", "free"])


def test_free_space_is_looked_at_before_a_write(checkpoints, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(scratch_file.shutil, "disk_usage", lambda path: Usage(10**6, 0, 7999))
    place = re.escape(str(tmp_path))
    words = f"{place}.* has 8.0 KB free and the next checkpoint needs 8.0 KB; give DiskStore"
    with pytest.raises(StoreError, match=words):
        checkpoints.put(1, [np.ones(1000)])
    assert 1 not in checkpoints
    assert open_files(tmp_path)[0].stat().st_size == 0
    monkeypatch.setattr(scratch_file.shutil, "disk_usage", lambda path: Usage(10**6, 0, 8000))
    checkpoints.put(1, [np.ones(1000)])


def test_ranges_that_were_dropped_count_as_free(checkpoints, monkeypatch, tmp_path) -> None:
    def disk_usage(path: str) -> Usage:  # a disk with room for two
        used = open_files(tmp_path)[0].stat().st_size
        return Usage(16_000, used, 16_000 - used)

    monkeypatch.setattr(scratch_file.shutil, "disk_usage", disk_usage)
    for key in range(20):
        checkpoints.put(key, [np.full(1000, float(key))])
        if key > 0:
            checkpoints.drop(key - 1)
    np.testing.assert_array_equal(checkpoints.get(19)[0], np.full(1000, 19.0))
    written(checkpoints, 20)
    with pytest.raises(StoreError, match=r"has 0 B free and the next checkpoint needs 8.0 KB"):
        checkpoints.put(21, [np.ones(1000)])


# -- directories -------------------------------------------------------------------------------


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"make a file .*nowhere: No such file.*that exists"):
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
        if flags & os.O_RDWR:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match="the disk is full"):
            DiskStore(tmp_path).open(NumpyArrays())
    assert list(tmp_path.iterdir()) == []


def test_a_pass_that_was_closed(checkpoints) -> None:
    written(checkpoints, 1)
    checkpoints.close()
    with pytest.raises(StoreError, match="their pass is over"):
        checkpoints.put(1, [np.ones(3)])
    with pytest.raises(StoreError, match="their pass is over"):
        checkpoints.get(1)
    assert list(checkpoints) == []
    assert checkpoints.nbytes == 0
