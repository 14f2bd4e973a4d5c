"""Checkpointed regions on PyTorch against plain autograd and `torch.utils.checkpoint`.

All sides run the same modules with the same threads (one), on the same weights. A pass of a network
takes seconds, longer than this machine is left alone: it is timed block by block, forward and
backward, and what is compared is the sum of the best times (that of whole passes is told beside
it). Memory is that of a fresh process in which the allocator gives every tensor back to the system
when it is freed (MALLOC_MMAP_THRESHOLD_): without that, what glibc keeps for itself hides what is
in use, on all sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import remat

from .measure import (
    Report,
    Result,
    best_of_processes,
    in_fresh_process,
    interleaved,
    interleaved_stretches,
    lowest_of_processes,
    measured,
)

PEERS = ("torch",)
_HERE = "benchmarks.torch_regions"
_SIDES = ("plain", "theirs", "ours")
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def run() -> list[Result]:
    return [*_tiny_regions(), *_network("gpt"), *_network("resnet")]


# --- small regions ------------------------------------------------------------------------------


def _tiny_regions() -> list[Result]:
    path = f"{_HERE}:tiny"
    few = best_of_processes(path, 8, ops=2, calls=50, rounds=100)
    many = best_of_processes(path, 3, ops=200, calls=2, rounds=80)
    return [
        Result.at_most(
            "region of 2 tiny ops (8 x 8)",
            "time above plain, against what torch.utils.checkpoint adds",
            (few["ours"] - few["plain"]) / (few["theirs"] - few["plain"]),
            0.5,
            **_microseconds(few),
        ),
        Result.at_most(
            "region of 200 tiny ops (8 x 8)",
            "time against torch.utils.checkpoint",
            many["ours"] / many["theirs"],
            1.0,
            **_microseconds(many),
        ),
    ]


def tiny(ops: int, calls: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a call on each side."""
    torch.set_num_threads(1)
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(8, 8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        for _ in range(ops // 2):
            x = torch.tanh(x @ weight)
        return x

    def side(name: str) -> Callable[[], None]:
        call = _call(name)

        def passes() -> None:
            for _ in range(calls):
                call(region, x).sum().backward()

        return passes

    best = interleaved({name: side(name) for name in _SIDES}, rounds)
    return {name: seconds / calls for name, seconds in best.items()}


def _microseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{name}_us": value * 1e6 for name, value in seconds.items()}


def _call(side: str) -> Callable[..., Tensor]:
    """Return how a side calls a function that may be checkpointed."""
    if side == "plain":
        return lambda function, *inputs: function(*inputs)
    if side == "theirs":
        return lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=False)
    return remat.checkpoint


# --- networks -----------------------------------------------------------------------------------


def _network(network: str) -> list[Result]:
    best = best_of_processes(f"{_HERE}:passes", 8, network=network, rounds=6)
    seconds = {side: sum(stretches) for side, (*stretches, _) in best.items()}
    whole = {side: seconds for side, (*_, seconds) in best.items()}
    reports = {
        side: lowest_of_processes(f"{_HERE}:one_pass", 5, _GIVE_BACK, network=network, side=side)
        for side in _SIDES
    }
    told = in_fresh_process(f"{_HERE}:profiled_pass", network=network)
    checksums = {report["checksum"] for report in reports.values()}
    assert len(checksums) == 1, f"the sides differ: {checksums}"
    peaks = {side: report["peak_bytes"] for side, report in reports.items()}
    gradients = reports["plain"]["gradient_bytes"]
    activations = {side: peak - gradients for side, peak in peaks.items()}
    megabytes = {f"{side}_MB": peak / 1e6 for side, peak in peaks.items()}
    difference = peaks["plain"] - peaks["ours"]
    return [
        Result.at_most(
            f"{network}: time",
            "every block checkpointed, against torch.utils.checkpoint",
            seconds["ours"] / seconds["theirs"],
            1.0,
            **{f"{side}_s": value for side, value in seconds.items()},
            best_whole_passes=whole["ours"] / whole["theirs"],
        ),
        Result.at_most(
            f"{network}: time against plain",
            "every block checkpointed",
            seconds["ours"] / seconds["plain"],
            1.4,
            theirs=seconds["theirs"] / seconds["plain"],
            best_whole_passes=whole["ours"] / whole["plain"],
        ),
        Result.at_most(
            f"{network}: peak",
            "every block checkpointed, against torch.utils.checkpoint, to the per mille: "
            "processes that do the same scatter by that",
            round(peaks["ours"] / peaks["theirs"], 3),
            1.0,
            **megabytes,
        ),
        Result.at_least(
            f"{network}: activation memory",
            "by how much it falls below plain (peak less the gradients of the parameters)",
            1 - activations["ours"] / activations["plain"],
            0.5,
            theirs=1 - activations["theirs"] / activations["plain"],
        ),
        Result.at_most(
            f"{network}: memory_saved()",
            "how far CheckpointProfiler is from the measured difference",
            abs(told["memory_saved"] - difference) / difference,
            0.1,
            told_MB=told["memory_saved"] / 1e6,
            measured_MB=difference / 1e6,
        ),
    ]


def passes(network: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the stretches of a pass on each side, on one and the same model."""
    torch.set_num_threads(1)
    step = prepared(network, "plain")
    sides = {side: partial(step.timed, _call(side)) for side in _SIDES}
    return interleaved_stretches(sides, rounds)


def one_pass(network: str, side: str) -> Report:
    """Measure a forward and backward pass in a fresh process."""
    torch.set_num_threads(1)
    tiny, step = prepared(network, side, tiny=True), prepared(network, side)
    tiny()  # libraries load their parts when they are first used
    run = measured(step)
    model = step.model
    return run.report(
        checksum=sum(float(p.grad.double().abs().sum()) for p in model.parameters()),
        gradient_bytes=sum(p.grad.nbytes for p in model.parameters()),
    )


def profiled_pass(network: str) -> Report:
    """Ask the profiler what a pass saves."""
    torch.set_num_threads(1)
    step = prepared(network, "ours")
    with remat.CheckpointProfiler() as profiler:
        step()
    return {"memory_saved": profiler.memory_saved()}


class _Step:
    """A pass forward and back, without the optimiser."""

    def __init__(self, model: nn.Module, stack: _Stack, x: Tensor) -> None:
        self.model = model
        self.stack = stack
        self.x = x

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(self.x).square().mean().backward()

    def timed(self, call: Callable[..., Tensor]) -> list[float]:
        """Return the times at which the blocks were done, on the way forward and on that back."""
        self.stack.call = call
        self.stack.times = times = []
        self()
        self.stack.times = None
        return times


def prepared(network: str, side: str, *, tiny: bool = False) -> _Step:
    torch.manual_seed(0)
    if network == "gpt":
        stack = _Stack([_Attention(256, 8) for _ in range(16)], side)
        return _Step(stack, stack, torch.randn(1, 8, 256) if tiny else torch.randn(8, 512, 256))
    stack = _Stack([_Residual(64) for _ in range(15)], side)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), stack)
    return _Step(model, stack, torch.randn(1, 3, 8, 8) if tiny else torch.randn(16, 3, 64, 64))


class _Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], side: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.call = _call(side)
        self.times: list[float] | None = None  # at which blocks were done, if somebody wants them

    def forward(self, x: Tensor) -> Tensor:
        times = self.times
        for block in self.blocks:
            if times is not None and x.requires_grad:
                x.register_hook(lambda _: times.append(time.perf_counter()))
            x = self.call(block, x)
            if times is not None:
                times.append(time.perf_counter())
        return x


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).chunk(3, -1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.before_perceptron(x))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        y += x
        return self.activation(y)
