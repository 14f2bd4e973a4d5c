"""Random numbers: which generator an op draws from, and how to draw the same numbers again.

Threads share generators. Reading the state of a generator and drawing from it are two actions; a
lock makes them atomic for all regions. Threads outside of regions may still draw in between. So the
state after a draw is saved, too, and, if there are other threads, a checksum of the numbers. If a
replay does not reproduce both, another thread has drawn in the meantime.

Some numbers cannot be drawn again: those of a device whose generator is not known, and those of a
kernel with a random state of its own, as the dropout of cuDNN's LSTM. What such an op gave is kept.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import RecomputeMismatchError
from ...random_states import GeneratorStates, RandomStates, Source, default_sources
from .backend import below_autograd, default_mps_generator, without_dispatch_modes

__all__ = [
    "Draw",
    "GeneratorStates",
    "Generators",
    "Unrepeatable",
    "draw",
    "draw_again",
    "generator_of",
]

_lock = threading.RLock()
_ATTEMPTS = 100  # to replay a draw while other threads draw
_SAMPLE = 32768  # bytes of the drawn numbers that are compared


class Draw(NamedTuple):
    """The generator that an op drew from, and its states before and after."""

    generator: torch.Generator
    before: Tensor
    after: int  # checksum of the state
    sample: int | None  # checksum of the numbers; None if no other thread could draw


class Unrepeatable(NamedTuple):
    """Stands for a `Draw` of numbers that cannot be drawn again: no known generator has moved."""


def draw(
    generator: torch.Generator | None, call: Callable[[], Any]
) -> tuple[Any, Draw | Unrepeatable]:
    """Call an op that draws random numbers, and save what a replay needs."""
    if generator is None:
        return call(), Unrepeatable()
    with _lock:
        before = generator.get_state()
        out = call()
        after = _checksum(generator)
        # On the CPU an op that leaves the generator where it is has drawn nothing.
        if generator.device.type != "cpu" and after == _checksum_of(before):
            return out, Unrepeatable()
        sample = _sample(out) if threading.active_count() > 1 else None
        return out, Draw(generator, before, after, sample)


def draw_again(drawn: Draw, call: Callable[[], Any], *, repeatable: bool) -> Any:
    """Call an op with the random numbers that it drew before, and restore the generator.

    If another thread draws in the meantime, the call is repeated if it is `repeatable`.
    """
    generator = drawn.generator
    for _ in range(_ATTEMPTS if repeatable else 1):
        with _lock:
            now = generator.get_state()
            generator.set_state(drawn.before)
            try:
                out = call()
                if _checksum(generator) == drawn.after and drawn.sample in (None, _sample(out)):
                    return out
            finally:
                generator.set_state(now)
    raise RecomputeMismatchError(
        "the random numbers of a checkpointed region cannot be drawn again: another thread drew "
        "from the same generator at the same time. Give that thread a generator of its own "
        "(torch.Generator), or pass preserve_rng_state=False to keep the numbers themselves"
    )


def _checksum(generator: torch.Generator) -> int:
    return _checksum_of(generator.get_state())


def _checksum_of(state: Tensor) -> int:
    return zlib.crc32(state.numpy().tobytes())


def _sample(out: Any) -> int:
    """Return a checksum of the first bytes that an op returned, if the host can read them.

    The state alone is not enough: another thread may draw as much before a draw as after its
    replay. Not through NumPy: a storage that an array shares counts as external memory.
    """
    checksum = 0
    for tensor in out if isinstance(out, list | tuple) else (out,):
        if type(tensor) is Tensor and tensor.device.type == "cpu" and _is_dense(tensor):
            with without_dispatch_modes(), below_autograd():
                count = _SAMPLE // tensor.element_size()
                first = tensor.reshape(-1)[:count].clone(memory_format=torch.contiguous_format)
            checksum = zlib.crc32(ctypes.string_at(first.data_ptr(), first.nbytes), checksum)
    return checksum


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def generator_of(args: Iterable[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """Return the generator of a call: its argument, or the default generator of its device.

    None if the device has none that is known.
    """
    values = [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, torch.Generator):
            return value
    for value in values:
        if isinstance(value, Tensor):
            return _of_device(value.device)
    return _of_device(torch.device(kwargs.get("device") or "cpu"))


def _of_device(device: torch.device) -> torch.Generator | None:
    if device.type in ("cpu", "meta"):  # ops on meta tensors draw no numbers
        return torch.default_generator
    if device.type == "mps":
        return default_mps_generator()
    try:
        module = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        generator: torch.Generator = module.default_generators[index]
    except (AttributeError, IndexError, RuntimeError):  # a backend from outside of PyTorch
        return None
    return generator


# -- all generators of a pass ----------------------------------------------------------------------


class Generators(RandomStates):
    """Default generators of devices in use, of NumPy and of Python, and others that are added."""

    def __init__(self, *, only_torch: bool = False) -> None:
        sources = [_source(torch.default_generator)]
        if not only_torch:
            sources += default_sources()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            sources += map(_source, torch.cuda.default_generators)
        super().__init__(sources)

    def add_generator(self, generator: torch.Generator, state: Tensor) -> None:
        """Add a generator; `state` is what it was before anything was drawn."""
        self.add(_source(generator), state)


def _source(generator: torch.Generator) -> Source:
    return Source(
        generator, f"a {generator.device} generator", generator.get_state, generator.set_state
    )
