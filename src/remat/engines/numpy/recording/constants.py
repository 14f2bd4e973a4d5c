"""Plain operands of recorded ops: they are not traced, and the program may write to them.

NumPy does not report writes to an array. So a small array is copied when an op reads it, and of a
large one a checksum is kept: if it is another one in backward, that is an error. An array that
cannot be written to is held as it is.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ....errors import ModifiedInputError
from ....sizes import format_bytes
from ..source_location import location_of_caller
from ..views import ViewChain

__all__ = [
    "SMALL",
    "Constant",
    "Constants",
    "UnknownOperandError",
    "check_again",
    "checked_once",
    "constants_in",
    "decode",
]

SMALL = 1 << 16  # bytes that are copied; of more, a checksum is kept
_TINY = 1 << 10  # bytes that are copied without a look at earlier copies
_WORD = np.dtype(np.uint64)
_HALF = np.uint64(32)
_ROW = 512  # words
_BLOCK = 64  # rows that are looked at together: they stay in the cache
# Odd numbers without a pattern, one for each place in a row.
_FACTORS = np.arange(1, 2 * _ROW, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), slice, type(...), type, range),
    *(np.generic, np.dtype, ViewChain),
)


class UnknownOperandError(Exception):
    """An operand of a kind that cannot be held as it is now."""


class Constant:
    """A plain array as it was when an op read it."""

    __slots__ = ("__weakref__", "_array", "_checksum", "_place", "op")

    def __init__(self, array: Any, op: str, checksum: bytes | None = None) -> None:
        self.op = op
        self._checksum = checksum  # of a large array that may be written to
        self._place = "" if checksum is None else location_of_caller()
        is_copied = checksum is None and _may_be_written(array)
        self._array = _copy_of(array) if is_copied else array

    def array(self) -> Any:
        """Return the array; raise if it is not what it was. A backward pass looks once."""
        if self._checksum is None or self in _passes.checked:
            return self._array
        if checksum_of(self._array) != self._checksum:
            shape, size = self._array.shape, format_bytes(self._array.nbytes)
            raise ModifiedInputError(
                f"a plain array of shape {shape} ({size}) that {self.op} has read ({self._place}) "
                "was changed in place since: the gradient would be wrong. Write c = c + 1 instead "
                "of c += 1, or let the op read a copy"
            )
        if _passes.is_open:
            _passes.checked.add(self)
        return self._array

    def is_still(self, array: Any, checksum: bytes | None) -> bool:
        """Return whether an array, with its checksum if it is large, has the bytes of this one."""
        if checksum is not None or self._checksum is not None:
            return self._array is array and self._checksum == checksum
        same = self._array.shape == array.shape and self._array.strides == array.strides
        return same and _same_bytes(self._array, array)

    @property
    def nbytes(self) -> int:
        return int(self._array.nbytes)

    @property
    def is_alone(self) -> bool:
        """Whether nothing else refers to the array, nor to what it is a view of."""
        return self.references() <= (_OWNER if self._array.base is None else _VIEW).references()

    def references(self) -> tuple[int, int]:
        """Count references. Only comparisons mean anything."""
        of_base = sys.getrefcount(self._array.base) if self._array.base is not None else 0
        return of_base, sys.getrefcount(self._array)


class _CheckedPasses(threading.local):
    """The backward pass that runs: nobody writes to plain arrays in the meantime."""

    def __init__(self) -> None:
        self.is_open = False
        self.checked: weakref.WeakSet[Constant] = weakref.WeakSet()  # in this pass


_passes = _CheckedPasses()


@contextmanager
def checked_once() -> Iterator[None]:
    """Look at each plain array once, in a backward pass."""
    before = _passes.is_open, _passes.checked
    _passes.is_open, _passes.checked = True, weakref.WeakSet()
    try:
        yield
    finally:
        _passes.is_open, _passes.checked = before


def check_again() -> None:
    """Forget what was looked at: the program runs inside of a backward pass, and may write."""
    _passes.checked.clear()


class Constants:
    """The plain operands of a region: what is read again unchanged is held once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, weakref.ref[Constant]]] = {}
        self._copies: dict[int, Constant] = {}

    def encode(self, operand: Any, op: str, found: dict[int, Any]) -> Any:
        """Return an operand with constants in place of its arrays; `decode` undoes that.

        `found` gets the constants, by the ids of the arrays.
        """
        kind = type(operand)
        if isinstance(operand, np.ndarray):
            constant = found[id(operand)] = self._constant(operand, op)
            return constant
        if kind is tuple or kind is list:
            return kind(self.encode(part, op, found) for part in operand)
        if kind is dict:
            return {key: self.encode(part, op, found) for key, part in operand.items()}
        if isinstance(operand, _ATOMS):
            return operand
        raise UnknownOperandError(f"an operand of type {kind.__name__}")

    def kept(self, operand: Any, op: str, large: dict[int, Constant]) -> Any:
        """Return an operand with copies in place of small arrays that may be written to.

        `large` gets those that are not copied, by their ids.
        """
        kind = type(operand)
        if isinstance(operand, np.ndarray):
            return self._kept_array(operand, op, large)
        if kind is tuple or kind is list:
            return kind(self.kept(part, op, large) for part in operand)
        if kind is dict:
            return {key: self.kept(part, op, large) for key, part in operand.items()}
        return operand

    def _kept_array(self, array: Any, op: str, large: dict[int, Constant]) -> Any:
        if array.dtype.hasobject:
            return array
        size = _span(array)
        if size <= _TINY:
            return _copy_of(array)
        constant = self._constant(array, op)
        if size > SMALL:
            large[id(array)] = constant
            return array
        self._copies[id(constant)] = constant  # for the next op that reads the same
        return constant.array()

    def _constant(self, array: Any, op: str) -> Constant:
        if array.dtype.hasobject:
            raise UnknownOperandError("an array of objects")
        is_large = _span(array) > SMALL and _may_be_written(array)
        checksum = checksum_of(array) if is_large else None
        reference, known = self._known.get(id(array), (None, None))
        if reference is not None and known is not None and reference() is array:
            constant = known()
            if constant is not None and constant.is_still(array, checksum):
                return constant
        constant = Constant(array, op, checksum)
        self._known[id(array)] = weakref.ref(array), weakref.ref(constant)
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


