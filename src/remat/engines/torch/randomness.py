"""Random numbers: which generator an op draws from, and how to draw the same again.

Generators are shared by all threads, and to read the state of one and to draw from it are two
actions. A lock makes them one for all that regions do. Other threads of the program may still draw
in between. So the state after a draw is noted, too, and, if there are other threads, a checksum of
what was drawn: if a replay does not come to the same, somebody else has drawn meanwhile.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import RecomputeMismatchError

__all__ = ["Draw", "draw", "draw_again", "generator_of"]

_lock = threading.RLock()
_ATTEMPTS = 100  # to replay a draw while other threads draw, too
_SAMPLE = 32768  # bytes of what was drawn that are compared


class Draw(NamedTuple):
    """What an op drew from, and between which states of it."""

    generator: torch.Generator
    before: Tensor
    after: int  # a checksum of the state
    sample: int | None  # a checksum of what was drawn; None if no other thread could draw


def draw(generator: torch.Generator, call: Callable[[], Any]) -> tuple[Any, Draw]:
    """Call an op that draws random numbers, and note what it takes to draw them again."""
    with _lock:
        before = generator.get_state()
        out = call()
        sample = _sample(out) if threading.active_count() > 1 else None
        return out, Draw(generator, before, _checksum(generator), sample)


def draw_again(drawn: Draw, call: Callable[[], Any], *, repeatable: bool) -> Any:
    """Call an op with the random numbers that it drew, and leave the generator as it was.

    If another thread draws meanwhile, the call is repeated, as far as it can be.
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
        "random numbers that a checkpointed region drew cannot be drawn again: another thread drew "
        "from the same generator at the same time. Give that thread a generator of its own "
        "(torch.Generator), or pass preserve_rng_state=False to keep what regions draw"
    )


def _checksum(generator: torch.Generator) -> int:
    return zlib.crc32(generator.get_state().numpy().tobytes())


def _sample(out: Any) -> int:
    """Return a checksum of the first bytes of what an op gave, if the host can read them.

    The state alone does not tell: another thread may draw as much before a draw as after its
    replay.
    """
    checksum = 0
    for tensor in out if isinstance(out, list | tuple) else (out,):
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.numel():
            first = tensor.detach().reshape(-1)[: _SAMPLE // tensor.element_size()]
            checksum = zlib.crc32(first.contiguous().view(torch.uint8).numpy().data, checksum)
    return checksum


def generator_of(args: Iterable[Any], kwargs: dict[str, Any]) -> torch.Generator:
    """Return the generator of a call: the one that it was given, or its device's own."""
    values = [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, torch.Generator):
            return value
    for value in values:
        if isinstance(value, Tensor):
            return _of_device(value.device)
    return _of_device(torch.device(kwargs.get("device") or "cpu"))


def _of_device(device: torch.device) -> torch.Generator:
    if device.type in ("cpu", "meta"):  # (ops on meta tensors draw nothing)
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
