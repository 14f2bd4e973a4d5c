"""Scopes and budgets on NumPy against plain gradients: memory and time.

`remat.CheckpointScope` around every step of a simulation and every layer of small networks, all in
plain NumPy, next to `remat.grad` of the same function without scopes. Gradients have the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

import remat

from .measure import Report, Result, in_fresh_process, interleaved, lowest_of_processes, measured

PEERS = ("autograd",)
_STEPS = 50
_LAYERS = 4
_ROUNDS = 6

# Times: pages that are given back and taken again would be most of what is measured.
_KEEP_PAGES = MappingProxyType(
    {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "99999999999",
        "MALLOC_TOP_PAD_": "268435456",
    }
)
_RETURN_PAGES = MappingProxyType({"MALLOC_MMAP_THRESHOLD_": "65536"})  # peaks

Layer = Callable[[Any], Any]


# --- models -------------------------------------------------------------------------------------


def _wave(side: int) -> tuple[list[Layer], Any]:
    """A wave with a nonlinear force, on a square with fixed edges; the state is (now, before)."""

    def step(state: Any) -> Any:
        now, before = state
        inner = now[1:-1, 1:-1]
        bend = now[2:, 1:-1] + now[:-2, 1:-1] + now[1:-1, 2:] + now[1:-1, :-2] - 4.0 * inner
        force = 0.2 * bend - 0.01 * np.sin(inner) * np.exp(-inner * inner)
        after = 2.0 * now - before
        after[1:-1, 1:-1] += force
        return after, now

    line = np.linspace(-2.0, 2.0, side)
    start = np.exp(-4.0 * (line[:, None] ** 2 + line**2))
    return [step] * _STEPS, (start, start)


def _attention(width: int) -> tuple[list[Layer], Any]:
    """Layers of attention with 8 heads over 256 tokens."""
    heads, tokens = 8, 256
    random = np.random.default_rng(0)

    def layer() -> Layer:
        q, k, v, out = (random.normal(size=(width, width)) / np.sqrt(width) for _ in range(4))

        def split(x: Any) -> Any:
            return np.swapaxes(np.reshape(x, (tokens, heads, -1)), 0, 1)

        def attend(x: Any) -> Any:
            scores = split(x @ q) @ np.swapaxes(split(x @ k), 1, 2) / np.sqrt(width / heads)
            scores = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
            weights = scores / np.sum(scores, axis=-1, keepdims=True)
            mixed = np.reshape(np.swapaxes(weights @ split(x @ v), 0, 1), (tokens, width))
            return x + mixed @ out

        return attend

    return [layer() for _ in range(_LAYERS)], random.normal(size=(tokens, width))


def _residual(width: int) -> tuple[list[Layer], Any]:
    """Blocks of x + W2 @ gelu(W1 @ normalised x), on 256 rows."""
    random = np.random.default_rng(0)

    def block() -> Layer:
        first = random.normal(size=(width, 4 * width)) / np.sqrt(width)
        second = random.normal(size=(4 * width, width)) / np.sqrt(4 * width)

        def run(x: Any) -> Any:
            centred = x - np.mean(x, axis=1, keepdims=True)
            normal = centred / np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + 1e-5)
            hidden = normal @ first
            bent = 0.5 * hidden * (1.0 + np.tanh(0.8 * (hidden + 0.045 * hidden**3)))
            return x + bent @ second

        return run

    return [block() for _ in range(_LAYERS)], random.normal(size=(256, width))


_MODELS: dict[str, tuple[Callable[[int], tuple[list[Layer], Any]], int, int]] = {
    "wave": (_wave, 512, 8),  # the size, and that of the case that warms up
    "attention": (_attention, 256, 16),
    "residual": (_residual, 512, 16),
}
_TITLES = {
    "wave": f"{_STEPS} steps of a wave on 512 x 512, a scope each",
    "attention": f"{_LAYERS} layers of attention, a scope each",
    "residual": f"{_LAYERS} residual blocks, a scope each",
}


def _gradient(model: str, *, tiny: bool = False, scope: Any = None, **options: Any) -> Any:
    """Return a call that computes the gradient; `scope` are the options of scopes."""
    make, size, tiny_size = _MODELS[model]
    layers, start = make(tiny_size if tiny else size)

    def loss(state: Any) -> Any:
        for i, layer in enumerate(layers):
            if scope is None:
                state = layer(state)
            else:
                with remat.CheckpointScope(f"layer {i}", **scope):
                    state = layer(state)
        return np.sum((state[0] if isinstance(state, tuple) else state) ** 2)

    gradient = remat.grad(loss, **options)
    return lambda: gradient(start)


# --- in fresh processes ---------------------------------------------------------------------------


def peak(model: str, scoped: bool) -> Report:
    scope: Any = {} if scoped else None
    _gradient(model, tiny=True, scope=scope)()
    run = measured(_gradient(model, scope=scope))
    return run.report(digest=_digest(run.value))


def peak_within(model: str, budget: int) -> Report:
    """The first call makes the plan, the second one follows it."""
    _gradient("wave", tiny=True)()
    _plan_something()
    gradient = _gradient(model, memory_budget=budget)
    first, second = measured(gradient), measured(gradient)
    return second.report(first_peak_bytes=first.peak_bytes, digest=_digest(second.value))


def _plan_something() -> None:
    """Let the planner import what it needs: that is not a part of any budget."""

    def loss(x: Any) -> Any:
        for _ in range(12):
            x = np.tanh(np.sin(x) * 1.1)
        return np.sum(x)

    remat.grad(loss, memory_budget=0.7)(np.ones(10_000))


def times(model: str, rounds: int) -> Report:
    return interleaved(
        {
            "plain": _gradient(model),
            "scoped": _gradient(model, scope={}),
            "held": _gradient(model, scope={"use_recomputation": False}),
        },
        rounds,
    )


def _digest(gradient: Any) -> str:
    parts = gradient if isinstance(gradient, tuple) else (gradient,)
    return hashlib.blake2b(b"".join(part.tobytes() for part in parts)).hexdigest()


# --- figures --------------------------------------------------------------------------------------


def run() -> list[Result]:
    return [result for model in _MODELS for result in _figures(model)]


def _figures(model: str) -> list[Result]:
    title = _TITLES[model]
    reports = {
        name: lowest_of_processes(
            "benchmarks.numpy_scopes:peak", 3, _RETURN_PAGES, model=model, scoped=name == "scoped"
        )
        for name in ("plain", "scoped")
    }
    peaks = {name: report["peak_bytes"] for name, report in reports.items()}
    budget = peaks["plain"] // 2
    within = lowest_of_processes(
        "benchmarks.numpy_scopes:peak_within", 3, _RETURN_PAGES, model=model, budget=budget
    )
    digests = {report["digest"] for report in (*reports.values(), within)}
    seconds = in_fresh_process(
        "benchmarks.numpy_scopes:times", _KEEP_PAGES, model=model, rounds=_ROUNDS
    )
    return [
        Result.at_least(
            f"{model}: memory",
            f"{title}: reduction of the peak of a plain gradient",
            1.0 - peaks["scoped"] / peaks["plain"],
            0.5,
            **peaks,
        ),
        Result.at_most(
            f"{model}: other gradients",
            "the same, and within a budget: gradients with other bits than the plain one",
            len(digests) - 1,
            0,
        ),
        Result.at_most(
            f"{model}: time",
            "the same: time against a plain gradient",
            seconds["scoped"] / seconds["plain"],
            2.0,
            **seconds,
        ),
        Result.at_most(
            f"{model}: everything held",
            "the same with `use_recomputation=False`: time against a plain gradient",
            seconds["held"] / seconds["plain"],
            1.3,
            **seconds,
        ),
        Result.at_most(
            f"{model}: budget",
            "without scopes, `memory_budget` of half of the plain peak: peak against the budget",
            within["peak_bytes"] / budget,
            1.1,
            budget=budget,
            peak_bytes=within["peak_bytes"],
            first_peak_bytes=within["first_peak_bytes"],
        ),
    ]
