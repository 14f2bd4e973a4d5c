"""Loops on PyTorch against a plain loop and `torch.utils.checkpoint` over sqrt(n) segments.

All sides run the same step with one thread, and none computes with numbers so small that a CPU
takes a hundred times as long for them (gradients that vanish over a thousand steps). The memory of
a pass is that of a fresh process, where the allocator gives what is freed back to the system; steps
of small tensors share pages, so the figures hold to a few hundred kilobytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import remat
from remat.loops import LoopOptions

from .measure import (
    Report,
    Result,
    best_of_processes,
    in_fresh_process,
    interleaved,
    lowest_of_processes,
    measured,
)

PEERS = ("torch",)
_STEPS = 1000
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384"}
_HERE = "benchmarks.torch_loops"
_WIDE = 512


class _Network(NamedTuple):
    """A recurrent network over a batch of 64, and what is asked of a loop over it."""

    width: int
    checkpoints: int
    more: int  # checkpoints, in no more memory than torch's own takes
    slowdown: float  # at most, against plain, for 5 % of its memory
    on_disk: int = 0  # states that fit into memory if others rest on disk; 0: not measured


_NETWORKS = {
    "rnn": _Network(256, 40, 118, 1.40, on_disk=37),
    "lstm": _Network(256, 308, 400, 1.45),
    "narrow lstm": _Network(128, 340, 450, 1.45),
}


def run() -> list[Result]:
    _same_for_all()
    return [
        *(result for name in _NETWORKS for result in _network(name)),
        *_overhead(),
        _long(),
        _disk(),
    ]


def _same_for_all() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


# --- recurrent networks -------------------------------------------------------------------------


class _Loop:
    """A loop over a recurrent network; `checkpoints` are those of the loop that we run."""

    def __init__(self, name: str, width: int | None = None) -> None:
        torch.manual_seed(0)
        self.is_lstm = "lstm" in name
        known, self.checkpoints, self.more, _, self.on_disk = _NETWORKS[name]
        width = width or known
        self.sides = ["plain", "theirs", "ours", "more", *(["disk"] if self.on_disk else [])]
        if self.is_lstm:
            self.weights = [torch.randn(2 * width, 4 * width) / 16, torch.randn(4 * width)]
            self.state: Any = (torch.randn(64, width), torch.randn(64, width))
        else:
            self.weights = [torch.randn(width, width) / 16, torch.zeros(width)]
            self.state = torch.randn(64, width)
        for weight in self.weights:
            weight.requires_grad_()

    def step(self, state: Any) -> Any:
        if not self.is_lstm:
            weight, bias = self.weights
            return torch.tanh(state @ weight + bias)
        hidden, cell = state
        weight, bias = self.weights
        gates = torch.cat((hidden, hidden), 1) @ weight + bias
        into, forget, new, out = gates.chunk(4, 1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
        return torch.sigmoid(out) * torch.tanh(cell), cell

    def side(self, side: str) -> Callable[[], None]:
        final = getattr(self, f"_{side}")

        def one_pass() -> None:
            for weight in self.weights:
                weight.grad = None
            result = final(_STEPS)
            (result if isinstance(result, Tensor) else result[0]).square().mean().backward()

        return one_pass

    def _plain(self, steps: int) -> Any:
        state = self.state
        for _ in range(steps):
            state = self.step(state)
        return state

    def _theirs(self, steps: int) -> Any:
        state, length = self.state, math.isqrt(steps)

        def segment(state: Any, count: int) -> Any:
            for _ in range(count):
                state = self.step(state)
            return state

        for start in range(0, steps, length):
            count = min(length, steps - start)
            state = checkpoint(segment, state, count, use_reentrant=False)
        return state

    def _ours(self, steps: int) -> Any:
        return remat.checkpointed_loop(self.step, self.state, steps, self.checkpoints)[0]

    def _more(self, steps: int) -> Any:
        return remat.checkpointed_loop(self.step, self.state, steps, self.more)[0]

    def _disk(self, steps: int) -> Any:
        room = self.on_disk
        return remat.checkpointed_loop(self.step, self.state, steps, room, store="disk")[0]


def _network(name: str) -> list[Result]:
    loop = _Loop(name)
    seconds = best_of_processes(f"{_HERE}:passes", 4, name=name, rounds=5)
    reports = {
        side: lowest_of_processes(f"{_HERE}:one_pass", 4, _GIVE_BACK, name=name, side=side)
        for side in loop.sides
    }
    peaks = {side: report["peak_bytes"] for side, report in reports.items()}
    checksums = {report["checksum"] for report in reports.values()}
    assert len(checksums) == 1, f"the sides differ: {checksums}"
    megabytes = {f"{side}_MB": peak / 1e6 for side, peak in peaks.items()}
    times = {f"{side}_s": value for side, value in seconds.items()}

    def against_plain(side: str, title: str, room: str) -> list[Result]:
        evaluations = _predicted(loop, side)
        text = f"{room}, {_STEPS} steps, {evaluations} evaluations"
        without_overhead = 1 + (evaluations / _STEPS - 1) * seconds["ahead"] / seconds["plain"]
        return [
            Result.at_most(
                f"{title}: peak against plain", text, peaks[side] / peaks["plain"], 0.05,
                **megabytes,
            ),
            Result.at_most(
                f"{title}: time against plain", text, seconds[side] / seconds["plain"],
                _NETWORKS[name].slowdown, without_overhead=without_overhead,
                theirs=seconds["theirs"] / seconds["plain"], **times,
            ),
        ]  # fmt: skip

    results = against_plain("ours", name, f"{loop.checkpoints} checkpoints")
    if loop.on_disk:
        room = f"room for {loop.on_disk} states in memory"
        results += against_plain("disk", f"{name}, on disk", room)
    return [
        *results,
        Result.at_most(
            f"{name}: time against torch.utils.checkpoint", f"{loop.more} checkpoints",
            seconds["more"] / seconds["theirs"], 1.0,
            against_plain=seconds["more"] / seconds["plain"],
        ),
        Result.at_most(
            f"{name}: peak against torch.utils.checkpoint", f"{loop.more} checkpoints",
            peaks["more"] / peaks["theirs"], 1.0,
        ),
    ]  # fmt: skip


def _predicted(loop: _Loop, side: str = "ours") -> int:
    """Return the evaluations that our loop plans with."""
    schedules, choose = [], LoopOptions.choose

    def watched(self: LoopOptions, *args: Any) -> Any:
        schedules.append(choose(self, *args))
        return schedules[-1]

    LoopOptions.choose = watched  # type: ignore[method-assign]
    try:
        loop.side(side)()
    finally:
        LoopOptions.choose = choose  # type: ignore[method-assign]
    return int(schedules[0].evaluations)


def passes(name: str, rounds: int) -> dict[str, float]:
    """Return the seconds of a pass on each side, and of the way ahead without a graph."""
    _same_for_all()
    loop = _Loop(name)
    sides = {side: loop.side(side) for side in loop.sides}
    return interleaved({**sides, "ahead": torch.no_grad()(lambda: loop._plain(_STEPS))}, rounds)


def one_pass(name: str, side: str) -> Report:
    """Measure a pass in a fresh process."""
    _same_for_all()
    loop = _Loop(name)
    run_once = loop.side(side)
    run_once()  # as in training: libraries are loaded, and the loop is planned
    for weight in loop.weights:
        weight.grad = None
    run = measured(run_once)
    checksum = sum(float(weight.grad.double().abs().sum()) for weight in loop.weights)
    return run.report(checksum=checksum)


# --- what the runner costs ----------------------------------------------------------------------


def _overhead() -> list[Result]:
    """Compare a pass with its evaluations, and its steps back, measured one by one.

    The steps are those of the RNN, but wider: so that one takes 200 us or more on a quick machine.
    """
    evaluations = _predicted(_Loop("rnn", _WIDE))
    best = best_of_processes(f"{_HERE}:parts", 4, rounds=5)
    ahead, both = best["ahead"] / 200, best["both"] / 200
    expected = evaluations * ahead + _STEPS * (both - ahead)
    return [
        Result.at_most(
            "runner: time against the sum of its steps",
            f"{evaluations} evaluations of {ahead * 1e6:.0f} us, {_STEPS} steps back",
            best["pass"] / expected,
            1.15,
            step_us=ahead * 1e6,
            step_back_us=(both - ahead) * 1e6,
        )
    ]


def parts(rounds: int) -> dict[str, float]:
    """Return the seconds of a pass, and of 200 steps ahead, and of as many ahead and back."""
    _same_for_all()
    loop = _Loop("rnn", _WIDE)
    sides = {"pass": loop.side("ours"), "ahead": _steps(loop), "both": _steps(loop, back=True)}
    return interleaved(sides, rounds)


def _steps(loop: _Loop, *, back: bool = False) -> Callable[[], None]:
    """Run single steps with a graph, and back through them, as one would measure them.

    Gradients of the weights are added up, as in every pass over a loop.
    """

    def run() -> None:
        for weight in loop.weights:
            weight.grad = None
        state = loop.state
        for _ in range(200):
            own = state.detach().requires_grad_()
            state = loop.step(own)
            if back:
                state.backward(torch.ones_like(state))

    return run


# --- long loops ---------------------------------------------------------------------------------


def _long() -> Result:
    report = in_fresh_process(f"{_HERE}:million_steps")
    return Result.at_most(
        "1,000,000 steps of 64 floats with 100 checkpoints",
        "peak above start, MB",
        report["peak_bytes"] / 1e6,
        50.0,
        seconds=report["seconds"],
        evaluations=report["evaluations"],
    )


def million_steps() -> Report:
    _same_for_all()
    weight = torch.ones(64).requires_grad_()
    calls = [0]

    def step(x: Tensor) -> Tensor:
        calls[0] += 1
        return torch.sin(x * weight)

    def gradient(steps: int = 1_000_000, checkpoints: int = 100) -> None:
        calls[0] = 0
        final, _ = remat.checkpointed_loop(step, torch.linspace(0, 1, 64), steps, checkpoints)
        final.sum().backward()

    gradient(100, 5)
    run = measured(gradient)
    return run.report(evaluations=calls[0])


def _disk() -> Result:
    """Compare the two-tier schedule with the same schedule whose states all stay in memory."""
    torch.manual_seed(0)
    state = torch.randn(1024, 1024)
    weight = torch.ones(1024).requires_grad_()

    def step(x: Tensor) -> Tensor:
        return torch.tanh(x * weight)

    schedules: list[Any] = []
    choose = LoopOptions.choose

    def watched(self: LoopOptions, *args: Any) -> Any:
        schedules.append(schedules[0] if schedules else choose(self, *args))
        return schedules[0]

    def side(store: Any) -> float:
        start = time.perf_counter()
        final, _ = remat.checkpointed_loop(step, state, 2000, 10, store=store)
        final.sum().backward()
        return time.perf_counter() - start

    LoopOptions.choose = watched  # type: ignore[method-assign]
    try:
        side("disk")  # chooses the schedule, for both
        times = [(side("memory"), side("disk")) for _ in range(2)]
        memory, disk = map(min, zip(*times, strict=True))
    finally:
        LoopOptions.choose = choose  # type: ignore[method-assign]
    plan = schedules[0]
    return Result.at_most(
        "disk: 2,000 steps of 4 MB, 10 slots in memory",
        "time against the same schedule with all checkpoints in memory",
        disk / memory,
        1.3,
        disk_s=disk,
        memory_s=memory,
        evaluations=plan.evaluations,
        disk_slots=getattr(plan, "disk_slots", 0),
    )
