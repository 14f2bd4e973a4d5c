"""Reuse of region outputs.

If region A needs its own output in backward and region B saved it as an input, B lends it to A and
A does not recompute it.
"""

from __future__ import annotations

from collections import deque
from weakref import ref

from torch import Tensor

from ...core.records import Value
from ...core.region import Region, SavedTensor

__all__ = ["OutputReuse"]

_LATELY = 100  # closed regions that are searched for the producer of an input
_MANY = 200  # entries, before dead ones are removed


class OutputReuse:
    """Finds saved tensors of closed regions by the tensor that the region returned."""

    def __init__(self) -> None:
        self._closed: deque[ref[Region]] = deque(maxlen=_LATELY)
        self._saved: dict[int, list[ref[SavedTensor]]] = {}  # by the note of their value
        self._many = _MANY

    def closed(self, region: Region) -> None:
        self._closed.append(ref(region))

    def users_of(self, tensor: Tensor, note: int) -> tuple[ref[SavedTensor], ...]:
        """Return the saved tensors that are equal to a tensor whose storage carries this note."""
        if self._closed:
            self._add_closed()
        stride = None if tensor.is_contiguous() else tensor.stride()
        return tuple(
            reference
            for reference in self._saved.get(note, ())
            if (saved := reference()) is not None
            and saved.stride == stride
            and _is_unchanged(tensor, saved.value)
        )

    def _add_closed(self) -> None:
        """Add the saved tensors of the regions that were closed since the last call."""
        for closed in self._closed:
            region = closed()
            for reference in () if region is None else region.saved:
                value = None if (saved := reference()) is None else saved.operand
                if type(value) is Value and value.tensor() is not None:
                    self._saved.setdefault(value.note, []).append(reference)
        self._closed.clear()
        if len(self._saved) > self._many:
            for note, found in list(self._saved.items()):
                if not any((s := r()) is not None and s.value.tensor() is not None for r in found):
                    del self._saved[note]
            self._many = max(_MANY, 2 * len(self._saved))


def _is_unchanged(tensor: Tensor, value: Value) -> bool:
    """Return whether a tensor is the unmodified original of a value, strides aside."""
    made = value
    while made.op is not None and made.argument is not None:
        made = made.op.overwritten(made.argument)  # a write does not change the geometry
    return (
        value.tensor() is tensor
        and value.version == tensor._version
        and tensor.shape == made.size
        and tensor.dtype is made.dtype
        and not (tensor.storage_offset() or tensor.is_conj() or tensor.is_neg())
    )
