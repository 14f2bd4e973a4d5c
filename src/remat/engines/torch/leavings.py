"""What closed regions left to the program, and later ones take as inputs.

If autograd will ask a region for its own output, the next region that starts from it can hand it
back: it holds it anyway, until its backward pass is over.
"""

from __future__ import annotations

from collections import deque
from weakref import ref

from torch import Tensor

from .records import State
from .regions import Handle, Region

__all__ = ["Leavings"]

_LATELY = 100  # regions, among which the one that made an input is sought
_MANY = 200  # notes, before it is worth a look which of them are of no use any more


class Leavings:
    """Finds the handles of what the regions of a thread left to the program."""

    def __init__(self) -> None:
        self.regions: deque[ref[Region]] = deque(maxlen=_LATELY)  # that were closed since
        self._handles: dict[int, list[ref[Handle]]] = {}  # by the notes of their states
        self._many = _MANY

    def heirs(self, tensor: Tensor, note: int) -> tuple[ref[Handle], ...]:
        """Return the handles of what a tensor is, if its storage carries this note."""
        if self.regions:
            self._look()
        stride = None if tensor.is_contiguous() else tensor.stride()
        return tuple(
            reference
            for reference in self._handles.get(note, ())
            if (handle := reference()) is not None
            and handle.stride == stride
            and _is_still(tensor, handle.state)
        )

    def _look(self) -> None:
        """Look for what is left of the regions that were closed since."""
        for reference_to_region in self.regions:
            region = reference_to_region()
            for reference in () if region is None else region.all_handles:
                state = None if (handle := reference()) is None else handle.piece
                if type(state) is State and state.tensor() is not None:
                    self._handles.setdefault(state.note, []).append(reference)
        self.regions.clear()
        if len(self._handles) > self._many:
            for note, found in list(self._handles.items()):
                if not any((h := r()) is not None and h.state.tensor() is not None for r in found):
                    del self._handles[note]
            self._many = max(_MANY, 2 * len(self._handles))


def _is_still(tensor: Tensor, state: State) -> bool:
    """Return whether a tensor is what it was when it was made with a state, strides apart."""
    made = state
    while made.op is not None and made.argument is not None:
        made = made.op.overwritten(made.argument)  # a write changes no layout
    return (
        state.tensor() is tensor
        and state.version == tensor._version
        and tensor.shape == made.size
        and tensor.dtype is made.dtype
        and not (tensor.storage_offset() or tensor.is_conj() or tensor.is_neg())
    )
