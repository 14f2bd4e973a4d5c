"""Streams of accelerators: what ran on several of them is replayed on the same ones, in order.

Most programs use one stream. An op on another one is recorded with it. A replay runs on the stream
of whoever asks first, which waits for all streams of the region before, and for every other stream
that an op is replayed on. Who takes a result later, on another stream, waits for the replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .memory.tensors import flat

__all__ = ["StreamEvents", "Streams", "streams_in_use"]

accelerator: Any = torch.accelerator


def streams_in_use() -> Streams | None:
    """Return what notes the streams of ops; None if no accelerator is in use."""
    module = _device_module()
    return Streams() if module is not None and module.is_initialized() else None


@functools.cache
def _device_module() -> Any:
    """Return the module of the accelerator that PyTorch was built for, if it has streams."""
    device = accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    return module if hasattr(module, "is_initialized") and hasattr(module, "stream") else None


class Streams:
    """The streams that the ops of a region ran on."""

    def __init__(self) -> None:
        self._first: dict[torch.device, Any] = {}  # the stream of most ops, by device
        self._others: list[Any] = []

    @property
    def are_several(self) -> bool:
        return bool(self._others)

    def bound(self, call: Callable[..., Any], out: Any) -> Callable[..., Any]:
        """Return a function that calls an op on the stream on which it has just run."""
        device = next((t.device for t in flat(out) if isinstance(t, Tensor)), _CPU)
        if device.type == accelerator.current_accelerator().type:
            stream = accelerator.current_stream(device)
            if self._first.setdefault(device, stream) != stream:
                if stream not in self._others:
                    self._others.append(stream)
                return functools.partial(_call_on, stream, call)
        return call

    def wait(self) -> None:
        """Let the current streams wait for all that was done on the streams of the region."""
        for stream in (*self._first.values(), *self._others):
            current = accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)

    def ready(self) -> StreamEvents:
        return StreamEvents([accelerator.current_stream(device) for device in self._first])


class StreamEvents:
    """What a replay has computed is there when its streams have come this far."""

    def __init__(self, streams: list[Any]) -> None:
        self._events = [(stream, stream.record_event()) for stream in streams]

    def wait(self, tensor: Tensor | None = None) -> None:
        """Let the current streams wait until all is there, and keep a tensor for as long."""
        for stream, event in self._events:
            current = accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_event(event)
                if tensor is not None and tensor.device == stream.device:
                    tensor.record_stream(current)


def _call_on(stream: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an op on a stream, after what the current one does, and before what it does next."""
    current = accelerator.current_stream(stream.device)
    if current == stream:
        return call(*args, **kwargs)
    stream.wait_stream(current)
    with _current(stream, current):
        out = call(*args, **kwargs)
    current.wait_stream(stream)
    for tensor in flat(out):
        if isinstance(tensor, Tensor):
            tensor.record_stream(current)  # it is used there, and was allocated for the other
    return out


@contextmanager
def _current(stream: Any, outer: Any) -> Iterator[None]:
    device = accelerator.current_device_index()
    accelerator.set_stream(stream)  # which changes the device, too
    try:
        yield
    finally:
        accelerator.set_stream(outer)
        accelerator.set_device_index(device)


_CPU = torch.device("cpu")
