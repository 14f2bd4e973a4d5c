import struct
import subprocess
import sys

import pytest

from remat.errors import UnsupportedError
from remat.reports.memory import MeasuredPass
from remat.reports.plots import can_plot, plot_memory, plot_schedule, schedule_paths
from remat.schedules import (
    Mixed,
    Multistage,
    Revolve,
    Sizes,
    StoreAll,
    Tier,
    Uniform,
    plan_loop,
    simulate,
)

SCHEDULES = [
    Revolve(40, 4),
    Uniform(40, 6),
    StoreAll(10),
    Mixed(30, 12, Sizes(1, 3)),
    Multistage(40, 2, 5, 2.0, 1.0),
    plan_loop(60, memory_bytes=20, state_bytes=1, tape_bytes=3).schedule,
    Revolve(1, 0),
    Revolve(0, 0),
]
PASSES = [
    MeasuredPass("plain", 2.0, 900, (0.0, 1.0, 2.0), (0, 900, 100)),
    MeasuredPass("checkpointed", 3.0, 90, (0.0, 1.5, 3.0), (0, 90, 10)),
]


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_the_lines_of_a_schedule_agree_with_the_judge(schedule):
    paths, account = schedule_paths(schedule), simulate(schedule, schedule.steps)
    ahead = sum(end[1] - start[1] for start, end in paths.ahead)
    assert ahead == account.evaluations
    assert paths.work == account.evaluations + schedule.steps
    assert [line.start[1] for line in paths.back] == list(range(schedule.steps, 0, -1))
    assert len(paths.states) == account.writes[Tier.MEMORY]
    assert len(paths.on_disk) == account.writes[Tier.DISK]


def test_a_state_is_held_from_when_it_is_saved_to_when_it_is_used_up():
    paths = schedule_paths(Revolve(4, 1))
    assert (2, 2) in [bar.start for bar in paths.states]
    assert all(bar.start[1] == bar.end[1] and bar.start[0] < bar.end[0] for bar in paths.states)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_is_drawn(schedule, tmp_path):
    path = plot_schedule(schedule, schedule.steps, tmp_path / "schedule.png", title="t")
    width, height = png_size(path)
    assert 800 < width < 3000
    assert 400 < height < 2000


def test_memory_is_drawn(tmp_path):
    width, height = png_size(plot_memory(PASSES, tmp_path / "memory.PNG", title="two passes"))
    assert 800 < width < 3000
    assert 400 < height < 2000


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_other_formats_go_by_the_ending(tmp_path, suffix, start):
    assert plot_memory(PASSES, tmp_path / f"m{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize(("name", "words"), [("memory.xyz", "xyz"), ("no/such/m.png", "folder")])
def test_a_file_that_cannot_be_written_is_named(tmp_path, name, words):
    with pytest.raises(ValueError, match=words):
        plot_memory(PASSES, tmp_path / name)


def test_a_loop_too_long_to_see_anything_is_refused(tmp_path):
    with pytest.raises(ValueError, match="20001"):
        plot_schedule(Revolve(20001, 100), 20001, tmp_path / "long.png")


def test_without_matplotlib_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not can_plot()
    with pytest.raises(UnsupportedError, match=r"pip install matplotlib"):
        plot_memory(PASSES, tmp_path / "memory.png")


def test_matplotlib_is_loaded_late_and_pyplot_never(tmp_path):
    program = f"""
import sys
import remat, remat.cli
assert "matplotlib" not in sys.modules and "torch" not in sys.modules
from remat.reports.plots import plot_schedule
from remat.schedules import Revolve
plot_schedule(Revolve(5, 2), 5, {str(tmp_path / "s.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
