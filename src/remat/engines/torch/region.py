"""Regions and saved tensors of PyTorch: what autograd adds to those of the core.

Autograd gets a `TorchSavedTensor` for every tensor that it saves inside a region. A custom Function
must get leaves back as they are. Ops are replayed on the streams on which they ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...core import region
from ...core.records import Operand, Value
from ...core.retention import Retention
from ...errors import UnsupportedError
from .adapter import TORCH
from .backend import count_function_modes, is_custom_function_in_backward, without_function_modes
from .retention import fetch
from .streams import Streams

__all__ = ["TorchRegion", "TorchSavedTensor", "unpack"]


class TorchSavedTensor(region.SavedTensor):
    """The placeholder that autograd holds instead of a tensor."""

    __slots__ = ()

    region: TorchRegion
    # `remark`: `_LEAF` if its tensor is the very leaf, for a custom Function; or, in words, what a
    # custom Function would miss of the tensor.

    def keep_leaf(self, tensor: Tensor) -> None:
        """Keep a leaf as autograd would: the same object, with its class and attributes.

        A custom Function that has saved it gets it: its backward may write to it.
        """
        if not tensor.is_inference():
            self.receive(tensor, is_kept=True)
            self.remark = _LEAF

    def take_otherwise(self) -> Tensor | None:
        if self.remark is not _LEAF:
            if is_custom_function_in_backward():
                raise _loses(self.remark)
            return None
        if not self.value.origin.is_external or is_custom_function_in_backward():
            return None
        # An op of PyTorch gets what is held of the leaf, which may be a copy, and is checked.
        if self.region.observer is not None:
            self.region.observer.used(self)
        tensor: Tensor = self._take_from_value()
        return tensor


_LEAF = object()


def _loses(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"a custom autograd.Function saves a non-leaf tensor inside of a checkpointed region; "
        f"PyTorch's saved-tensor hooks lose {what}. Save a plain tensor "
        "(tensor.as_subclass(torch.Tensor)) and keep the rest on ctx, or call the function "
        "outside of the region"
    )


def unpack(packed: TorchSavedTensor | Value) -> Tensor:
    """Return the tensor of a saved tensor: the unpack hook."""
    return fetch(packed) if type(packed) is Value else packed.take()


class TorchRegion(region.Region):
    """A part of a program whose activations are recomputed together."""

    engine = TORCH
    saved_tensor = TorchSavedTensor

    has_own_hooks = False  # because the program has set hooks inside its parent
    streams: Streams | None = None  # that its ops ran on

    def __init__(
        self,
        name: str = "",
        *,
        preserve_rng_state: bool = True,
        retention: Retention | None = None,
    ) -> None:
        super().__init__(name, retention=retention)
        self.preserve_rng_state = preserve_rng_state
        self._dtype = torch.get_default_dtype()

    def _compute(self, wanted: list[Operand]) -> list[Tensor]:
        if torch.get_default_dtype() is self._dtype and not count_function_modes():
            return self._compute_on_streams(wanted)
        # Some ops depend on the default dtype. Function modes have seen these ops in forward.
        with _default_dtype(self._dtype), without_function_modes():
            return self._compute_on_streams(wanted)

    def _compute_on_streams(self, wanted: list[Operand]) -> list[Tensor]:
        if self.streams is None or not self.streams.are_several:
            return super()._compute(wanted)
        self.streams.wait()
        if self.ready is not None:
            self.ready.wait()
        tensors = super()._compute(wanted)
        self.ready = self.streams.ready()
        return tensors


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
