"""The demo on PyTorch: a small network trained for a few steps, plain and under a memory budget."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import remat
from remat.demo import DemoResult, compare, measure_apart, report
from remat.errors import UnsupportedError
from remat.reports.memory import MemorySampler
from remat.reports.progress import rich_bars
from remat.sizes import format_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["MODELS", "run_training_demo"]

MODELS = ("gpt", "resnet")
_PLANNED = 3  # steps that record and plan; the peak is that of later ones


def run_training_demo(model: str, share: float = 0.4, steps: int = 6) -> DemoResult:
    """Train plain, and under a share of the plain peak; progress on stderr.

    Peaks are above the level before a step, the optimizer's state aside. They are those of the
    fourth step and later ones: the first three record and plan.
    """
    plain, one = _measure_apart("plain", model, steps, None)
    budget = int(share * plain.peak_bytes)
    budgeted, other = _measure_apart("under a budget", model, steps, budget)
    used = f"{budgeted.peak_bytes / max(1, budget):.1%} used"
    row = ("budget", "", format_bytes(budget), used)
    facts, table = compare(plain, budgeted, "budgeted", [row])
    losses = zip(one["losses"], other["losses"], strict=True)
    difference = max(abs(first - second) for first, second in losses)
    facts |= {"budget_bytes": budget, "loss_difference": difference}
    same = "the same losses, bit for bit" if not difference else "other losses"
    summary = (
        f"{table.text()}\n{model}: {same} (largest difference {difference:g}).\n"
        "Time is that of a step, and the peak that of the fourth step and later ones: the first "
        "three record and plan."
    )
    title = f"Training {model}: memory over a few steps"
    settings = {"model": model, "budget": share, "steps": steps}
    return DemoResult((plain, budgeted), {**settings, **facts}, title, summary, budget)


def _measure_apart(name: str, model: str, steps: int, budget: int | None) -> Any:
    settings = {"model": model, "steps": steps, "memory_budget": budget}
    # Tensors go back to the system when they are freed, or the peak would show what glibc keeps.
    threshold = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return measure_apart(__name__, name, settings, "free some memory", **threshold)


def train(model: str, steps: int, memory_budget: int | None) -> dict[str, Any]:
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
    with rich_bars() as progress, MemorySampler(0.005) as sampler, manager:
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
    report(train)
