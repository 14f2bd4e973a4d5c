"""Small checkpoints on disk: written and read by whoever asks, without a thread."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from remat import StoreError
from remat.engines.numpy.arrays import NumpyArrays
from remat.stores import DiskStore, async_writer

pytestmark = pytest.mark.at_once


@pytest.fixture(autouse=True)
def a_fast_disk(monkeypatch) -> None:
    monkeypatch.setattr(async_writer, "_SLOW", 1e9)  # however busy it is


@pytest.fixture
def shelf(tmp_path: Path):
    shelf = DiskStore(tmp_path).open(NumpyArrays())
    yield shelf
    shelf.close()


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & {"remat disk store"}


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= 80]


def test_there_is_no_thread_and_nothing_waits(shelf, tmp_path: Path) -> None:
    known = {key: np.random.default_rng(key).random(10) for key in range(5)}
    for key, array in known.items():
        shelf.put(key, [array])
        assert shelf._held[key].parts is None  # memory is free as soon as it is in the file
        assert len(files_in(tmp_path)) == key + 1
    for key in reversed(known):
        np.testing.assert_array_equal(shelf.get(key)[0], known[key])
        np.testing.assert_array_equal(shelf.get(key)[0], known[key])
        shelf.drop(key)
        assert len(files_in(tmp_path)) == key
    assert not threads()


def test_large_ones_among_them_are_left_to_the_thread(shelf) -> None:
    known = {key: np.full(10 if key % 2 else 100_000, float(key)) for key in range(6)}
    for key, array in known.items():
        shelf.put(key, [array])
    assert threads()
    for key in reversed(known):
        np.testing.assert_array_equal(shelf.get(key)[0], known[key])
        shelf.drop(key)


def test_a_slow_disk_is_left_to_the_thread(shelf, monkeypatch) -> None:
    write, waited = async_writer.write_file, []

    def slowly(*args):
        waited.append(threading.current_thread().name)
        return write(*args)

    monkeypatch.setattr(async_writer, "_SLOW", 0.0)  # any disk is slower
    monkeypatch.setattr(async_writer, "write_file", slowly)
    for key in range(3):
        shelf.put(key, [np.full(10, float(key))])
    for key in (2, 1, 0):
        assert shelf.get(key)[0][0] == key
    shelf._writer._wait_while(lambda: shelf._writer._unfinished > 0)
    assert waited == [threading.main_thread().name, "remat disk store", "remat disk store"]


def test_what_the_disk_refuses_is_told_at_once(shelf, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shelf.put(0, [np.ones(10)])
    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(StoreError, match="the disk is full"):
        shelf.put(1, [np.ones(10)])
    assert not shelf._writer._waiting


def test_an_interrupt_is_an_interrupt(tmp_path: Path, monkeypatch) -> None:
    shelf = DiskStore(tmp_path).open(NumpyArrays())

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shelf.put(0, [np.ones(10)])
    shelf.close()
    assert not files_in(tmp_path)


def test_an_altered_file_is_told(shelf, tmp_path: Path) -> None:
    shelf.put(0, [np.ones(10)])
    (path,) = files_in(tmp_path)
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(StoreError, match="checksum"):
        shelf.get(0)
