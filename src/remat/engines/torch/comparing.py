"""Comparing tensors bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...loops.differences import same_object

__all__ = ["difference_of"]


def difference_of(one: Any, other: Any) -> str | None:
    """Compare bit for bit: NaNs are equal to themselves, 0.0 is not -0.0."""
    if one is other:
        return None
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        same = same_object(one, other, _same_tensor)
        return None if same else f"is {one!r} instead of {other!r}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return (
            f"is {one.dtype} of shape {tuple(one.shape)} instead of {other.dtype} of shape "
            f"{tuple(other.shape)}"
        )
    if torch.equal(_bits(one), _bits(other)):
        return None
    wrong = one != other
    count = int(wrong.sum())
    if not count:
        return "differs in the sign of a zero"
    wide = torch.complex128 if one.is_complex() else torch.float64
    largest = float((one.to(wide) - other.to(wide)).abs().max())
    return f"differs in {count} of {one.numel()} entries, by up to {largest:.3g}"


def _same_tensor(one: Any, other: Any) -> bool | None:
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return difference_of(one, other) is None if are_tensors else None


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """Look at a tensor as integers, without a copy."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return tensor
    return tensor.resolve_neg().view(_INTEGERS[tensor.element_size()])
