"""The demo on PyTorch: a small network trained for a few steps, plain and under a memory budget.

`python -m remat.training_demo` is one such run, in a process of its own, so that its memory is
measured apart; it takes its settings as JSON and prints what it measured as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import remat

from .errors import RematError, UnsupportedError
from .reports.memory import MeasuredPass, MemorySampler

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["MODELS", "TrainingDemo", "TrainingResult", "run_training_demo"]

MODELS = ("gpt", "resnet")
_PLANNED = 3  # steps that record and plan; the peak is that of later ones
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module('remat.training_demo', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class TrainingDemo:
    """What to train, for how many steps, and under which share of the plain peak."""

    model: str
    budget: float = 0.4
    steps: int = 6


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Two runs: peaks are above the level before a step, the optimizer's state aside.

    They are those of the fourth step and later ones: the first three record and plan.
    """

    demo: TrainingDemo
    plain: MeasuredPass
    budgeted: MeasuredPass
    budget_bytes: int
    loss_difference: float

    def as_dict(self) -> dict[str, Any]:
        """Return the results for JSON."""
        return {
            **asdict(self.demo),
            "plain": {"peak_bytes": self.plain.peak_bytes, "seconds": self.plain.seconds},
            "budgeted": {"peak_bytes": self.budgeted.peak_bytes, "seconds": self.budgeted.seconds},
            "budget_bytes": self.budget_bytes,
            "memory_ratio": self.budgeted.peak_bytes / max(1, self.plain.peak_bytes),
            "time_ratio": self.budgeted.seconds / self.plain.seconds,
            "loss_difference": self.loss_difference,
        }


def run_training_demo(demo: TrainingDemo) -> TrainingResult:
    """Train plain and under a budget, each in a fresh process; progress on stderr."""
    plain = _in_fresh_process(demo, None)
    budget = int(demo.budget * plain["peak_bytes"])
    budgeted = _in_fresh_process(demo, budget)
    losses = zip(plain["losses"], budgeted["losses"], strict=True)
    return TrainingResult(
        demo,
        _measured("plain", plain),
        _measured("under a budget", budgeted),
        budget,
        max(abs(one - other) for one, other in losses),
    )


def _measured(name: str, report: dict[str, Any]) -> MeasuredPass:
    return MeasuredPass(
        name,
        report["seconds"],
        report["peak_bytes"],
        tuple(report["curve_seconds"]),
        tuple(report["curve_bytes"]),
    )


def _in_fresh_process(demo: TrainingDemo, budget: int | None) -> dict[str, Any]:
    settings = json.dumps({**asdict(demo), "memory_budget": budget})
    command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), settings]
    # Tensors go back to the system when they are freed, or the peak would show what glibc keeps.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        raise RematError(f"the demo stopped with exit code {done.returncode}; see above")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


# -- in the fresh process --------------------------------------------------------------------------


def _train(model: str, steps: int, memory_budget: int | None) -> dict[str, Any]:
    try:
        import torch  # noqa: PLC0415  (only here: the command line works without it)
    except ImportError:
        raise UnsupportedError(
            "this demo trains a network with PyTorch: pip install torch"
        ) from None
    torch.manual_seed(0)
    network, batch = _gpt() if model == "gpt" else _resnet()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    _allocate_states(network, optimizer)
    _warm_up()
    losses, seconds = [], []
    name = "plain" if memory_budget is None else "under a budget"
    manager = (
        remat.CheckpointManager(memory_budget=memory_budget) if memory_budget else nullcontext()
    )
    with _progress() as progress, MemorySampler(0.005) as sampler, manager:
        for _ in progress.track(range(steps), description=f"{model}, {name}"):
            sampler.begin_step()  # objects of plans that stay are no memory of a step
            began = time.perf_counter()
            loss: Tensor = network(batch)
            losses.append(loss.item())  # here, or the next step would begin with it
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            del loss
    return {
        "losses": losses,
        "seconds": min(seconds),
        "peak_bytes": max(sampler.step_peaks[1 + _PLANNED :]),
        "curve_seconds": sampler.seconds,
        "curve_bytes": sampler.bytes,
    }


def _allocate_states(network: nn.Module, optimizer: Any) -> None:
    """Allocate gradients and the optimizer's state: they are there with and without a budget."""
    import torch  # noqa: PLC0415

    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _warm_up() -> None:
    """Load what is loaded late, as the planner and what it imports: that is no memory of a pass."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.GELU())]
    model = remat.auto_checkpoint(nn.Sequential(*layers), memory_budget=0.8)
    for _ in range(3):
        model(torch.ones(64, 8)).sum().backward()


def _progress() -> Progress:
    columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))


def _gpt() -> tuple[nn.Module, Tensor]:
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.nn import functional as F  # noqa: PLC0415

    class GPT(nn.Module):
        """Six blocks of width 256 on 4 x 256 tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(256, 256)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    256, 8, 1024, 0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(6)
            )
            self.head = nn.Linear(256, 256)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return GPT(), torch.randint(0, 256, (4, 256))


def _resnet() -> tuple[nn.Module, Tensor]:
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    class Residual(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.layers(x))

    class ResNet(nn.Module):
        """Eight blocks of 32 channels on 8 images of 64 x 64."""

        def __init__(self) -> None:
            super().__init__()
            blocks = [Residual(32) for _ in range(8)]
            self.layers = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks)

        def forward(self, images: Tensor) -> Tensor:
            loss: Tensor = self.layers(images).square().mean()
            return loss

    return ResNet(), torch.randn(8, 3, 64, 64)


if __name__ == "__main__":
    _settings = json.loads(sys.argv[1])
    try:
        _report = _train(_settings["model"], _settings["steps"], _settings["memory_budget"])
    except RematError as _error:
        print(f"remat: {_error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(_report))
