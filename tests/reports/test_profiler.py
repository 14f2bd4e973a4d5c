"""A profiler that gets events: what it counts, and when."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from xml.etree import ElementTree

import numpy as np
import pytest

import remat
from remat.observers import observers
from remat.plans.trace import Trace


def tell(*, name="layer", plain=900, held=100, ops=3, seconds=0.5):
    for observer in observers():
        region = observer.region_ran(name)
        observer.kept(region, plain=plain)
        observer.kept(region, held=held)
        observer.would_hold("tape", plain)
        observer.holds("input", held)
        observer.recomputed(region, ops, seconds)
        observer.would_free("tape")
        observer.frees("input")
        observer.traced(region, Trace((), ()))


def numbers(profiler):
    return (
        profiler.memory_saved(),
        profiler.checkpoint_count(),
        profiler.recompute_count(),
        profiler.recompute_seconds(),
    )


def test_it_counts_while_it_tracks() -> None:
    profiler = remat.CheckpointProfiler()
    assert numbers(profiler) == (0, 0, 0, 0.0)
    tell()
    with profiler as entered:
        assert entered is profiler
        assert profiler.is_tracking
        tell()
        assert numbers(profiler) == (800, 1, 1, 0.5)
        tell(name="other", plain=1000)
    tell()
    assert not profiler.is_tracking
    assert numbers(profiler) == (900, 2, 2, 1.0)
    assert [totals.name for totals in profiler.regions] == ["layer", "other"]
    assert profiler.traces == [Trace((), ())] * 2


def test_it_can_be_started_and_stopped_by_hand() -> None:
    profiler = remat.CheckpointProfiler()
    profiler.start_tracking()
    tell()
    profiler.stop_tracking()
    assert numbers(profiler) == (800, 1, 1, 0.5)
    assert observers() == ()


def test_starting_again_begins_from_zero() -> None:
    profiler = remat.CheckpointProfiler()
    for _ in range(2):
        with profiler:
            tell()
        assert numbers(profiler) == (800, 1, 1, 0.5)


def test_a_region_that_goes_on_after_the_end_is_not_counted() -> None:
    profiler = remat.CheckpointProfiler()
    with profiler:
        (observer,) = observers()
        region = observer.region_ran("layer")
    observer.recomputed(region, 1, 1.0)
    assert profiler.recompute_count() == 0
    with profiler:
        observer.recomputed(region, 1, 1.0)
    assert profiler.recompute_count() == 0


def test_two_profilers_count_side_by_side() -> None:
    with remat.CheckpointProfiler() as outer:
        tell()
        with remat.CheckpointProfiler() as inner:
            tell()
    assert (outer.checkpoint_count(), inner.checkpoint_count()) == (2, 1)


def test_starting_twice_is_an_error() -> None:
    with remat.CheckpointProfiler() as profiler:
        with pytest.raises(remat.RematError, match="tracking already"):
            profiler.start_tracking()
        with pytest.raises(remat.RematError, match="tracking already"), profiler:
            pass
        assert len(observers()) == 1


def test_stopping_what_was_not_started_is_an_error() -> None:
    profiler = remat.CheckpointProfiler()
    with pytest.raises(remat.RematError, match="not tracking"):
        profiler.stop_tracking()
    with profiler:
        profiler.stop_tracking()
    with pytest.raises(remat.RematError, match="not tracking"):
        profiler.stop_tracking()


def test_another_thread_is_not_tracked_and_cannot_stop_it() -> None:
    errors = []

    def elsewhere() -> None:
        tell()
        try:
            profiler.stop_tracking()
        except remat.RematError as error:
            errors.append(str(error))

    with remat.CheckpointProfiler() as profiler:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert profiler.is_tracking
    assert profiler.checkpoint_count() == 0
    assert "another thread" in errors[0]


def test_an_error_inside_ends_the_tracking() -> None:
    profiler = remat.CheckpointProfiler()
    with pytest.raises(RuntimeError, match="on purpose"), profiler:
        raise RuntimeError("on purpose")
    assert not profiler.is_tracking
    assert observers() == ()


# -- for people ------------------------------------------------------------------------------------


def test_the_report_has_a_row_for_each_name_and_the_peaks() -> None:
    with remat.CheckpointProfiler() as profiler:
        for _ in range(1234):
            tell(name="encoder[0]", ops=2, seconds=0.001, plain=10_000_000)
        tell(name="decoder", ops=7, seconds=2.0)
    lines = profiler.report().splitlines()
    rows = rows_of(profiler.report())
    assert rows["encoder[0]"] == ["1,234", "10.0 MB", "100 B", "1,234", "2,468", "1.2340"]
    assert rows["decoder"] == ["1", "900 B", "100 B", "1", "7", "2.0000"]
    assert rows["all"] == ["1,235", "", "", "1,235", "2,475", "3.2340"]
    assert lines[-1] == "peak of a plain pass 10.0 MB, held 100 B: saved 10.0 MB (100%)"


def rows_of(report: str) -> dict[str, list[str]]:
    """Return the cells of each line that has some, by the name in its first column."""
    lines = (line.split("│")[1:-1] for line in report.splitlines())
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines if cells}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            {"plain": 900, "held": 890},
            ["'layer' saves nothing: it holds 890 B", "pass 900 B"],
        ),
        ({"plain": 900, "held": 950}, ["'layer' raises what is held", "longer part", "by 50 B"]),
        ({"plain": 900, "held": 100}, []),
        ({"plain": 0, "held": 100}, ["'layer' raises what is held: it holds 100 B"]),
    ],
)
def test_the_report_says_if_a_region_saves_nothing(told, words) -> None:
    with remat.CheckpointProfiler() as profiler:
        tell(**told)
    notes = profiler.report().partition("saved ")[2].splitlines()[1:]
    assert bool(notes) == bool(words)
    assert [word for word in words if word not in " ".join(notes)] == []


def test_the_report_says_if_a_region_around_everything_saves_nothing() -> None:
    """What it drops comes back at once: the remedy is to checkpoint its parts."""
    with remat.CheckpointProfiler() as profiler:
        for _ in range(3):  # steps of a training
            (observer,) = observers()
            region = observer.region_ran("model")
            observer.would_hold("activations", 900)
            observer.kept(region, plain=900)
            observer.holds("replayed", 900)
            observer.recomputed(region, 50, 0.1)
            observer.frees("replayed")
            observer.would_free("activations")
    assert profiler.report().splitlines()[-1] == (
        "Checkpointing did not lower the peak: 'model' recomputes 900 B at once. Checkpoint its "
        "parts instead (each block of a model), so that one part at a time is recomputed."
    )


def test_the_report_says_if_the_peak_lies_elsewhere() -> None:
    with remat.CheckpointProfiler() as profiler:
        tell()
        (observer,) = observers()
        observer.allocated("gradients", 10_000)
    assert "it lies where regions do not help" in profiler.report()


def test_before_backward_the_report_does_not_judge_the_peak() -> None:
    with remat.CheckpointProfiler() as profiler:
        (observer,) = observers()
        observer.kept(observer.region_ran("model"), plain=900, held=10)
        observer.allocated("activations", 900)
        assert profiler.report().splitlines()[-1].startswith("peak of a plain pass")


def test_no_column_of_the_report_is_cut_off(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    name = "a.function.with.<locals>.a_very_long_name" * 5
    with remat.CheckpointProfiler() as profiler:
        tell(name=name)
    assert rows_of(profiler.report())[name] == ["1", "900 B", "100 B", "1", "3", "0.5000"]


def test_a_profiler_shows_itself() -> None:
    profiler = remat.CheckpointProfiler()
    with profiler:
        tell(name="<lambda>")
        assert "CheckpointProfiler: tracking, 1 region, 1 recomputation" in repr(profiler)
    assert repr(profiler) == (
        "<CheckpointProfiler: not tracking, 1 region, 1 recomputation, 800 B saved>"
    )
    page = profiler._repr_html_()
    cells = [
        [cell.text for cell in row] for row in ElementTree.fromstring(f"<p>{page}</p>").iter("tr")
    ]
    assert cells == [
        ["region", "runs", "plain", "held", "recomputed", "ops", "seconds"],
        ["<lambda>", "1", "900 B", "100 B", "1", "3", "0.5000"],
    ]
    assert "saved 800 B (89%)" in page
    assert "No checkpointed region" in remat.CheckpointProfiler()._repr_html_()


def test_the_report_says_if_nothing_ran() -> None:
    assert "No checkpointed region" in remat.CheckpointProfiler().report()


def test_the_report_has_no_colours(monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with remat.CheckpointProfiler() as profiler:
        tell()
    assert "\x1b" not in profiler.report()


@pytest.mark.parametrize("told", [0, 1, 3000])
def test_the_curves_are_drawn(tmp_path, told) -> None:
    with remat.CheckpointProfiler() as profiler:
        for _ in range(told):
            tell()
    path = profiler.plot(tmp_path / "profile.png")
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", head[16:24])) > 400


@pytest.mark.parametrize(("name", "words"), [("p.xyz", "xyz"), ("no/such/p.png", "folder")])
def test_a_file_that_cannot_be_written_is_named(tmp_path, name, words) -> None:
    with pytest.raises(ValueError, match=words):
        remat.CheckpointProfiler().plot(tmp_path / name)


def test_without_matplotlib_the_remedy_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(remat.UnsupportedError, match=r"pip install matplotlib"):
        remat.CheckpointProfiler().plot(tmp_path / "p.png")


def test_counting_loads_neither_rich_nor_matplotlib() -> None:
    check = (
        "import sys, remat\n"
        "with remat.CheckpointProfiler() as p: pass\n"
        "p.memory_saved()\n"
        "sys.exit(any(name in sys.modules for name in ('rich', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_gradients_that_are_not_there_yet_count_with_and_without_checkpointing() -> None:
    """They come while activations go: if they are larger, the peak is at the end, and no lower."""
    torch = pytest.importorskip("torch")
    weights = [torch.nn.Linear(64, 64, bias=False) for _ in range(6)]
    x = torch.ones(16, 64)  # activations are a quarter of a weight

    def saved() -> int:
        with remat.CheckpointProfiler() as profiler:
            h = x
            for weight in weights:
                h = remat.checkpoint(lambda h, w=weight: w(h).exp().sin().cos(), h)
            h.sum().backward()
        return profiler.memory_saved()

    activation = 16 * 64 * 4
    assert abs(saved()) <= 3 * activation  # of the 18 that plain autograd holds
    assert saved() >= 8 * activation  # now that there are gradients


# -- on the class ----------------------------------------------------------------------------------


def wave(x):
    return np.sin(np.exp(np.sin(x)))


def two_segments(x):
    return np.sum(remat.checkpoint(wave, remat.checkpoint(wave, x)))


def test_tracking_on_the_class() -> None:
    """As in the first examples of a profiler that users see."""
    P = remat.CheckpointProfiler
    x = np.linspace(0, 1, 1000)
    with remat.CheckpointProfiler() as one:
        P.start_tracking()
        remat.grad(two_segments)(x)
        assert P.checkpoint_count() == 2
        P.stop_tracking()
        remat.grad(two_segments)(x)
    assert one.checkpoint_count() == 4
    assert (P.checkpoint_count(), P.recompute_count()) == (2, 2)
    assert P.memory_saved() == one.memory_saved() > 0
    assert P.report().count("wave") == one.report().count("wave")
    assert P().checkpoint_count() == 0
    with pytest.raises(remat.RematError, match="not tracking"):
        P.stop_tracking()
    P.start_tracking()
    with pytest.raises(remat.RematError, match="tracking already"):
        P.start_tracking()
    P.stop_tracking()
    assert P.checkpoint_count() == 0


def test_a_subclass_has_its_own() -> None:
    class Other(remat.CheckpointProfiler):
        pass

    before = remat.CheckpointProfiler.checkpoint_count()
    Other.start_tracking()
    remat.grad(two_segments)(np.ones(10))
    Other.stop_tracking()
    assert Other.checkpoint_count() == 2
    assert remat.CheckpointProfiler.checkpoint_count() == before
    assert Other.start_tracking.__doc__ == "Count from now on, from zero."
