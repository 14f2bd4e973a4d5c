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
from remat.stores import DiskStore, disk
from remat.stores.scratch_file import ScratchFile

from .oracles import open_files
from .test_disk import idle

pytestmark = pytest.mark.at_once


@pytest.fixture(autouse=True)
def a_fast_disk(monkeypatch) -> None:
    monkeypatch.setattr(disk, "_SLOW", 1e9)  # however busy it is


@pytest.fixture
def checkpoints(tmp_path: Path):
    checkpoints = DiskStore(tmp_path).open(NumpyArrays())
    yield checkpoints
    checkpoints.close()


def threads() -> set[str]:
    return {name for name in map(str, threading.enumerate()) if "remat disk store" in name}


def test_there_is_no_thread_and_nothing_waits(checkpoints, tmp_path: Path) -> None:
    known = {key: np.random.default_rng(key).random(10) for key in range(5)}
    for key, array in known.items():
        checkpoints.put(key, [array])
        assert checkpoints._held[key].parts is None  # memory is free as soon as it is in the file
        assert open_files(tmp_path)[0].stat().st_size == 80 * (key + 1)
    for key in reversed(known):
        np.testing.assert_array_equal(checkpoints.get(key)[0], known[key])
        np.testing.assert_array_equal(checkpoints.get(key)[0], known[key])
        checkpoints.drop(key)
        assert checkpoints.nbytes == 80 * key
    assert not threads()


def test_large_ones_among_them_are_left_to_the_thread(checkpoints) -> None:
    known = {key: np.full(10 if key % 2 else 100_000, float(key)) for key in range(6)}
    for key, array in known.items():
        checkpoints.put(key, [array])
    assert threads()
    for key in reversed(known):
        np.testing.assert_array_equal(checkpoints.get(key)[0], known[key])
        checkpoints.drop(key)


def test_a_slow_disk_is_left_to_the_thread(checkpoints, monkeypatch) -> None:
    write, waited = ScratchFile.write, []

    def slowly(*args):
        waited.append(threading.current_thread().name)
        return write(*args)

    monkeypatch.setattr(disk, "_SLOW", 0.0)  # any disk is slower
    monkeypatch.setattr(ScratchFile, "write", slowly)
    for key in range(3):
        checkpoints.put(key, [np.full(10, float(key))])
    for key in (2, 1, 0):
        assert checkpoints.get(key)[0][0] == key
    idle(checkpoints)
    assert waited == [threading.main_thread().name, "remat disk store_0", "remat disk store_0"]


def test_what_the_disk_refuses_is_told_at_once(checkpoints, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints.put(0, [np.ones(10)])
    monkeypatch.setattr(ScratchFile, "write_some", refuse)
    with pytest.raises(StoreError, match="the disk is full"):
        checkpoints.put(1, [np.ones(10)])
    assert not checkpoints._writes


def test_an_interrupt_is_an_interrupt(tmp_path: Path, monkeypatch) -> None:
    checkpoints = DiskStore(tmp_path).open(NumpyArrays())

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ScratchFile, "write_some", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.put(0, [np.ones(10)])
    checkpoints.close()
    assert not open_files(tmp_path)


def test_an_altered_file_is_an_error(checkpoints, tmp_path: Path) -> None:
    checkpoints.put(0, [np.ones(10)])
    (path,) = open_files(tmp_path)
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(StoreError, match="checksum"):
        checkpoints.get(0)
