"""What the text of a random program calls: its inputs, its odd functions, and a plain stand-in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "Bumped",
    "Carved",
    "Counter",
    "Leave",
    "Noisy",
    "Ranked",
    "Retaped",
    "Scaled",
    "SimpleNamespace",
    "Squared",
    "Squashed",
    "Turned",
    "Waved",
    "batched",
    "double_by_default",
    "in_thread",
    "interleaved",
    "ints",
    "kept_twice",
    "leaf",
    "module",
    "recycled",
    "seeded",
    "spun",
    "squares",
    "unseen",
    "wave",
    "wave_again",
    "write_unseen",
]


def leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    """An input or a parameter; a seed of its own, so that leaving another out changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7
    return values.to(dtype).requires_grad_(grad)


def ints(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def module(make: Callable[[], torch.nn.Module], *, seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


class Counter:
    """What a program keeps on the side of Python."""

    def __init__(self) -> None:
        self.n = 0

    def next(self) -> int:
        self.n += 1
        return self.n


class Leave(Exception):
    """Raised to leave a scope early."""


# What autograd is asked to do.


def seeded(outs: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that have gradients, and what to start from on the way back."""
    ys = [out for out in outs if out.requires_grad]
    generator = torch.Generator().manual_seed(0)
    return ys, [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in ys]


def batched(gs: list[Tensor]) -> list[Tensor]:
    return [torch.stack([g, g.flip(0) if g.dim() else -g]) for g in gs]


def squares(grads: tuple[Tensor | None, ...]) -> Tensor:
    return sum(
        (torch.sum((g * g.conj()).real) for g in grads if g is not None and g.requires_grad),
        torch.zeros((), requires_grad=True),
    )


def in_thread(work: Callable[[], Any]) -> Any:
    """Call a function in another thread; raise here what it raises there."""
    results: list[Any] = []
    errors: list[BaseException] = []

    threads = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(threads)  # each thread has a number of its own, and sums differ
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


# Functions of the user's own, with all the ways there are to keep data for the way back.


class Scaled(torch.autograd.Function):
    """Keeps no tensor, but a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Squared(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Squashed(torch.autograd.Function):
    """Saves its output, and cannot be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class Waved(torch.autograd.Function):
    """Saves what it made on the way, and keeps one tensor as a plain attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.cos(x)
        ctx.side = torch.sin(y)
        ctx.save_for_backward(slope, y)
        return torch.sin(x) * ctx.side, y + 1.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        slope, y = ctx.saved_tensors
        return left * slope * ctx.side, right + left * torch.cos(y) * 0.5


class Bumped(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(0.9).add_(0.1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.9


class Noisy(torch.autograd.Function):
    """Draws random numbers, and saves them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (noise,) = ctx.saved_tensors
        return grad * noise


class Retaped(torch.autograd.Function):
    """Runs autograd of its own on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x) * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            y = torch.sin(again) * again
        return torch.autograd.grad(y, again, grad)[0]


class Ranked(torch.autograd.Function):
    """Has a second output without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = torch.sort(x, dim=-1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        return values, order

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, order, grad)


class Turned(torch.autograd.Function):
    """Writes in place through a kernel that nobody sees, and returns a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _write_by_address(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * -0.8


class Spun(Turned):
    """The same, and what it returns does not look like a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _write_by_address(x)
        return x.detach()


class Carved(torch.autograd.Function):
    """A kernel leaves the gradient in the input, and something in memory that began as zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        with _disable_current_modes(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(x.detach()).mul_(x.detach()).mul_(0.5)
        ctx.save_for_backward(x.detach())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


def _write_by_address(x: Tensor) -> None:
    with _disable_current_modes(), torch.autograd._unsafe_preserve_version_counter(x):
        x.mul_(-0.8)


def spun(x: Tensor) -> Tensor:
    """Without a graph PyTorch does not tell what a Function returns from any detached tensor."""
    fresh = x * 1.1
    return Spun.apply(fresh) if fresh.requires_grad else fresh


def wave(x: Tensor) -> Tensor:
    return torch.sin(x) * torch.cos(x)


def interleaved(remat: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Leave scopes in the order in which they were entered, as generators may do."""
    first, second = remat.CheckpointScope("first"), remat.CheckpointScope("second")
    first.__enter__()
    y = torch.sin(x + 1.0)
    second.__enter__()
    z = torch.sin(y + 1.0)
    first.__exit__(None, None, None)
    z = torch.sin(z + y)
    second.__exit__(None, None, None)
    return y, z


def recycled(x: Tensor) -> Tensor:
    """Make and free memory, so that addresses are used again."""
    for _ in range(3):
        x = torch.tanh(x * 1.1) + 0.1
    return x


def kept_twice() -> torch.autograd.graph.saved_tensors_hooks:
    """Hooks of the user's own."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (_copied(tensor), tensor.detach()), lambda kept: kept[0]
    )


def _copied(tensor: Tensor) -> Tensor:
    """A copy that is laid out in the same way: kernels may sum in another order otherwise."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


@contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def wave_again(x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(wave, x, use_reentrant=False)


def unseen(x: Tensor) -> Tensor:
    """Compute where no mode looks on, as a compiled kernel does."""
    with _disable_current_modes():
        return torch.sin(x) * 0.9


def write_unseen(x: Tensor) -> None:
    with _disable_current_modes():
        x.mul_(0.7)


names = {name: globals()[name] for name in __all__}


# What follows is for those who run programs, not for the programs.


def with_regions(region: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return what `remat` is in a run without it: around each region is only what is given."""

    class CheckpointScope:
        nodes = ()

        def __init__(self, name: str, enabled: bool = True, use_recomputation: bool = True) -> None:
            self.enabled = enabled
            self.entered: list[AbstractContextManager[Any]] = []

        def __enter__(self) -> CheckpointScope:
            self.entered.append(region() if self.enabled else nullcontext())
            self.entered[-1].__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.entered.pop().__exit__(None, None, None)

    def call(fn: Any, inputs: Any, kwargs: Any) -> Any:
        with region():
            return fn(*inputs, **kwargs)

    def checkpoint(
        fn: Any = None,
        *inputs: Any,
        preserve_rng_state: bool = True,
        use_reentrant: bool = False,
        threshold: Any = None,
        **kwargs: Any,
    ) -> Any:
        if isinstance(fn, Tensor):
            return fn
        if inputs or kwargs:
            return call(fn, inputs, kwargs)
        return lambda *args, **keywords: call(fn, args, keywords)

    class CheckpointGroup:
        checkpoint_fn = staticmethod(checkpoint)

        def __init__(self, name: str) -> None:
            pass

    class CheckpointProfiler(nullcontext[None]):
        def report(self) -> str:
            return ""

    return SimpleNamespace(
        CheckpointScope=CheckpointScope,
        CheckpointGroup=CheckpointGroup,
        CheckpointProfiler=CheckpointProfiler,
        checkpoint=checkpoint,
        adaptive_checkpoint=checkpoint,
        checkpoint_segment=lambda fn, inputs, **options: call(fn, (inputs,), {}),
        mark_checkpoint=lambda tensor: tensor,
    )


plain = with_regions(nullcontext)
