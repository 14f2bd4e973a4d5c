"""Checkpoints on disk: bit for bit, bounded memory, and files that only their owner may read."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.engines.numpy.arrays import NumpyArrays
from remat.engines.torch.arrays import TorchArrays
from remat.stores import DiskStore, scratch_file
from remat.stores.scratch_file import ScratchFile

from .oracles import HeldUp, open_files


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path)


def idle(checkpoints) -> None:
    """Wait until the thread has nothing to do."""
    checkpoints._executor.submit(lambda: None).result(600)


def bytes_in_use(checkpoints) -> int:
    file = checkpoints._file
    return file._end - sum(end - start for start, end in file._free)


def test_bit_for_bit(store: DiskStore) -> None:
    checkpoints = store.open(NumpyArrays())
    assert checkpoints.exact
    assert checkpoints.error == 0.0
    rng = np.random.default_rng(0)
    states = {
        key: [
            rng.random((30, 20)).T,
            rng.integers(0, 9, 5),
            np.float32(key),
            key,
            "text",
            np.empty(0),
        ]
        for key in range(0, 40, 3)
    }
    for key, leaves in states.items():
        checkpoints.put(key, leaves)
    for key in sorted(states, reverse=True):
        for _ in range(2):
            for leaf, known in zip(checkpoints.get(key), states[key], strict=True):
                assert type(leaf) is type(known)
                np.testing.assert_array_equal(leaf, known)
        checkpoints.drop(key)
        assert key not in checkpoints
    assert list(checkpoints) == []
    checkpoints.close()


def test_tensors(store: DiskStore) -> None:
    checkpoints = store.open(TorchArrays())
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    half = torch.randn(7).bfloat16()
    for key in range(4):
        checkpoints.put(key, [image + key, half, image.mT, 3.0, half])
    idle(checkpoints)
    for key in reversed(range(4)):
        a, b, c, d, e = checkpoints.get(key)
        assert torch.equal(a, image + key)
        assert a.stride() == image.stride()
        assert torch.equal(b, half)
        assert torch.equal(c, image.mT)
        assert d == 3.0
        assert e is b
    checkpoints.close()


def test_tensors_lie_where_kernels_like_them(store: DiskStore) -> None:
    """Where memory begins decides how some kernels sum, so it must not depend on the way there."""
    checkpoints = store.open(TorchArrays())
    sizes = [1, 3, 17, 1000, 4099, 65536]
    for key in range(4):
        checkpoints.put(key, [torch.randn(size) for size in sizes])
    idle(checkpoints)
    for key in reversed(range(4)):
        assert [leaf.data_ptr() % 64 for leaf in checkpoints.get(key)] == [0] * len(sizes)
    checkpoints.close()


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get", "drop", "wait"]), st.integers(0, 5)), max_size=30
    )
)
def test_any_order_of_calls_is_that_of_a_dict(tmp_path_factory, calls) -> None:
    checkpoints = DiskStore(tmp_path_factory.getbasetemp()).open(NumpyArrays())
    known: dict[int, np.ndarray] = {}
    for number, (verb, key) in enumerate(calls):
        if verb == "put":
            known[key] = np.full(3, float(number))
            checkpoints.put(key, [known[key]])
        elif verb == "wait":
            idle(checkpoints)
        elif key in known:
            if verb == "get":
                np.testing.assert_array_equal(checkpoints.get(key)[0], known[key])
            else:
                del known[key]
                checkpoints.drop(key)
        assert sorted(checkpoints) == sorted(known)
        assert checkpoints.nbytes == 24 * len(known)
        assert bytes_in_use(checkpoints) == checkpoints.nbytes
    idle(checkpoints)
    # All six keys at once, and the one that replaces another.
    assert os.fstat(checkpoints._file._file.fileno()).st_size <= 24 * 7
    checkpoints.close()
    assert checkpoints._file._file.closed


def test_only_the_owner_may_look(store: DiskStore, tmp_path: Path) -> None:
    checkpoints = store.open(NumpyArrays())
    checkpoints.put(0, [np.ones(3)])
    idle(checkpoints)
    (file,) = open_files(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_nlink == 0  # nobody can open it by a name, and nothing stays of it
    assert list(tmp_path.iterdir()) == []
    checkpoints.close()
    checkpoints.close()
    assert open_files(tmp_path) == []


def test_the_file_is_raw_bytes(store: DiskStore, tmp_path: Path) -> None:
    checkpoints = store.open(NumpyArrays())
    one, other = np.arange(3.0), np.arange(4, dtype=np.int16)
    checkpoints.put(0, [one, "a word", other, one])
    idle(checkpoints)
    (file,) = open_files(tmp_path)
    assert file.read_bytes() == one.tobytes() + other.tobytes()
    assert checkpoints.nbytes == 32
    checkpoints.close()


# -- the background ----------------------------------------------------------------------------


class Gate:
    """Holds the thread of a checkpoints up at every write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.written = 0
        real = ScratchFile.write

        def write(*args):
            self.started.release()
            assert self.passes.acquire(timeout=600)
            self.written += 1
            return real(*args)

        monkeypatch.setattr(ScratchFile, "write", write)


