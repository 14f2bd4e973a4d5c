"""Bytes that the backward of an op allocates for itself: temporaries of its derivative formula.

The gradient of `x ** 2` is `grad * (2 * x)`: in between, one more tensor of the size of `x` is
alive than the gradients. Such bytes are found by running the op and its backward once on meta
tensors, which have shapes but no data.

Some kernels allocate besides, which no tensor shows: `kernel_workspace`.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.meter import Meter
from ...core.records import Op, Value, View
from ...core.tracing import BackwardCost
from .adapter import TORCH
from .memory.tensors import flat, is_plain
from .modes import ObservingMode
from .schema import SchemaTraits

__all__ = [
    "Call",
    "call_of",
    "is_known",
    "kernel_workspace",
    "known_backward",
    "measure_workspace",
]

_MANY = 4096


_known: dict[Hashable, BackwardCost] = {}


class Call(NamedTuple):
    """A call of an op on meta tensors."""

    func: Any
    args: list[Any]
    keywords: dict[str, Any]


def call_of(op: Op) -> Call | None:
    """Return the call of an op with meta tensors in place of operands.

    None for tensors that are not strided, and for ops outside of PyTorch: their derivatives may be
    Python code, which must not run for the sake of a measurement.
    """
    if getattr(op.traits.func, "namespace", "") != "aten":
        return None
    if any((tensor := value.tensor()) is not None and not is_plain(tensor) for value in op.reads):
        return None
    keywords = {name: _meta(part) for name, part in (op.keywords or {}).items()}
    return Call(op.traits.func, [_meta(part) for part in op.args], keywords)


def _meta(part: Any) -> Any:
    if type(part) is list:
        return [_meta(each) for each in part]
    if type(part) is View:
        return _empty(part.geometry.size, part.geometry.stride, part.geometry.dtype)
    if type(part) is not Value:
        return part
    tensor = part.tensor()
    if tensor is not None:
        return _empty(tensor.shape, tensor.stride(), tensor.dtype)
    return torch.empty(part.size, dtype=part.dtype, device="meta")


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def known_backward(key: Hashable) -> BackwardCost:
    """Return what the backward of a kind of op takes, as far as it was measured."""
    return _known.get(key, _UNKNOWN)


def is_known(key: Hashable) -> bool:
    """Return whether a kind of op was measured."""
    return key in _known


_UNKNOWN = BackwardCost()


def measure_workspace(calls: Mapping[Any, Call]) -> None:
    """Measure the bytes of several kinds of ops.

    In a thread of its own: no mode, hook or grad mode of the program is active there, whether this
    is called in a forward or in a backward pass.
    """
    if not calls:
        return
    if len(_known) > _MANY:
        _known.clear()
    thread = threading.Thread(target=_measure_all, args=(calls,), name="remat-workspace")
    thread.start()
    thread.join()


def _measure_all(calls: Mapping[Any, Call]) -> None:
    for key, call in calls.items():
        _known[key] = _UNKNOWN
        # Not every op runs on meta tensors, or has a derivative.
        with suppress(Exception):
            _known[key] = _measure(call)


def _measure(call: Call) -> BackwardCost:
    """Run an op and its backward."""
    leaves: list[Tensor] = []
    args = [_with_grad(part, leaves) for part in call.args]
    keywords = {name: _with_grad(part, leaves) for name, part in call.keywords.items()}
    outputs = [
        out
        for out in flat(call.func(*args, **keywords))
        if isinstance(out, Tensor) and out.requires_grad
    ]
    grads = [torch.empty_like(out) for out in outputs]
    metering = _Metering()
    with metering:
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    results = Meter()
    for gradient in found:
        if gradient is not None and metering.meter.has(TORCH.memory(gradient)):
            results.add(TORCH.memory(gradient))
    return BackwardCost(
        max(0, metering.meter.peak - results.live),
        len(found) == 1
        and found[0] is not None
        and found[0].untyped_storage().nbytes() < found[0].nbytes,
    )


def _with_grad(part: Any, leaves: list[Tensor]) -> Any:
    """Return an argument as the result of an op, so that it can be written to."""
    if type(part) is list:
        return [_with_grad(each, leaves) for each in part]
    if not isinstance(part, Tensor) or not part.dtype.is_floating_point:
        return part
    leaves.append(part.requires_grad_())
    return part.clone()


class _Metering(ObservingMode):
    """Counts what ops allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def ran(
        self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        for tensor in flat(out) if traits.makes_memory else ():
            if isinstance(tensor, Tensor):
                self.meter.add(TORCH.memory(tensor))


# -- kernels on the CPU ----------------------------------------------------------------------------

_CONVOLUTION: Any = torch.ops.aten.convolution.default
_BATCH_NORM: Any = torch.ops.aten.native_batch_norm.default
_BLOCK = 16  # channels
_ONEDNN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_workspace(op: Op, result: Tensor, *, needs_gradient: bool) -> int:
    """Return about the bytes that the kernel of the backward of an op allocates on the CPU.

    `needs_gradient` tells whether the first thing that it reads has a gradient. What kernels take
    on other devices is not known.
    """
    if result.device.type != "cpu":
        return 0
    if op.traits.func is _BATCH_NORM:
        return result.nbytes if needs_gradient else 0
    return _convolution_workspace(op, result) if op.traits.func is _CONVOLUTION else 0


def _convolution_workspace(op: Op, result: Tensor) -> int:
    """Return the bytes that the backward of a convolution allocates.

    oneDNN copies what is convolved and the gradient into blocks of channels, unless the channels
    come last already. What it does not take is unfolded into columns.
    """
    size, kernel = _size_of(op.args[0]), _size_of(op.args[1])
    if not result.is_contiguous() or not kernel[2:]:
        return 0
    stride, is_transposed, groups = op.args[3], op.args[6], op.args[8]
    if prod(kernel[2:]) == prod(stride) == 1 and not is_transposed:
        return 0
    if not _takes_onednn(result.dtype, size, kernel, groups):
        spatial = size[2:] if is_transposed else result.shape[2:]
        channels = result.shape[1] if is_transposed else size[1]
        return result.element_size() * size[0] * channels * prod(kernel[2:]) * prod(spatial)
    return result.element_size() * (_blocked(size) + _blocked(result.shape) + _blocked(kernel))


def _takes_onednn(
    dtype: torch.dtype, size: Sequence[int], kernel: Sequence[int], groups: int
) -> bool:
    """Return whether PyTorch gives a convolution to oneDNN: not if it is tiny, or of doubles."""
    if dtype not in _ONEDNN_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return size[0] > 1 or groups > 1 or min(kernel[2:]) > 3 or prod(size) > _TINY


_TINY = 20480  # elements


def _blocked(size: Sequence[int]) -> int:
    """Return the elements of a tensor whose channels are filled up to whole blocks."""
    return prod(size) // max(size[1], 1) * (-(-size[1] // _BLOCK) * _BLOCK)


def _size_of(operand: Any) -> Sequence[int]:
    if type(operand) is View:
        return operand.geometry.size
    size: Sequence[int] = operand.size
    tensor = operand.tensor()
    return size if tensor is None else tensor.shape
