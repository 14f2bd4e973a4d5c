"""What stores have to know of tensors: their bytes, their layout, how to round them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...stores import Narrow, overflow_error
from .backend import is_functorch_tensor

__all__ = ["TensorKind", "TorchArrays"]

_BLOCK = 1 << 18  # numbers that are rounded at once: their temporaries stay small
_NARROW: dict[Narrow, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class TensorKind:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]  # the axes, from the longest stride to the shortest
    device: torch.device


class TorchArrays:
    """Tells stores about tensors. What comes back is detached: gradients are the engine's matter.

    A leaf is a plain tensor with memory of its own kind; others (sparse, quantized, of a subclass,
    without memory) have no kind, and stores keep them as they are.
    """

    def nbytes(self, leaf: Any) -> int:
        if not isinstance(leaf, Tensor):
            return 0
        return leaf.numel() * leaf.element_size() if _has_plain_memory(leaf) else _weigh(leaf)

    def copied(self, leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    def kind(self, leaf: Any) -> TensorKind | None:
        if not isinstance(leaf, Tensor) or not _has_plain_memory(leaf):
            return None
        strides = leaf.stride()
        order = tuple(sorted(range(leaf.ndim), key=lambda axis: -strides[axis]))
        return TensorKind(leaf.dtype, tuple(leaf.shape), order, leaf.device)

    def narrowed(self, leaf: Any, dtype: Narrow) -> tuple[Any, float]:
        kind = self.kind(leaf)
        if kind is None or not _is_wider(kind.dtype):
            return leaf, 0.0
        numbers = _real(_flat(leaf, kind))
        narrow = torch.empty(numbers.numel(), dtype=_NARROW[dtype], device=kind.device)
        blocks = zip(numbers.split(_BLOCK), narrow.split(_BLOCK), strict=True)
        errors = [_round(*block) for block in blocks if numbers.numel()]
        error = float(torch.stack(errors).max()) if errors else 0.0
        if math.isinf(error):
            raise overflow_error(_largest_finite(numbers), dtype)
        return narrow, error

    def widened(self, narrow: Any, kind: TensorKind) -> Any:
        numbers = narrow.to(kind.dtype.to_real())
        if kind.dtype.is_complex:
            numbers = torch.view_as_complex(numbers.view(-1, 2))
        return _shaped(numbers, kind)

    def to_bytes(self, leaf: Any) -> memoryview:
        kind = self.kind(leaf)
        assert kind is not None
        flat = _flat(leaf, kind).cpu()
        return flat.view(torch.uint8).numpy().data

    def from_bytes(self, data: bytearray | memoryview, kind: TensorKind) -> Any:
        if not len(data):  # (torch makes no tensor of nothing)
            flat = torch.empty(0, dtype=kind.dtype, device=kind.device)
        else:
            flat = torch.frombuffer(data, dtype=torch.uint8).view(kind.dtype).to(kind.device)
        return _shaped(flat, kind)


def _has_plain_memory(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and not is_functorch_tensor(tensor)
    )


def _weigh(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # sparse, or of vmap: memory in parts, or none
        return 0


def _flat(leaf: Tensor, kind: TensorKind) -> Tensor:
    """Return the numbers in the order in which they lie in memory; a copy if there are gaps."""
    dense = leaf.detach().resolve_conj().resolve_neg().permute(kind.order).contiguous()
    # (A view might keep the stride of an axis with one entry or none, which may be anything.)
    return dense.as_strided((dense.numel(),), (1,))


def _shaped(flat: Tensor, kind: TensorKind) -> Tensor:
    places = [kind.order.index(axis) for axis in range(len(kind.order))]
    return flat.view([kind.shape[axis] for axis in kind.order]).permute(places)


def _is_wider(dtype: torch.dtype) -> bool:
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    return dtype.to_real().itemsize > 2


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


# -- rounding ----------------------------------------------------------------------------------


def _round(exact: Tensor, narrow: Tensor) -> Tensor:
    """Round numbers into `narrow`; return the largest error, infinite if one became infinite."""
    narrow.copy_(_to_odd_float32(exact) if exact.dtype == torch.float64 else exact)
    error = exact - narrow
    # A NaN, and an infinity that stays one, have an error of NaN: they count for nothing.
    return error.abs_().nan_to_num_(nan=0.0, posinf=torch.inf).max()


def _to_odd_float32(exact: Tensor) -> Tensor:
    """Round float64 to float32 so that rounding once more gives what rounding once would.

    Torch goes to two bytes by way of float32, and what the first rounding moves to the middle
    between two narrow numbers, the second may move to the wrong side. If the first cuts off, and
    sets the last bit where something was lost, the middle is only reached by what is the middle.
    """
    single = exact.to(torch.float32)
    back = single.to(torch.float64)
    bits = single.view(torch.int32)  # the sign stands for itself: one less is a lower magnitude
    bits -= (back.abs() > exact.abs()).int()
    bits |= (back != exact).int()
    return single


def _largest_finite(numbers: Tensor) -> float:
    finite = numbers[numbers.isfinite()]
    return float(finite[finite.abs().argmax()])
