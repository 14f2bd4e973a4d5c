"""Shelves on disk: bit for bit, bounded memory, and files that only their owner may read."""

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
from remat.stores import DiskStore, async_writer, files


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path)


def settled(shelf) -> None:
    """Wait until the thread has nothing to do."""
    shelf._writer._wait_while(lambda: shelf._writer._unfinished > 0)


def test_bit_for_bit(store: DiskStore) -> None:
    shelf = store.open(NumpyArrays())
    assert shelf.exact
    assert shelf.error == 0.0
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
        shelf.put(key, leaves)
    for key in sorted(states, reverse=True):
        for _ in range(2):
            for leaf, known in zip(shelf.get(key), states[key], strict=True):
                assert type(leaf) is type(known)
                np.testing.assert_array_equal(leaf, known)
        shelf.drop(key)
        assert key not in shelf
    assert list(shelf) == []
    shelf.close()


def test_tensors(store: DiskStore) -> None:
    shelf = store.open(TorchArrays())
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    half = torch.randn(7).bfloat16()
    for key in range(4):
        shelf.put(key, [image + key, half, image.mT, 3.0, half])
    settled(shelf)
    for key in reversed(range(4)):
        a, b, c, d, e = shelf.get(key)
        assert torch.equal(a, image + key)
        assert a.stride() == image.stride()
        assert torch.equal(b, half)
        assert torch.equal(c, image.mT)
        assert d == 3.0
        assert e is b
    shelf.close()


def test_tensors_lie_where_kernels_like_them(store: DiskStore) -> None:
    """Where memory begins decides how some kernels sum, so it must not depend on the way there."""
    shelf = store.open(TorchArrays())
    sizes = [1, 3, 17, 1000, 4099, 65536]
    for key in range(4):
        shelf.put(key, [torch.randn(size) for size in sizes])
    settled(shelf)
    for key in reversed(range(4)):
        assert [leaf.data_ptr() % 64 for leaf in shelf.get(key)] == [0] * len(sizes)
    shelf.close()


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get", "drop", "settle"]), st.integers(0, 5)), max_size=30
    )
)
def test_any_order_of_calls_is_that_of_a_dict(tmp_path_factory, calls) -> None:
    shelf = DiskStore(tmp_path_factory.getbasetemp()).open(NumpyArrays())
    known: dict[int, np.ndarray] = {}
    for number, (verb, key) in enumerate(calls):
        if verb == "put":
            known[key] = np.full(3, float(number))
            shelf.put(key, [known[key]])
        elif verb == "settle":
            settled(shelf)
        elif key in known:
            if verb == "get":
                np.testing.assert_array_equal(shelf.get(key)[0], known[key])
            else:
                del known[key]
                shelf.drop(key)
        assert sorted(shelf) == sorted(known)
        assert shelf.nbytes == 24 * len(known)
    settled(shelf)
    assert len(list(Path(shelf._writer.folder.path).glob("*.checkpoint"))) == len(known)
    shelf.close()
    assert not os.path.exists(shelf._writer.folder.path)


