"""Peak memory and seconds of a pass on a device, by what the device itself tells.

Not all of this has been run by the authors: they have no GPUs. It follows the documentation of
PyTorch: the allocator's statistics for memory, events for time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["peak_bytes", "seconds_of"]

Pass = Callable[[], None]


def peak_bytes(run: Pass, device: torch.device) -> int | None:
    """Return the peak memory of a pass above where it began; None if it cannot be measured."""
    if device.type == "cpu":
        return _peak_on_cpu(run)
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        return None  # MPS tells what is allocated now, but not the most that was
    module.synchronize()
    module.reset_peak_memory_stats()
    before = int(module.memory_allocated())
    run()
    module.synchronize()
    return int(module.max_memory_allocated()) - before


def _peak_on_cpu(run: Pass) -> int | None:
    """Add up what the allocator of the CPU reports to the profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # or it tells on stderr that it runs
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        run()
    results: Any = getattr(profiler.profiler, "kineto_results", None)
    if results is None:
        return None
    events = [event for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def seconds_of(runs: dict[str, Pass], device: torch.device, repeats: int) -> dict[str, float]:
    """Return the shortest time of each pass; they take turns, so that all see the same machine."""
    timed = _timed_on_cpu if device.type == "cpu" else _timed_by_events
    for run in runs.values():
        run()
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            best[name] = min(best[name], timed(run, device))
    return best


def _timed_on_cpu(run: Pass, _: torch.device) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _timed_by_events(run: Pass, device: torch.device) -> float:
    # Ops run after the call that starts them returns: only the device knows when they are done.
    module: Any = torch.mps.event if device.type == "mps" else torch.get_device_module(device)
    began, ended = module.Event(enable_timing=True), module.Event(enable_timing=True)
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