def test_what_is_not_written_yet_comes_from_memory(store, monkeypatch) -> None:
    gate = Gate(monkeypatch)
    checkpoints = store.open(NumpyArrays())
    array = np.ones(3)
    checkpoints.put(0, [array])
    checkpoints.put(1, [array * 2])
    assert np.shares_memory(checkpoints.get(0)[0], array)
    np.testing.assert_array_equal(checkpoints.get(1)[0], [2, 2, 2])
    assert gate.written == 0
    gate.passes.release(2)
    checkpoints.close()


def test_at_most_two_wait_in_memory(store, monkeypatch) -> None:
    gate = Gate(monkeypatch)
    checkpoints = store.open(NumpyArrays())
    done = []

    def put_many() -> None:
        for key in range(6):
            checkpoints.put(key, [np.full(10, key)])
            done.append(key)

    thread = threading.Thread(target=put_many)
    thread.start()
    for written in range(6):
        assert gate.started.acquire(timeout=600)
        time.sleep(0.01)  # time to do wrong
        assert len(done) <= written + 2
        assert sum(c.parts is not None for c in list(checkpoints._held.values())) <= 2
        gate.passes.release()
    thread.join(20)
    idle(checkpoints)
    assert done == list(range(6))
    assert all(checkpoint.parts is None for checkpoint in checkpoints._held.values())
    checkpoints.close()


def test_a_checkpoint_that_is_dropped_before_its_turn_is_not_written(store, monkeypatch) -> None:
    gate = Gate(monkeypatch)
    checkpoints = store.open(NumpyArrays())
    checkpoints.put(0, [np.ones(3)])
    assert gate.started.acquire(timeout=600)
    checkpoints.put(1, [np.ones(3)])
    checkpoints.drop(1)
    checkpoints.drop(0)  # while it is being written
    gate.passes.release(2)
    idle(checkpoints)
    assert gate.written == 1
    assert bytes_in_use(checkpoints) == 0
    checkpoints.close()


