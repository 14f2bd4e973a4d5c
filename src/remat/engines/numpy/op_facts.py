"""What traced NumPy ops and their derivatives do, for traces and plans (core.tracing.OpFacts)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from ...core.records import Op, Value, memory_of
from ...core.tracing import BackwardCost
from .recording.constants import Constant, constants_in

__all__ = ["FACTS"]

_WORKSPACE = 2  # arrays of the size of the largest operand that a rule computes on its way


class NumpyFacts:
    """NumpyFacts about ops. All that is traced has a gradient; rules say what they save."""

    saves_when_done = True
    name = staticmethod(str)

    def place(self, location: str) -> str:
        return location

    def module(self, op: Op, known: dict[int, str]) -> str:
        return ""

    def saves_its_output(self, func: Any) -> bool:
        return True  # if a rule saves the result of an op, it is that op's

    def kernel_workspace(self, op: Op, result: Any, *, needs_gradient: bool) -> int:
        sizes = (_bytes(memory_of(read)) for read in op.reads)
        return _WORKSPACE * max([getattr(result, "nbytes", 0), *sizes])

    def note_call(self, op: Op, key: Hashable) -> None: ...

    def measure(self) -> None: ...

    def backward(self, key: Hashable) -> BackwardCost:
        return BackwardCost()

    def plain_operands(self, op: Op) -> Iterable[Constant]:
        return constants_in([op.args, op.keywords])

    def joins(self, func: Any) -> bool:
        return False

    def is_differentiable(self, tensor: Any) -> bool:
        return True

    def requires_grad(self, tensor: Any) -> bool:
        return True

    def has_gradient(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return True

    def reads_shapes_only(self, func: Any) -> bool:
        return False

    def reads_results(self, args: tuple[Any, ...]) -> bool:
        return True

    def is_function(self, func: Any) -> bool:
        return False

    def just_runs(self, func: Any) -> bool:
        return True


def _bytes(value: Value) -> int:
    return 0 if value.dtype is None else int(np.prod(value.size)) * int(value.dtype.itemsize)


FACTS = NumpyFacts()
