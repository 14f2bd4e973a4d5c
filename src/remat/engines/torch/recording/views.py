"""Ops that read and write no data: views, and changes of shape in place. They are not recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....core.records import Value, no_tensor
from ..backend import count_function_modes
from ..memory.tensors import EXACT_TYPES, share_a_counter, version_of
from ..memory.values import note_views
from ..retention import hold_old_shape
from ..schema import SchemaTraits
from .storages import StorageTable

__all__ = ["run_view"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def run_view(table: StorageTable, traits: SchemaTraits, args: Args, kwargs: Kwargs) -> Any:
    """Run an op that reads and writes no data."""
    tensor: Tensor = args[0]
    if not isinstance(tensor, Tensor):
        # A scalar that autograd has saved as a tensor arrives here as a Python number.
        dtype = torch.complex128 if isinstance(tensor, complex) else torch.float64
        return traits.call(torch.tensor(tensor, dtype=dtype), *args[1:], **kwargs)
    value = table.seen(tensor)
    if traits.reshapes_in_place:
        return _reshape(table, traits, value, args, kwargs)
    if value is not None:
        note_views(value)
    if type(tensor) in EXACT_TYPES and not kwargs and not count_function_modes():
        return traits.fast_call(*args)
    return traits.call(*args, **kwargs)


def _reshape(
    table: StorageTable, traits: SchemaTraits, value: Value | None, args: Args, kwargs: Kwargs
) -> Any:
    """Run an op that changes the shape of a tensor in place."""
    tensor: Tensor = args[0]
    members = [] if value is None else value.with_aliases()
    for member in members:
        held = member.held
        if held is not None and held.tensor is tensor:  # a parameter: keep its old shape
            table.parameters.pop(id(tensor), None)
            hold_old_shape(held)
    out = traits.call(*args, **kwargs)
    for member in members:
        # No data changes, but the version counter does, also that of tensors which share it.
        made, held = member.tensor(), member.held
        if made is None or share_a_counter(tensor, made):
            member.version += 1
        if (
            held is not None
            and version_of(held.tensor) == held.version
            and share_a_counter(tensor, held.tensor)
        ):
            held.version += 1
        member.tensor = no_tensor
    return out
