"""Plain operands of recorded ops: they are not traced, and the program may write to them.

NumPy does not report writes to an array. So a small array is copied when an op reads it, and of a
large one a checksum is kept: if it is another one when the op is run again, that is an error. An
array that cannot be written to is held as it is.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import numpy as np

from ....errors import ModifiedInputError
from ....sizes import format_bytes
from ..views import Chain

__all__ = ["SMALL", "Constant", "Constants", "UnknownOperandError", "decode"]

SMALL = 1 << 16  # bytes that are copied; of more, a checksum is kept
_TINY = 1 << 10  # bytes that are copied without a look at earlier copies
_WORD = np.dtype(np.uint64)
_ROW = 512
# Odd numbers without a pattern: any exchange of two entries of a row changes the sum.
_WEIGHTS = (np.arange(1, 2 * _ROW, 2, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)

_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), slice, type(...), type, range),
    *(np.generic, np.dtype, Chain),
)


class UnknownOperandError(Exception):
    """An operand of a kind that cannot be held as it is now."""


class Constant:
    """A plain array as it was when an op read it."""

    __slots__ = ("_array", "_checksum", "op")

    def __init__(self, array: Any, op: str) -> None:
        self.op = op
        self._checksum: bytes | None = None
        if not _may_be_written(array):
            self._array = array
        elif array.nbytes <= SMALL:
            self._array = array.copy(order="K")
        else:
            self._array, self._checksum = array, checksum(array)

    def array(self) -> Any:
        """Return the array; raise if it is not what it was."""
        if self._checksum is not None and checksum(self._array) != self._checksum:
            shape, size = self._array.shape, format_bytes(self._array.nbytes)
            raise ModifiedInputError(
                f"a plain array of shape {shape} ({size}) that {self.op} has read inside of a "
                "checkpointed region was changed in place since: the gradient would be wrong. "
                "Write c = c + 1 instead of c += 1, or let the op read a copy"
            )
        return self._array

    def is_still(self, array: Any) -> bool:
        """Return whether an array has the bytes of this one."""
        if self._checksum is not None:
            return self._array is array and checksum(array) == self._checksum
        same = self._array.shape == array.shape and self._array.strides == array.strides
        return same and _same_bytes(self._array, array)


class Constants:
    """The plain operands of a region: what is read again unchanged is held once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Constant]] = {}

    def encode(self, operand: Any, op: str, found: dict[int, Any]) -> Any:
        """Return an operand with constants in place of its arrays; `decode` undoes that.

        `found` gets the constants, by the ids of the arrays.
        """
        kind = type(operand)
        if kind is np.ndarray:
            constant = found[id(operand)] = self._constant(operand, op)
            return constant
        if kind is tuple or kind is list:
            return kind(self.encode(part, op, found) for part in operand)
        if kind is dict:
            return {key: self.encode(part, op, found) for key, part in operand.items()}
        if isinstance(operand, _ATOMS):
            return operand
        raise UnknownOperandError(f"an operand of type {kind.__name__}")

    def kept(self, operand: Any) -> Any:
        """Return an operand with copies in place of small arrays that may be written to."""
        kind = type(operand)
        if kind is np.ndarray:
            if operand.nbytes > SMALL or operand.dtype.hasobject:
                return operand
            tiny = operand.nbytes <= _TINY
            return operand.copy(order="K") if tiny else self._constant(operand, "").array()
        if kind is tuple or kind is list:
            return kind(map(self.kept, operand))
        if kind is dict:
            return {key: self.kept(part) for key, part in operand.items()}
        return operand

    def _constant(self, array: Any, op: str) -> Constant:
        if array.dtype.hasobject:
            raise UnknownOperandError("an array of objects")
        found = self._known.get(id(array))
        if found is not None and found[0]() is array and found[1].is_still(array):
            return found[1]
        constant = Constant(array, op)
        self._known[id(array)] = weakref.ref(array), constant
        return constant


def decode(operand: Any) -> Any:
    """Return an operand with arrays in place of constants."""
    kind = type(operand)
    if kind is Constant:
        return operand.array()
    if kind is tuple or kind is list:
        return kind(map(decode, operand))
    if kind is dict:
        return {key: decode(part) for key, part in operand.items()}
    return operand


def checksum(array: Any) -> bytes:
    """Return a few bytes that change with the bytes of an array."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = data.size // (8 * _ROW) * (8 * _ROW)
    digest = hashlib.blake2b(data[whole:].tobytes(), digest_size=16)
    if whole:
        rows = np.dot(data[:whole].view(np.uint64).reshape(-1, _ROW), _WEIGHTS)
        digest.update(rows.tobytes())
    return digest.digest()


def _same_bytes(one: Any, other: Any) -> bool:
    if one.itemsize == _WORD.itemsize and one.ndim and one.flags.c_contiguous:
        return bool((one.view(_WORD) == other.view(_WORD)).all())  # without a copy
    return bool(one.tobytes() == other.tobytes())


def _may_be_written(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return True
        array = array.base
    return array is not None  # memory of another library, which may write to it