def test_only_the_owner_may_look(store: DiskStore, tmp_path: Path) -> None:
    shelf = store.open(NumpyArrays())
    shelf.put(0, [np.ones(3)])
    settled(shelf)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(f"remat-{os.getpid()}-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert modes == {0o600}
    shelf.close()
    shelf.close()
    assert list(tmp_path.iterdir()) == []


def test_files_are_raw_bytes(store: DiskStore, tmp_path: Path) -> None:
    shelf = store.open(NumpyArrays())
    one, other = np.arange(3.0), np.arange(4, dtype=np.int16)
    shelf.put(0, [one, "a word", other, one])
    settled(shelf)
    (file,) = tmp_path.glob("remat-*/*.checkpoint")
    assert file.read_bytes() == one.tobytes() + other.tobytes()
    assert shelf.nbytes == 32
    shelf.close()


# -- the background ----------------------------------------------------------------------------


class Gate:
    """Holds the thread of a shelf up at every write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.written = 0
        real = async_writer.write_file

        def write_file(*args):
            self.started.release()
            assert self.passes.acquire(timeout=600)
            self.written += 1
            return real(*args)

        monkeypatch.setattr(async_writer, "write_file", write_file)


def test_what_is_not_written_yet_comes_from_memory(store, monkeypatch) -> None:
    gate = Gate(monkeypatch)
    shelf = store.open(NumpyArrays())
    array = np.ones(3)
    shelf.put(0, [array])
    shelf.put(1, [array * 2])
    assert np.shares_memory(shelf.get(0)[0], array)
    np.testing.assert_array_equal(shelf.get(1)[0], [2, 2, 2])
    assert gate.written == 0
    gate.passes.release(2)
    shelf.close()


def test_at_most_two_wait_in_memory(store, monkeypatch) -> None:
    gate = Gate(monkeypatch)
    shelf = store.open(NumpyArrays())
    done = []

    def put_many() -> None:
        for key in range(6):
            shelf.put(key, [np.full(10, key)])
            done.append(key)

    thread = threading.Thread(target=put_many)
    thread.start()
    for written in range(6):
        assert gate.started.acquire(timeout=600)
        time.sleep(0.01)  # time to do wrong
        assert len(done) <= written + 2
        assert sum(c.parts is not None for c in list(shelf._held.values())) <= 2
        gate.passes.release()
    thread.join(20)
    settled(shelf)
    assert done == list(range(6))
    assert all(checkpoint.parts is None for checkpoint in shelf._held.values())
    shelf.close()


def test_a_checkpoint_that_is_dropped_before_its_turn_is_not_written(store, monkeypatch) -> None:
    gate = Gate(monkeypatch)
    shelf = store.open(NumpyArrays())
    shelf.put(0, [np.ones(3)])
    assert gate.started.acquire(timeout=600)
    shelf.put(1, [np.ones(3)])
    shelf.drop(1)
    shelf.drop(0)  # while it is being written
    gate.passes.release(2)
    settled(shelf)
    assert gate.written == 1
    assert list(Path(store.directory).glob("*/*.checkpoint")) == []
    shelf.close()


def test_the_nearest_one_below_is_prefetch_and_no_other(store, monkeypatch) -> None:
    read = []
    real = async_writer.read_file

    def read_file(path, *rest):
        read.append((int(Path(path).stem), threading.current_thread() is threading.main_thread()))
        return real(path, *rest)

    monkeypatch.setattr(async_writer, "read_file", read_file)
    shelf = store.open(NumpyArrays())
    for key in range(0, 10, 2):
        shelf.put(key, [np.full(100, key)])
    settled(shelf)
    for key in (8, 6, 4):
        np.testing.assert_array_equal(shelf.get(key)[0], np.full(100, key))
        settled(shelf)
        shelf.drop(key)
        assert sum(c.parts is not None for c in shelf._held.values()) == 1
    # Files are numbered as they come. The first was asked for, all others were there before.
    assert read == [(4, True), (3, False), (2, False), (1, False)]
    read.clear()
    shelf.put(8, [np.zeros(100)])
    settled(shelf)
    np.testing.assert_array_equal(shelf.get(0)[0], np.zeros(100))  # another than the one ahead
    np.testing.assert_array_equal(shelf.get(2)[0], np.full(100, 2))
    settled(shelf)
    assert read == [(0, True), (0, False)]
    shelf.close()


def test_what_is_handed_out_is_not_held(store) -> None:
    shelf = store.open(NumpyArrays())
    shelf.put(0, [np.ones(3)])
    settled(shelf)
    shelf.get(0)[0][:] = 7  # (nobody may; the file knows better all the same)
    np.testing.assert_array_equal(shelf.get(0)[0], np.ones(3))
    shelf.close()


def test_many_threads_with_one_store(store, tmp_path: Path) -> None:
    wrong = []

    def one_pass(number: int) -> None:
        shelf = store.open(NumpyArrays())
        for key in range(20):
            shelf.put(key, [np.full(1000, number * 100 + key)])
        for key in reversed(range(20)):
            if np.any(shelf.get(key)[0] != number * 100 + key):
                wrong.append((number, key))
            shelf.drop(key)
        shelf.close()

    threads = [threading.Thread(target=one_pass, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert list(tmp_path.iterdir()) == []
    assert not any(thread.name == "remat disk store" for thread in threading.enumerate())


def test_large_checkpoints_go_in_chunks(store, monkeypatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 1000)
    shelf = store.open(NumpyArrays())
    array = np.random.default_rng(0).random(1234)
    shelf.put(0, [array, array[:5].copy()])
    settled(shelf)
    np.testing.assert_array_equal(shelf.get(0)[0], array)
    shelf.close()


def test_short_writes_go_on(store, monkeypatch) -> None:
    real = os.write
    monkeypatch.setattr(files.os, "write", lambda file, data: real(file, data[:77]))
    shelf = store.open(NumpyArrays())
    array = np.random.default_rng(0).random(100)
    shelf.put(0, [array])
    settled(shelf)
    np.testing.assert_array_equal(shelf.get(0)[0], array)
    shelf.close()


def test_measuring_leaves_nothing_behind(store, tmp_path: Path) -> None:
    write, read = store.measure(NumpyArrays(), [np.ones(10_000), 3])
    assert write > 0
    assert read > 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_dropped_while_it_is_prefetched_is_not_kept_in_memory(tmp_path) -> None:
    shelf = DiskStore(tmp_path).open(NumpyArrays())
    shelf.put(0, [np.ones(3)])
    settled(shelf)
    checkpoint, writer = shelf._held[0], shelf._writer
    read = checkpoint.read

    def drop_and_read():
        checkpoint.dropped = True
        return read()

    checkpoint.read = drop_and_read
    writer._prefetched = checkpoint
    writer._read(checkpoint)
    assert checkpoint.parts is None
    shelf.close()
