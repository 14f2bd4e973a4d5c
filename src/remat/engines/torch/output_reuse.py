"""Reuse of region outputs.

If region A needs its own output in backward and region B saved it as an input, B lends it to A and
A does not recompute it.
"""

from __future__ import annotations

from collections import deque
from weakref import ref

from torch import Tensor

from .memory.records import Value
from .region import Region, SavedTensor

__all__ = ["OutputReuse"]

_LATELY = 100  # regions, among which the one that made an input is sought
_MANY = 200  # notes, before it is worth a look which of them are of no use any more


class OutputReuse:
    """Finds the saved tensors of what the closed regions of a thread gave to the program."""

    def __init__(self) -> None:
        self._closed: deque[ref[Region]] = deque(maxlen=_LATELY)
        self._saved: dict[int, list[ref[SavedTensor]]] = {}  # by the notes of their values
        self._many = _MANY

    def closed(self, region: Region) -> None:
        self._closed.append(ref(region))

    def users_of(self, tensor: Tensor, note: int) -> tuple[ref[SavedTensor], ...]:
        """Return the saved tensors of what a tensor is, if its storage carries this note."""
        if self._closed:
            self._look()
        stride = None if tensor.is_contiguous() else tensor.stride()
        return tuple(
            reference
            for reference in self._saved.get(note, ())
            if (saved := reference()) is not None
            and saved.stride == stride
            and _is_unchanged(tensor, saved.value)
        )

    def _look(self) -> None:
        """Look for what is left of the regions that were closed since."""
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
    """Return whether a tensor is what it was when it was made with a value, strides apart."""
    made = value
    while made.op is not None and made.argument is not None:
        made = made.op.overwritten(made.argument)  # a write changes no layout
    return (
        value.tensor() is tensor
        and value.version == tensor._version
        and tensor.shape == made.size
        and tensor.dtype is made.dtype
        and not (tensor.storage_offset() or tensor.is_conj() or tensor.is_neg())
    )
