import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import remat
from remat import demo
from remat.demo.simulation import (
    initial_fields,
    plain_pass,
    reaction,
    run_simulation_demo,
    target,
)

STEPS, SIZE = 40, 16
SMALL = {"steps": STEPS, "size": SIZE, "checkpoints": 5}


def mismatch(fields, feed):
    step = reaction(feed)
    for _ in range(STEPS):
        fields = step(fields)
    return float(np.sum((fields[1] - target(SIZE)) ** 2))


def test_the_gradient_is_that_of_finite_differences():
    """The oracle: the simulation in plain NumPy, a little to either side."""
    loss, gradient = plain_pass(STEPS, SIZE, progress=False)
    (food, eater), feed = initial_fields(SIZE)
    assert loss == mismatch((food, eater), feed)
    direction = np.random.default_rng(0).standard_normal(gradient.shape)

    def beside(distance):
        changes = distance * direction
        return mismatch((food + changes[0], eater + changes[1]), feed + changes[2])

    slope = (beside(1e-5) - beside(-1e-5)) / 2e-5
    assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-6)


def test_both_passes_have_the_same_loss_and_gradient():
    result = run_simulation_demo(**SMALL)
    assert result.facts["loss"] == plain_pass(STEPS, SIZE, progress=False)[0]
    assert result.facts["gradient_difference"] <= 1e-13 * result.facts["gradient_largest"]
    assert all(measured.seconds > 0 for measured in result.passes)


def test_the_curves_belong_to_the_peaks():
    result = run_simulation_demo(steps=100, size=48)
    assert result.facts["checkpoints"] == 10
    for measured in result.passes:
        assert len(measured.curve_seconds) == len(measured.curve_bytes) > 1
        assert max(measured.curve_bytes) <= measured.peak_bytes
    plain, checkpointed = result.passes
    assert checkpointed.peak_bytes < plain.peak_bytes / 2


def test_a_pass_that_dies_is_reported_with_the_remedy(monkeypatch):
    monkeypatch.setattr(demo, "_BOOT", "import sys; sys.exit(9)")
    with pytest.raises(remat.RematError, match=r"plain pass ended with exit code 9.*--steps"):
        run_simulation_demo(**SMALL)


def test_the_child_is_ended_when_waiting_for_it_fails(monkeypatch):
    started = []
    real = subprocess.Popen

    class Interrupted(real):
        def communicate(self, *args, **kwargs):
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_simulation_demo(steps=5000, size=16)
    assert [child.returncode is not None for child in started] == [True]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(os.name != "posix", reason="sends a signal to a thread")
def test_an_interrupt_that_another_thread_takes_does_not_orphan_the_child(monkeypatch):
    # Signals go to any thread of a process, and NumPy's BLAS has threads.
    started, born = [], threading.Event()
    real = subprocess.Popen

    def take_the_signal():
        born.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=take_the_signal)
    thread.start()

    class InterruptedAtBirth(real):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            born.set()
            thread.join()  # the handler runs here, before the caller has the child's name

    monkeypatch.setattr(subprocess, "Popen", InterruptedAtBirth)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_simulation_demo(steps=5000, size=16)
        assert [child.returncode is not None for child in started] == [True]
    finally:
        for child in started:
            child.kill()
            child.wait()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# -- Ctrl-C ------------------------------------------------------------------------------------


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_for(condition):
    for _ in range(30_000):  # ten minutes: the machine may be busy
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("waited for too long")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(
    not Path("/proc/self/task").exists() or os.name != "posix", reason="looks at processes in /proc"
)
@pytest.mark.parametrize(("moment", "megabytes"), [("starting", 0), ("running", 180)])
def test_an_interrupt_leaves_nothing_behind(moment, megabytes, tmp_path):
    scratch, folder = tmp_path / "scratch", tmp_path / "folder"
    scratch.mkdir()
    folder.mkdir()
    source = str(Path(remat.__file__).parents[1])  # a relative PYTHONPATH means nothing elsewhere
    with subprocess.Popen(
        [sys.executable, "-m", "remat", "demo", "--steps", "2000", "--size", "64"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        try:
            (child,) = wait_for(lambda: children_of(parent.pid))
            wait_for(lambda: resident(child) >= megabytes * 10**6)
            parent.send_signal(signal.SIGINT)
            out, err = parent.communicate(timeout=600)
        finally:
            parent.kill()
    assert parent.returncode == 130
    assert out == ""
    assert "remat: interrupted" in err
    assert "Traceback" not in err
    assert not Path(f"/proc/{child}").exists()
    assert not list(scratch.iterdir())
    assert not list(folder.iterdir())
