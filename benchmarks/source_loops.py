"""Plain loops that checkpoint themselves, against the same loops by hand."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import remat

from .measure import Report, Result, in_fresh_process, interleaved, measured

PEERS = ()
_STEPS = 1000
_SIZE = 128


def rnn_model(x: Any, W: Any, b: Any) -> Any:
    state = x
    for _ in range(_STEPS):
        state = np.tanh(state @ W + b)
    return state


def rnn_by_hand(x: Any, W: Any, b: Any) -> Any:
    return remat.checkpointed_loop(lambda state: np.tanh(state @ W + b), x, _STEPS, 31)[0]


def numbered_model(x: Any, W: Any, b: Any) -> Any:
    state = x
    for i in range(_STEPS):
        state = np.tanh(state @ W + b * (0.001 * i))
    return state


def numbered_by_hand(x: Any, W: Any, b: Any) -> Any:
    def step(both: Any) -> Any:
        state, i = both
        return np.tanh(state @ W + b * (0.001 * i)), i + 1

    return remat.checkpointed_loop(step, (x, 0), _STEPS, 31)[0][0]


def plain() -> Report:
    return _measured(remat.grad(rnn_model))


def by_hand() -> Report:
    return _measured(remat.grad(rnn_by_hand))


def transformed() -> Report:
    return _measured(remat.grad_with_checkpointing(rnn_model, num_checkpoints=31))


def run() -> list[Result]:
    return [
        *_memory(),
        _time("time", rnn_model, rnn_by_hand),
        _time("time, numbered", numbered_model, numbered_by_hand),
        _torch_time(),
        _transforming(),
    ]


def _measured(gradient: Callable[..., Any]) -> Report:
    arguments = _arguments()
    gradient(arguments[0][:1, :1], arguments[1][:1, :1], arguments[2][:1])
    return measured(lambda: gradient(*arguments)).report()


def _arguments() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return (
        np.zeros((64, _SIZE)),
        rng.normal(size=(_SIZE, _SIZE)) * 0.01,
        rng.normal(size=_SIZE) * 0.01,
    )


def _memory() -> list[Result]:
    peaks = {
        name: in_fresh_process(f"benchmarks.source_loops:{name}")["peak_bytes"]
        for name in ("plain", "by_hand", "transformed")
    }
    return [
        Result.at_most(
            "memory",
            f"{_STEPS} steps of tanh(x @ W + b), 31 checkpoints: part of the peak of `grad`",
            peaks["transformed"] / peaks["plain"],
            0.06,
            **peaks,
        ),
        Result.at_most(
            "memory, by hand",
            "the same loop: peak, as a part of that of `checkpointed_loop` by hand",
            peaks["transformed"] / peaks["by_hand"],
            1.05,
            **peaks,
        ),
    ]


def _time(name: str, plain: Callable[..., Any], hand: Callable[..., Any]) -> Result:
    arguments = _arguments()
    ours = remat.grad_with_checkpointing(plain, num_checkpoints=31)
    theirs = remat.grad(hand)
    seconds = interleaved(
        {"ours": lambda: ours(*arguments), "by hand": lambda: theirs(*arguments)}, rounds=5
    )
    words = f"{_STEPS} steps on NumPy: time, as a part of that of `checkpointed_loop` by hand"
    return Result.at_most(name, words, seconds["ours"] / seconds["by hand"], 1.05, **seconds)


def _torch_time() -> Result:
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    W = (torch.eye(_SIZE) * 0.9).requires_grad_()
    x = torch.ones(16, _SIZE)

    def plain(x: Any) -> Any:
        for _ in range(_STEPS):
            x = torch.tanh(x @ W)
        return x

    ours = remat.checkpoint_loops(plain, 31)

    def hand(x: Any) -> Any:
        return remat.checkpointed_loop(lambda s: torch.tanh(s @ W), x, _STEPS, 31)[0]

    seconds = interleaved(
        {
            "ours": lambda: ours(x).sum().backward(),
            "by hand": lambda: hand(x).sum().backward(),
        },
        rounds=8,
    )
    words = f"{_STEPS} steps on PyTorch: time, as a part of that of `checkpointed_loop` by hand"
    ratio = seconds["ours"] / seconds["by hand"]
    return Result.at_most("time, torch", words, ratio, 1.05, **seconds)


def _transforming() -> Result:
    """Transform a function of fifty lines, ten times anew."""
    body = """
        def function_{i}(x, W, xs):
            out, h, t = [], x, 0.0
    """
    loop = """
            for i, row in enumerate(xs):
                h = np.tanh(h @ W + row)
                if i % 2:
                    out.append(h)
                for j in range(10):
                    h = h + j
                t += 0.1
                if t > 10:
                    break
    """
    text = "".join(
        textwrap.dedent(body.format(i=i))
        + textwrap.indent(textwrap.dedent(loop), "    ") * 5
        + "    return h, out, t\n"
        for i in range(10)
    )
    text = "\n".join(line for line in text.splitlines() if line.strip())
    with TemporaryDirectory() as folder:
        file = Path(folder) / "functions.py"
        file.write_text(text)
        names: dict[str, Any] = {"np": np, "__name__": "functions"}
        exec(compile(text, str(file), "exec"), names)
        seconds = []
        for i in range(10):
            started = time.process_time()
            remat.checkpoint_loops(names[f"function_{i}"])
            seconds.append(time.process_time() - started)
    lines = len(text.splitlines()) // 10
    words = f"transform a function of {lines} lines with ten loops: processor time in ms"
    return Result.at_most("transform", words, 1000 * min(seconds), 50, seconds=seconds)
