"""However a pass or a process ends, nothing of it stays on disk."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from remat.engines.numpy.arrays import NumpyArrays
from remat.errors import StoreError
from remat.stores import DiskStore
from remat.stores.scratch_file import ScratchFile

from .oracles import HeldUp, open_files
from .test_disk import idle

START = """
import os, sys, threading, numpy as np
from remat.engines.numpy.arrays import NumpyArrays
from remat.errors import StoreError
from remat.stores import DiskStore
checkpoints = DiskStore(sys.argv[1]).open(NumpyArrays())
for key in range(5):
    checkpoints.put(key, [np.full(100_000, key)])
"""


def run(code: str, directory: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    program = before + START + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(directory)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


ENDS = {
    "ends": ("", 0),
    "exits": ("sys.exit(3)", 3),
    "fails": ("raise ValueError('no')", 1),
    "is interrupted": ("import signal; signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "exits from a cycle": ("checkpoints.me = checkpoints; del checkpoints; sys.exit(4)", 4),
    "exits while a thread uses it": (
        """
        def use():
            while True:
                checkpoints.put(9, [np.ones(100_000)])
        threading.Thread(target=use, daemon=True).start()
        sys.exit(5)
        """,
        5,
    ),
}


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ENDS)
def test_a_process_leaves_nothing_behind_when_it(how: str, tmp_path: Path) -> None:
    code, status = ENDS[how]
    done = run(code, tmp_path)
    assert done.returncode == status, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_fork_neither_removes_nor_uses_what_is_its_parents(tmp_path: Path) -> None:
    done = run(
        """
        child = os.fork()
        if child == 0:
            try:
                for call in (lambda: checkpoints.put(9, [1]), lambda: checkpoints.get(1)):
                    try:
                        call()
                        sys.exit(7)
                    except StoreError as error:
                        assert f"belong to process {os.getppid()}" in str(error), error
                checkpoints.drop(2)
                own = DiskStore(sys.argv[1]).open(NumpyArrays())
                own.put(0, [np.ones(3)])
                assert own.get(0)[0][0] == 1
                checkpoints.close()
            except AssertionError as error:
                print(error)
                sys.exit(8)
            sys.exit(0)  # as a program that ends, with all that runs then
        assert os.waitpid(child, 0)[1] == 0
        for key in range(5):
            assert checkpoints.get(key)[0][0] == key
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


KILLED = "os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("unnamed", [True, False])  # False: a disk without O_TMPFILE, as NFS
def test_a_process_that_is_killed_leaves_nothing_behind(tmp_path: Path, unnamed) -> None:
    before = f"import tempfile; tempfile._O_TMPFILE_WORKS = {unnamed}\n"
    assert run(KILLED, tmp_path, before).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_another_process_and_another_pass_change_nothing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    checkpoints = store.open(NumpyArrays())
    checkpoints.put(0, [np.ones(3)])
    idle(checkpoints)
    done = run("", tmp_path)  # another process
    assert done.returncode == 0, done.stderr
    store.open(NumpyArrays()).close()  # another pass
    np.testing.assert_array_equal(checkpoints.get(0)[0], np.ones(3))
    checkpoints.close()


def test_a_fork_that_lives_on_holds_no_space(tmp_path: Path) -> None:
    """A worker process that starts during a pass shares its open file."""
    done = run(
        """
        file = os.dup(checkpoints._file._file.fileno())  # as a fork has it
        checkpoints._executor.submit(lambda: None).result()
        assert os.fstat(file).st_size == 4_000_000
        checkpoints.close()
        assert os.fstat(file).st_size == 0
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_pass_that_nobody_refers_to_is_gone_at_once(tmp_path: Path) -> None:
    gc.disable()
    try:
        checkpoints = DiskStore(tmp_path).open(NumpyArrays())
        array = np.ones(10)
        seen = weakref.ref(array)
        for key in range(4):
            checkpoints.put(key, [array])
        idle(checkpoints)
        checkpoints.get(3)
        idle(checkpoints)  # a read that is under way would be finished first
        (thread,), executor = checkpoints._executor._threads, weakref.ref(checkpoints._executor)
        del checkpoints, array
        assert open_files(tmp_path) == []
        assert seen() is None
        assert executor() is None
        thread.join(600)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_closing_frees_what_waits(tmp_path: Path, monkeypatch) -> None:
    writing = HeldUp(monkeypatch, ScratchFile, "write")
    checkpoints = DiskStore(tmp_path).open(NumpyArrays())
    arrays = [np.ones(10), np.ones(10)]
    seen = [weakref.ref(array) for array in arrays]
    for key in range(2):
        checkpoints.put(key, [arrays[key]])
    del arrays
    assert writing.started.wait(600)
    threading.Timer(0.05, writing.go_on.set).start()
    checkpoints.close()
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
    assert open_files(tmp_path) == []


def test_a_pass_that_is_collected_by_its_own_thread(tmp_path: Path, monkeypatch) -> None:
    collected = threading.Event()
    real = ScratchFile.write

    def write(*args):
        done = real(*args)
        gone.wait(600)
        gc.collect()  # finds the cycle that the checkpoints is in
        collected.set()
        return done

    gone = threading.Event()
    monkeypatch.setattr(ScratchFile, "write", write)
    gc.disable()
    try:
        checkpoints = DiskStore(tmp_path).open(NumpyArrays())
        checkpoints.me = checkpoints
        checkpoints.put(0, [np.ones(3)])
        (thread,) = checkpoints._executor._threads
        del checkpoints
        gone.set()
        assert collected.wait(600)
        thread.join(20)
    finally:
        gc.enable()
    assert open_files(tmp_path) == []


def test_many_passes_leave_no_open_files(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(20):
        checkpoints = DiskStore(tmp_path).open(NumpyArrays())
        checkpoints.put(0, [np.ones(3)])
        checkpoints.get(0)
        checkpoints.close()
    assert descriptors() == before


# -- in this process: what a fork would see ------------------------------------------------------


def test_a_pass_of_another_process_is_neither_used_nor_removed(tmp_path: Path, monkeypatch) -> None:
    checkpoints = DiskStore(tmp_path).open(NumpyArrays())
    checkpoints.put(0, [np.ones(3)])
    idle(checkpoints)
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StoreError, match="is a fork"):
            checkpoints.get(0)
        checkpoints.close()
    assert open_files(tmp_path)[0].stat().st_size == 24
    checkpoints.close()
    assert open_files(tmp_path) == []


def test_a_second_close_does_nothing(tmp_path: Path) -> None:
    checkpoints = DiskStore(tmp_path).open(NumpyArrays())
    checkpoints.close()
    checkpoints.close()
    assert open_files(tmp_path) == []


def test_the_free_space_of_a_directory_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="another directory"):
        DiskStore(tmp_path / "gone").free_bytes()
