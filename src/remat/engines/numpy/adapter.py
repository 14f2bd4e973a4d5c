"""The adapter of the core to NumPy, whose traced arrays are never written to."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np

from ...core.engine import Gathered, Memory, NeededOp
from ...core.records import Geometry, Held, Op, Operand, Value, value_of
from ...errors import RecomputeMismatchError
from .fingerprints import fingerprint
from .memory_measure import memory_behind
from .recording.constants import checked_once, decode

__all__ = ["NUMPY", "PrimitiveTraits", "array_bytes", "backward_pass", "is_pure", "traits_of"]

Array = Any  # an array, a number, or a list of them

_PURE = {"numpy", "autograd", "remat", "scipy"}  # packages whose primitives give the same again
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type, type(np.sum))


class PrimitiveTraits(NamedTuple):
    """What the core has to know of a primitive (core.records.OpTraits)."""

    func: str  # its name
    call: Callable[..., Any]
    writes: tuple[int | str, ...] = ()
    may_write: bool = False


def traits_of(name: str, function: Callable[..., Any], result: Array) -> PrimitiveTraits:
    """Return a primitive; one that is not known to give the same again is compared."""
    call = function if is_pure(function) else _Compared(name, function, fingerprint(result))
    return PrimitiveTraits(name, call)


class _Compared:
    """A function that raises if it gives another result than the first time."""

    def __init__(self, name: str, function: Callable[..., Any], first: Any) -> None:
        self._name, self._function, self._first = name, function, first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*args, **kwargs)
        if fingerprint(result) != self._first:
            raise RecomputeMismatchError(
                f"{self._name} was run again for the backward pass and gave another result than "
                "in the forward pass: it is no function of its arguments (it draws random "
                "numbers, or reads something that changes); mark its result with "
                "remat.mark_checkpoint to hold it"
            )
        return result


def is_pure(function: Any) -> bool:
    """Return whether a primitive is known to give the same again."""
    function = getattr(function, "fun", function)  # autograd's wrapper has its own module
    if isinstance(function, np.ufunc):
        return any(types.replace("->", "").strip("O") for types in function.types)
    if not isinstance(function, _FUNCTIONS):
        return False  # np.vectorize calls any function
    # (The globals: functools.wraps gives a function the module of another one.)
    names = getattr(function, "__globals__", {"__name__": getattr(function, "__module__", None)})
    return (names.get("__name__") or "").partition(".")[0] in _PURE


def array_bytes(array: Array) -> int:
    if isinstance(array, list | tuple):
        return sum(map(array_bytes, array))
    return int(array.nbytes) if isinstance(array, np.ndarray | np.generic) else 0


# -- backward passes -------------------------------------------------------------------------------


class _Passes(threading.local):
    """The backward passes that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[tuple[int, list[Callable[[], None]]]] = []


_passes = _Passes()
_numbers = itertools.count()


@contextmanager
def backward_pass() -> Iterator[None]:
    """Run a backward pass, and what is to be done at its end."""
    callbacks: list[Callable[[], None]] = []
    _passes.running.append((next(_numbers), callbacks))
    try:
        with checked_once():
            yield
    finally:
        _passes.running.pop()
        while callbacks:
            callbacks.pop()()


class _Quiet:
    """Guards under which NumPy does not warn: it has warned in the forward pass."""

    def take(self) -> np.errstate:
        return np.errstate(all="ignore")

    def give(self, guard: np.errstate, /) -> None: ...


# -- the adapter -----------------------------------------------------------------------------------


class NumpyAdapter:
    """What the core asks of NumPy (core.engine.Engine)."""

    replaying = _Quiet()

    def version(self, tensor: Array) -> int:
        return 0

    def alias(self, tensor: Array) -> Array:
        return tensor

    def view(self, tensor: Array, geometry: Geometry) -> Array:
        raise AssertionError("views of traced arrays are replayed like other ops")

    def nbytes(self, tensor: Array) -> int:
        # A number is counted as nothing: it is smaller than any record of it.
        return 0 if isinstance(tensor, np.generic) else array_bytes(tensor)

    def stride(self, tensor: Array) -> None:
        return None

    def memory(self, tensor: Array) -> Memory | None:
        return memory_behind(tensor) if isinstance(tensor, np.ndarray) else None

    def await_release(self, value: Value, tensor: Array, callback: Callable[[Any], None]) -> object:
        reference: Any = value.tensor  # a `boxes.BoxReference`
        reference.on_release = callback
        return None

    def current_tensor(self, value: Value) -> Array | None:
        return value.tensor()

    def hold_made(self, value: Value, tensor: Array) -> None:
        value.held = Held(tensor, 0)

    def fetch(self, operand: Operand) -> Array:
        held = value_of(operand).held
        assert held is not None
        return held.tensor

    def run(
        self,
        op: Op,
        makes: list[Value],
        values: dict[Value, Array],
        uses: Mapping[Value, int],
        given: Mapping[Value, Array],
    ) -> None:
        try:
            args = [_get(arg, values) if type(arg) is Value else decode(arg) for arg in op.args]
            result = op.call(*args, **(decode(op.keywords) if op.keywords else {}))
        except RecomputeMismatchError:
            raise
        except Exception as error:
            error.add_note(f"{op.traits.func} was run again for the backward pass")
            raise
        (value,) = makes
        _check(op, value, result)
        values[value] = result

    def decode(self, operand: Operand, values: Mapping[Value, Array]) -> Array:
        return _get(value_of(operand), values)

    def gather(self, ops: list[NeededOp]) -> Gathered | None:
        return None

    def current_pass(self) -> int:
        return _passes.running[-1][0] if _passes.running else -1

    def at_end_of_pass(self, callback: Callable[[], None]) -> None:
        _passes.running[-1][1].append(callback)

    def is_differentiating(self) -> bool:
        return False  # a second derivative is another trace


def _get(value: Value, values: Mapping[Value, Array]) -> Array:
    return values[value] if value in values else NUMPY.fetch(value)


def _check(op: Op, value: Value, array: Array) -> None:
    """Raise if an op that was run again has given something else."""
    shape, dtype = getattr(array, "shape", ()), getattr(array, "dtype", None)
    if (shape, dtype) != (value.size, value.dtype):
        raise RecomputeMismatchError(
            f"{op.traits.func} gave {value.dtype} of shape {value.size} in the forward pass and "
            f"{dtype} of shape {shape} when it was run again for backward: it reads something "
            "that has changed since; make it a function of its arguments"
        )


NUMPY = NumpyAdapter()
