"""What is checked on a device; each check returns what it found, or raises `Failed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat

from ..sizes import format_bytes
from .measure import peak_bytes, seconds_of
from .programs import compare

__all__ = ["CHECKS", "Failed", "Skipped"]

_MUCH_LESS = 0.8  # of the plain peak is the most that checkpointed blocks may take


class Failed(Exception):
    """A check did not hold."""


class Skipped(Exception):
    """A check has no meaning on this device."""


# -- programs --------------------------------------------------------------------------------------


def random_programs(device: torch.device, *, quick: bool) -> str:
    """Compare random programs with and without regions, scopes and policies."""
    wanted = 60 if quick else 300
    found, seed = 0, 0
    while found < wanted and seed < 20 * wanted:
        difference = compare(seed, device)
        if difference:
            raise Failed(difference)
        found += difference is not None
        seed += 1
    if found < wanted:
        raise Failed(f"only {found} of {seed} programs repeat themselves on this device")
    return f"{found} programs bit-equal (seeds below {seed})"


def dropout(device: torch.device, *, quick: bool) -> str:
    """Draw in regions: dropout, and a generator of the program's own."""
    generator = torch.Generator(device)

    def layer(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, device=device, generator=generator)
        return F.dropout((x + noise).tanh(), 0.4).exp()

    def run(region: Any) -> list[Tensor]:
        torch.manual_seed(3)
        generator.manual_seed(5)
        x = torch.linspace(-1, 1, 4096, device=device).requires_grad_()
        out = region(layer, region(layer, x))
        (gradient,) = torch.autograd.grad(out.sum(), x)
        states = [torch.rand(4, device=device), torch.rand(4, device=device, generator=generator)]
        return [out.detach(), gradient, *states]

    _expect_equal(run(remat.checkpoint), run(_plain))
    return "dropout and generators drawn again; their states as without regions"


def autocast(device: torch.device, *, quick: bool) -> str:
    """Run regions under autocast, whose cache of weights must not leak between passes."""
    torch.manual_seed(0)
    block = _Block(32, 2).to(device)
    x = torch.randn(2, 8, 32, device=device)

    def run(region: Any) -> list[Tensor]:
        block.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            torch.manual_seed(1)
            out = region(block, region(block, x))
        out.float().square().mean().backward()
        return [out.detach(), *_gradients(block)]

    try:
        expected = run(_plain)
    except RuntimeError as error:
        raise Skipped(f"this device has no autocast to bfloat16: {error}") from None
    _expect_equal(run(remat.checkpoint), expected)
    return "bfloat16, bit-equal"


# -- what only CUDA has ----------------------------------------------------------------------------


def streams(device: torch.device, *, quick: bool) -> str:
    """Run regions in another stream than that of backward's caller."""
    _only_on_cuda(device)
    torch.manual_seed(0)
    block = _Block(64, 2).to(device)
    x = torch.randn(8, 64, 64, device=device)

    def run(region: Any) -> list[Tensor]:
        block.zero_grad()
        torch.manual_seed(1)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            out = region(block, region(block, x)).square().mean()
        torch.cuda.current_stream(device).wait_stream(side)
        out.backward()
        torch.cuda.synchronize(device)
        return [out.detach(), *_gradients(block)]

    expected = run(_plain)
    for _ in range(3 if quick else 20):
        _expect_equal(run(remat.checkpoint), expected)
    return "a side stream, bit-equal"


def cuda_graphs(device: torch.device, *, quick: bool) -> str:
    """Expect that a region refuses to be captured in a CUDA graph."""
    _only_on_cuda(device)
    x = torch.ones(8, device=device, requires_grad=True)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            remat.checkpoint(torch.sin, x)
    except remat.UnsupportedError:
        return "regions refuse to be captured, as they say"
    raise Failed("a region was captured in a CUDA graph without an error")


def _only_on_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Skipped("only on cuda")


# -- a small GPT -----------------------------------------------------------------------------------


def peak_memory(device: torch.device, *, quick: bool) -> str:
    """Compare the peaks of a small GPT, with and without checkpointed blocks."""
    plain = peak_bytes(_step_of(_gpt(device)), device)
    saving = peak_bytes(_step_of(remat.apply(_gpt(device))), device)
    if plain is None or saving is None:
        raise Skipped("this device keeps no statistics of its peak memory")
    text = f"{format_bytes(plain)} plain, {format_bytes(saving)} checkpointed"
    if saving > _MUCH_LESS * plain:
        raise Failed(f"{text}: more than {_MUCH_LESS:.0%} of it")
    return f"{text} ({saving / plain:.0%})"


def gradients_of_gpt(device: torch.device, *, quick: bool) -> str:
    """Compare gradients of a small GPT with those of the plain model."""
    model = _gpt(device)
    step = _step_of(model)
    step()
    expected = _gradients(model)
    step()
    is_repeatable = all(map(torch.equal, _gradients(model), expected))
    remat.apply(model)
    step()
    found = _gradients(model)
    if is_repeatable:
        _expect_equal(found, expected)
        return "bit-equal"
    for gradient, wanted in zip(found, expected, strict=True):
        if not torch.allclose(gradient, wanted, rtol=1e-3, atol=1e-5):
            raise Failed("gradients differ by more than the device's own do from run to run")
    return "equal up to rounding; this device does not repeat itself"


def timing(device: torch.device, *, quick: bool) -> str:
    """Time a small GPT: plain, with torch's checkpoint, with remat. It cannot fail."""
    by_torch = _gpt(device)
    by_torch.region = _torch_region
    runs = {
        "plain": _step_of(_gpt(device)),
        "torch.utils.checkpoint": _step_of(by_torch),
        "remat": _step_of(remat.apply(_gpt(device))),
    }
    seconds = seconds_of(runs, device, 3 if quick else 10)
    return ", ".join(
        f"{name} {time * 1e3:.1f} ms ({time / seconds['plain']:.2f}x)"
        for name, time in seconds.items()
    )


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1)
        made: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + made


class _TinyGPT(nn.Module):
    def __init__(self, depth: int, width: int, words: int) -> None:
        super().__init__()
        self.words = words
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(_Block(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, words)
        self.region: Any = _plain

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.region(block, x)
        scores: Tensor = self.head(x)
        return scores


def _gpt(device: torch.device) -> _TinyGPT:
    torch.manual_seed(0)
    return _TinyGPT(depth=6, width=64, words=128).to(device)


def _step_of(model: _TinyGPT) -> Callable[[], None]:
    """Return a forward and backward pass."""
    device = model.head.weight.device
    tokens = torch.arange(8 * 64, device=device).view(8, 64) % model.words

    def step() -> None:
        torch.manual_seed(1)
        model.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    return step


# -- helpers ---------------------------------------------------------------------------------------


def _plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _torch_region(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


def _gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def _expect_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(a, b):
            apart = (a.float() - b.float()).abs().max().item()
            raise Failed(f"result {number} differs by up to {apart:.3g}")


CHECKS: dict[str, Callable[..., str]] = {
    "random programs": random_programs,
    "dropout, generators": dropout,
    "autocast": autocast,
    "streams": streams,
    "CUDA graphs": cuda_graphs,
    "GPT: gradients": gradients_of_gpt,
    "GPT: peak memory": peak_memory,
    "GPT: time": timing,
}
