"""Loops on NumPy against plain autograd: memory and time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd
import numpy as np

import remat

from .measure import Report, Result, in_fresh_process, interleaved, measured

PEERS = ("autograd",)
_STEPS = 1000
_CHECKPOINTS = 100
_LONG = 100_000


def plain(steps: int) -> Report:
    gradient = _plain(steps)
    _plain(3)()
    return measured(gradient).report()


def checkpointed(steps: int) -> Report:
    gradient = _checkpointed(steps)
    _checkpointed(3)()
    return measured(gradient).report()


def within(budget: int) -> Report:
    _checkpointed(3, memory_budget=budget)()
    return measured(_checkpointed(_STEPS, memory_budget=budget)).report()


def long_loop(steps: int, checkpoints: int) -> Report:
    """A small state: what is left behind per step would show."""
    _small(10, checkpoints)()
    return measured(_small(steps, checkpoints)).report()


def run() -> list[Result]:
    return [_memory(), _time(), *map(_budget, (4, 16, 64)), _growth(), _raw_speed()]


def _memory() -> Result:
    peaks = {
        name: in_fresh_process(f"benchmarks.numpy_loop:{name}", steps=_STEPS)["peak_bytes"]
        for name in ("plain", "checkpointed")
    }
    return Result.at_most(
        "memory",
        f"{_STEPS} steps of tanh(x @ W + b), {_CHECKPOINTS} checkpoints: part of plain autograd's "
        "peak",
        peaks["checkpointed"] / peaks["plain"],
        0.05,
        **peaks,
    )


def _time() -> Result:
    seconds = interleaved({"plain": _plain(_STEPS), "checkpointed": _checkpointed(_STEPS)}, 12)
    return Result.at_most(
        "time",
        "the same: time against plain autograd",
        seconds["checkpointed"] / seconds["plain"],
        1.45,
        **seconds,
    )


def _budget(megabytes: int) -> Result:
    budget = megabytes * 10**6
    peak = in_fresh_process("benchmarks.numpy_loop:within", budget=budget)["peak_bytes"]
    return Result.at_most(
        f"budget of {megabytes} MB",
        "the same with memory_budget: peak against the budget, by the operating system",
        peak / budget,
        1.0,
        peak_bytes=peak,
    )


def _growth() -> Result:
    path = "benchmarks.numpy_loop:long_loop"
    peaks = {
        f"{steps} steps": in_fresh_process(path, steps=steps, checkpoints=100)["peak_bytes"]
        for steps in (_LONG // 10, _LONG)
    }
    few, many = peaks.values()
    return Result.at_most(
        "growth",
        f"a state of 64 floats, 100 checkpoints: bytes for each of the steps from {_LONG // 10} "
        f"to {_LONG}",
        max(0, many - few) / (_LONG - _LONG // 10),
        1.0,
        **peaks,
    )


def _raw_speed() -> Result:
    """An undifferentiated loop runs on raw arrays: what does the runner add?"""
    W, b, x = _weights(256, 64)

    def step(state: Any) -> Any:
        return np.tanh(state @ W + b)

    def by_hand() -> Any:
        state = x
        for _ in range(_STEPS // 4):
            state = step(state)
        return state

    sides: dict[str, Callable[[], object]] = {
        "by hand": by_hand,
        "checkpointed": lambda: remat.checkpointed_loop(step, x, _STEPS // 4),
    }
    seconds = interleaved(sides, 20)
    return Result.at_most(
        "raw speed",
        "a sweep that only advances: time against a Python loop by hand",
        seconds["checkpointed"] / seconds["by hand"],
        1.1,
        **seconds,
    )


def _plain(steps: int) -> Callable[[], object]:
    W, b, x = _weights(256, 64)

    def model(x: Any, W: Any, b: Any) -> Any:
        for _ in range(steps):
            x = np.tanh(x @ W + b)
        return np.sum(x)

    gradient = autograd.grad(model, (0, 1, 2))
    return lambda: gradient(x, W, b)


def _checkpointed(steps: int, **options: Any) -> Callable[[], object]:
    W, b, x = _weights(256, 64)
    options = options or {"num_checkpoints": _CHECKPOINTS}

    def model(x: Any, W: Any, b: Any) -> Any:
        final, _ = remat.checkpointed_loop(
            lambda state: np.tanh(state @ W + b), x, steps, **options
        )
        return np.sum(final)

    gradient = remat.grad(model, wrt=(0, 1, 2))
    return lambda: gradient(x, W, b)


def _small(steps: int, checkpoints: int) -> Callable[[], object]:
    x = np.linspace(-1, 1, 64)

    def model(x: Any) -> Any:
        final, _ = remat.checkpointed_loop(lambda s: np.tanh(s * 1.01), x, steps, checkpoints)
        return np.sum(final)

    gradient = remat.grad(model)
    return lambda: gradient(x)


def _weights(width: int, batch: int) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    W = random.normal(size=(width, width)) * 0.8 / np.sqrt(width)
    return W, random.normal(size=width) * 0.1, random.normal(size=(batch, width))