def constants_in(operand: Any) -> Iterator[Constant]:
    """Yield the constants that stand for the arrays of an operand."""
    kind = type(operand)
    if kind is Constant:
        yield operand
    elif kind is tuple or kind is list:
        for part in operand:
            yield from constants_in(part)
    elif kind is dict:
        yield from constants_in(list(operand.values()))


def checksum_of(array: Any) -> bytes:
    """Return a few bytes that change with the bytes of an array. It reads 1 MB in 0.1 ms.

    Each word is multiplied by a number of its place, and the upper halves are added up. A plain sum
    would not do: changes of sign cancel out in it, and so do exchanges.
    """
    rows, rest = _words(array)
    digest = hashlib.blake2b(rest, digest_size=16)
    for start in range(0, len(rows), _BLOCK):
        products = rows[start : start + _BLOCK] * _FACTORS
        products >>= _HALF
        digest.update(np.add.reduce(products, axis=1).tobytes())
    return digest.digest()


def _words(array: Any) -> tuple[Any, bytes]:
    """Return the bytes of an array, each once, as rows of words, and the rest."""
    array = np.asarray(array)[tuple(slice(None if stride else 1) for stride in array.strides)]
    whole = array if array.flags.c_contiguous else np.ascontiguousarray(array.T)
    data = whole.reshape(-1).view(np.uint8)
    end = data.size // (8 * _ROW) * (8 * _ROW)
    return data[:end].view(np.uint64).reshape(-1, _ROW), data[end:].tobytes()


def _span(array: Any) -> int:
    """Return the bytes of memory from the first entry of an array to its last one."""
    if array.flags.forc:
        return int(array.nbytes)
    first, end = np.lib.array_utils.byte_bounds(array)
    return end - first


def _copy_of(array: Any) -> Any:
    """Return a copy with the same strides: results, and the order of sums, depend on them."""
    if array.flags.forc or type(array) is not np.ndarray:
        return array.copy(order="K")
    first, end = np.lib.array_utils.byte_bounds(array)
    memory = np.empty(end - first, dtype=np.uint8)
    offset = array.__array_interface__["data"][0] - first
    copy = np.ndarray(array.shape, array.dtype, memory, offset, array.strides)
    copy[...] = array
    return copy


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


# To compare references with: arrays that nothing else refers to.
_OWNER, _VIEW = Constant(np.empty(1), ""), Constant(np.zeros(1)[:], "", b"")
