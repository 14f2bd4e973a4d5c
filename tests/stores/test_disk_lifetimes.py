"""However a pass or a process ends, nothing of it stays on disk, and nothing else goes."""

from __future__ import annotations

import fcntl
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
from remat.stores import DiskStore, async_writer, folders

from .test_disk import settled

START = """
import os, sys, threading, numpy as np
from remat.engines.numpy.arrays import NumpyArrays
from remat.errors import StoreError
from remat.stores import DiskStore
shelf = DiskStore(sys.argv[1]).open(NumpyArrays())
for key in range(5):
    shelf.put(key, [np.full(100_000, key)])
"""


def run(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    program = START + textwrap.dedent(code)
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
    "exits from a cycle": ("shelf.me = shelf; del shelf; sys.exit(4)", 4),
    "exits while a thread uses it": (
        """
        def use():
            while True:
                shelf.put(9, [np.ones(100_000)])
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
                for call in (lambda: shelf.put(9, [1]), lambda: shelf.get(1)):
                    try:
                        call()
                        sys.exit(7)
                    except StoreError as error:
                        assert f"belong to process {os.getppid()}" in str(error), error
                shelf.drop(2)
                own = DiskStore(sys.argv[1]).open(NumpyArrays())
                own.put(0, [np.ones(3)])
                assert own.get(0)[0][0] == 1
                if len(sys.argv) < 3:
                    shelf.close()
            except AssertionError as error:
                print(error)
                sys.exit(8)
            sys.exit(0)  # as a program that ends, with all that runs then
        assert os.waitpid(child, 0)[1] == 0
        assert len(os.listdir(sys.argv[1])) == 1, "the child tidied its own up, and only that"
        for key in range(5):
            assert shelf.get(key)[0][0] == key
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


KILLED = "os.kill(os.getpid(), 9)"


def test_the_next_pass_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    assert run(KILLED, tmp_path).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert len(list(left.iterdir())) > 1
    DiskStore(tmp_path).open(NumpyArrays()).close()
    assert list(tmp_path.iterdir()) == []


def test_the_folders_of_the_living_stay(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    shelf = store.open(NumpyArrays())
    shelf.put(0, [np.ones(3)])
    settled(shelf)
    done = run("", tmp_path)  # another process
    assert done.returncode == 0, done.stderr
    store.open(NumpyArrays()).close()  # another pass
    np.testing.assert_array_equal(shelf.get(0)[0], np.ones(3))
    shelf.close()


def with_a_strange_file(left: Path) -> None:
    (left / "thesis.txt").write_text("important")


def with_a_folder_inside(left: Path) -> None:
    (left / "77.checkpoint").mkdir()


def of_another_machine(left: Path) -> None:
    (left / "owner").write_text("another machine")


def just_moving_in(left: Path) -> None:
    (left / "owner").write_text("")


def without_an_owner(left: Path) -> None:
    (left / "owner").unlink()


def of_another_name(left: Path) -> None:
    left.rename(left.with_name("remat-results"))


def behind_a_link(left: Path) -> None:
    left.rename(left.with_name("kept"))
    left.symlink_to(left.with_name("kept"))


def with_a_linked_owner(left: Path) -> None:
    (left / "owner").rename(left.parent / "kept")
    (left / "owner").symlink_to(left.parent / "kept")


NOT_OURS = [
    with_a_strange_file,
    with_a_folder_inside,
    of_another_machine,
    just_moving_in,
    without_an_owner,
    of_another_name,
    behind_a_link,
    with_a_linked_owner,
]


@pytest.fixture(scope="module")
def remains(tmp_path_factory) -> tuple[str, dict[str, bytes]]:
    """What a killed process leaves: the name of its folder, and files."""
    parent = tmp_path_factory.mktemp("killed")
    run(KILLED, parent)
    (left,) = parent.iterdir()
    return left.name, {file.name: file.read_bytes() for file in left.iterdir()}


@pytest.mark.parametrize("change", NOT_OURS)
def test_what_may_not_be_a_leftover_stays(change, remains, tmp_path: Path) -> None:
    name, files = remains
    left = tmp_path / name
    left.mkdir(0o700)
    for file, data in files.items():
        (left / file).write_bytes(data)
    change(left)
    before = sorted(tmp_path.rglob("*"))
    DiskStore(tmp_path).open(NumpyArrays()).close()
    after = sorted(tmp_path.rglob("*"))
    if change is with_a_folder_inside:  # it goes as far as it is surely ours
        assert left / "77.checkpoint" in after
    else:
        assert after == before


def test_remains_go_if_nothing_is_changed(remains, tmp_path: Path) -> None:
    name, files = remains
    (tmp_path / name).mkdir(0o700)
    for file, data in files.items():
        (tmp_path / name / file).write_bytes(data)
    with (tmp_path / name / "owner").open("r+b") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)  # a process lives, whatever the number of the process
        DiskStore(tmp_path).open(NumpyArrays()).close()
        assert (tmp_path / name).exists()
    DiskStore(tmp_path).open(NumpyArrays()).close()
    assert list(tmp_path.iterdir()) == []


def test_a_shelf_that_nobody_refers_to_is_gone_at_once(tmp_path: Path) -> None:
    gc.disable()
    try:
        shelf = DiskStore(tmp_path).open(NumpyArrays())
        array = np.ones(10)
        seen = weakref.ref(array)
        for key in range(4):
            shelf.put(key, [array])
        settled(shelf)
        shelf.get(3)
        writer_seen = weakref.ref(shelf._writer)
        del shelf, array
        assert list(tmp_path.iterdir()) == []
        assert seen() is None
        assert writer_seen() is None
    finally:
        gc.enable()


def test_closing_frees_what_waits(tmp_path: Path, monkeypatch) -> None:
    started, go_on = threading.Event(), threading.Event()
    real = async_writer.write_file

    def write_file(*args):
        started.set()
        assert go_on.wait(600)
        return real(*args)

    monkeypatch.setattr(async_writer, "write_file", write_file)
    shelf = DiskStore(tmp_path).open(NumpyArrays())
    arrays = [np.ones(10), np.ones(10)]
    seen = [weakref.ref(array) for array in arrays]
    for key in range(2):
        shelf.put(key, [arrays[key]])
    del arrays
    assert started.wait(600)
    threading.Timer(0.05, go_on.set).start()
    shelf.close()
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_a_shelf_that_is_collected_by_its_own_thread(tmp_path: Path, monkeypatch) -> None:
    collected = threading.Event()
    real = async_writer.write_file

    def write_file(*args):
        done = real(*args)
        gone.wait(600)
        gc.collect()  # finds the cycle that the shelf is in
        collected.set()
        return done

    gone = threading.Event()
    monkeypatch.setattr(async_writer, "write_file", write_file)
    gc.disable()
    try:
        shelf = DiskStore(tmp_path).open(NumpyArrays())
        shelf.me = shelf
        shelf.put(0, [np.ones(3)])
        thread = shelf._writer._thread
        del shelf
        gone.set()
        assert collected.wait(600)
        thread.join(20)
    finally:
        gc.enable()
    assert list(tmp_path.iterdir()) == []


def test_many_shelves_leave_no_open_files(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(20):
        shelf = DiskStore(tmp_path).open(NumpyArrays())
        shelf.put(0, [np.ones(3)])
        shelf.get(0)
        shelf.close()
    assert descriptors() == before


# -- in this process: what a fork, another user or Windows would see -----------------------------


def test_a_shelf_of_another_process_is_neither_used_nor_removed(
    tmp_path: Path, monkeypatch
) -> None:
    shelf = DiskStore(tmp_path).open(NumpyArrays())
    shelf.put(0, [np.ones(3)])
    settled(shelf)
    folder = Path(shelf._writer.folder.path)
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StoreError, match="is a fork"):
            shelf.get(0)
        shelf.drop(0)
        shelf._writer.close()
    assert len(list(folder.glob("*.checkpoint"))) == 1
    shelf.close()
    assert not folder.exists()


def test_a_second_close_does_nothing(tmp_path: Path) -> None:
    shelf = DiskStore(tmp_path).open(NumpyArrays())
    shelf._writer.close()
    shelf._writer.close()
    shelf.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_program_keeps_its_folder(tmp_path: Path) -> None:
    shelf = DiskStore(tmp_path).open(NumpyArrays())
    shelf.put(0, [np.ones(3)])
    other = Path(shelf._writer.folder.path) / "notes.txt"
    other.write_text("mine")
    shelf.close()
    assert [path.name for path in other.parent.iterdir()] == ["notes.txt"]


def test_without_file_locks_nothing_is_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(folders, "fcntl", None)
    (tmp_path / "remat-1-abc").mkdir()
    (tmp_path / "remat-1-abc" / "owner").write_bytes(b"")
    shelf = DiskStore(tmp_path).open(NumpyArrays())
    shelf.close()
    assert [path.name for path in tmp_path.iterdir()] == ["remat-1-abc"]


def test_the_folder_of_another_user_stays(tmp_path: Path, monkeypatch) -> None:
    abandoned = tmp_path / "remat-1-abc"
    abandoned.mkdir()
    (abandoned / "owner").write_bytes(folders._here())
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    DiskStore(tmp_path).open(NumpyArrays()).close()
    assert abandoned.exists()
    monkeypatch.undo()
    DiskStore(tmp_path).open(NumpyArrays()).close()
    assert not abandoned.exists()


def test_the_free_space_of_a_directory_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="another directory"):
        DiskStore(tmp_path / "gone").free_bytes()
