import sys
from pathlib import Path

import pytest

from remat.errors import UnsupportedError
from remat.reports import memory
from remat.reports.memory import MemorySampler, peak_bytes, resident_bytes

MEGABYTE = 10**6
linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")


def test_what_is_resident_now_is_at_most_the_peak():
    assert MEGABYTE < resident_bytes() <= peak_bytes() + MEGABYTE


@linux
def test_a_sampler_sees_what_comes_and_goes():
    with MemorySampler(interval=0.001) as sampler:
        ballast = b"x" * (60 * MEGABYTE)
        del ballast
    assert 55 * MEGABYTE < sampler.peak_bytes < 120 * MEGABYTE
    assert sampler.bytes[-1] < 30 * MEGABYTE


def test_a_curve_runs_forward_in_time_and_stays_below_the_peak():
    with MemorySampler(interval=0.001) as sampler:
        ballast = [b"x" * MEGABYTE for _ in range(20)]
    assert len(ballast) == 20
    assert len(sampler.seconds) == len(sampler.bytes) >= 2
    assert sampler.seconds == sorted(sampler.seconds)
    assert 0 <= min(sampler.bytes) <= max(sampler.bytes) <= sampler.peak_bytes


def test_a_sampler_ends_its_thread_when_the_pass_fails():
    sampler = MemorySampler()
    with pytest.raises(RuntimeError, match="on purpose"), sampler:
        raise RuntimeError("on purpose")
    assert not sampler._thread.is_alive()


def test_without_proc_the_high_water_mark_of_getrusage_is_taken(monkeypatch):
    monkeypatch.setattr(memory, "_PROCESS", Path("/nonexistent"))
    pytest.importorskip("resource")
    assert resident_bytes() == peak_bytes() > MEGABYTE
    with MemorySampler() as sampler:
        pass
    assert sampler.peak_bytes == max(sampler.bytes)


def test_a_system_that_tells_nothing_is_named(monkeypatch):
    monkeypatch.setattr(memory, "_PROCESS", Path("/nonexistent"))
    monkeypatch.setitem(sys.modules, "resource", None)
    with pytest.raises(UnsupportedError, match=sys.platform):
        resident_bytes()