def test_the_nearest_one_below_is_read_ahead_and_no_other(store, monkeypatch) -> None:
    read = []
    real = ScratchFile.read

    def read_range(file, start, *rest):
        read.append((start // 800, threading.current_thread() is threading.main_thread()))
        return real(file, start, *rest)

    monkeypatch.setattr(ScratchFile, "read", read_range)
    checkpoints = store.open(NumpyArrays())
    for key in range(0, 10, 2):
        checkpoints.put(key, [np.full(100, key)])
    idle(checkpoints)
    for key in (8, 6, 4):
        np.testing.assert_array_equal(checkpoints.get(key)[0], np.full(100, key))
        idle(checkpoints)
        checkpoints.drop(key)
        assert checkpoints._ahead[1].done()
        assert all(c.parts is None for c in checkpoints._held.values())
    # The first was asked for, all others were there before.
    assert read == [(4, True), (3, False), (2, False), (1, False)]
    read.clear()
    checkpoints.put(8, [np.zeros(100)])
    idle(checkpoints)
    np.testing.assert_array_equal(
        checkpoints.get(0)[0], np.zeros(100)
    )  # another than the one ahead
    np.testing.assert_array_equal(checkpoints.get(2)[0], np.full(100, 2))
    idle(checkpoints)
    assert read == [(0, True), (0, False)]
    checkpoints.close()


def test_what_is_handed_out_is_not_held(store) -> None:
    checkpoints = store.open(NumpyArrays())
    checkpoints.put(0, [np.ones(3)])
    idle(checkpoints)
    checkpoints.get(0)[0][:] = 7  # (nobody may; the file knows better all the same)
    np.testing.assert_array_equal(checkpoints.get(0)[0], np.ones(3))
    checkpoints.close()


def test_many_threads_with_one_store(store, tmp_path: Path) -> None:
    wrong = []

    def one_pass(number: int) -> None:
        checkpoints = store.open(NumpyArrays())
        for key in range(20):
            checkpoints.put(key, [np.full(1000, number * 100 + key)])
        for key in reversed(range(20)):
            if np.any(checkpoints.get(key)[0] != number * 100 + key):
                wrong.append((number, key))
            checkpoints.drop(key)
        checkpoints.close()

    threads = [threading.Thread(target=one_pass, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == []
    assert not any(thread.name.startswith("remat disk") for thread in threading.enumerate())


def test_large_checkpoints_go_in_chunks(store, monkeypatch) -> None:
    monkeypatch.setattr(scratch_file, "_CHUNK", 1000)
    checkpoints = store.open(NumpyArrays())
    array = np.random.default_rng(0).random(1234)
    checkpoints.put(0, [array, array[:5].copy()])
    idle(checkpoints)
    np.testing.assert_array_equal(checkpoints.get(0)[0], array)
    checkpoints.close()


def test_short_writes_and_reads_go_on(store, monkeypatch) -> None:
    write, read = ScratchFile.write_some, ScratchFile.read_some
    monkeypatch.setattr(ScratchFile, "write_some", lambda file, data: write(file, data[:77]))
    monkeypatch.setattr(ScratchFile, "read_some", lambda file, data: read(file, data[:99]))
    checkpoints = store.open(NumpyArrays())
    array = np.random.default_rng(0).random(100)
    checkpoints.put(0, [array])
    idle(checkpoints)
    np.testing.assert_array_equal(checkpoints.get(0)[0], array)
    checkpoints.close()


def test_measuring_leaves_nothing_behind(store, tmp_path: Path) -> None:
    write, read = store.measure(NumpyArrays(), [np.ones(10_000), 3])
    assert write > 0
    assert read > 0
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == []


def test_what_is_dropped_while_it_is_read_ahead_is_not_kept_in_memory(store, monkeypatch) -> None:
    checkpoints = store.open(NumpyArrays())
    for key in range(2):
        checkpoints.put(key, [np.full(3, float(key))])
    idle(checkpoints)
    below = checkpoints._held[0]
    reading = HeldUp(monkeypatch, ScratchFile, "read")
    checkpoints._read_ahead(below)
    assert reading.started.wait(600)
    checkpoints.drop(0)
    checkpoints.put(0, [np.full(3, 7.0)])  # into the same range
    reading.go_on.set()
    idle(checkpoints)
    assert checkpoints._ahead is None
    assert below.parts is None
    np.testing.assert_array_equal(checkpoints.get(0)[0], np.full(3, 7.0))
    checkpoints.close()


def test_ranges_of_all_sizes_are_used_again(store) -> None:
    """States that grow, shrink and go in any order take no more room than they must."""
    checkpoints = store.open(NumpyArrays())
    rng, known = np.random.default_rng(0), {}
    for number in range(400):
        key = int(rng.integers(12))
        if key in known:
            checkpoints.drop(key)
            del known[key]
        else:
            known[key] = np.full(int(rng.integers(0, 40)), float(number))
            checkpoints.put(key, [known[key]])
        assert bytes_in_use(checkpoints) == checkpoints.nbytes
        for other, array in known.items():
            np.testing.assert_array_equal(checkpoints.get(other)[0], array)
    assert os.fstat(checkpoints._file._file.fileno()).st_size < 3 * 12 * 40 * 8
    for key in known:
        checkpoints.drop(key)
    assert (checkpoints._file._end, checkpoints._file._free) == (0, [])
    checkpoints.close()
