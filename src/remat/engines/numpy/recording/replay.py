"""Computing values again: which ops it takes, in which order, and what may be freed when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ....errors import RecomputeMismatchError
from ..fingerprints import fingerprint
from .records import Op, Value

__all__ = ["Needs", "find_needs", "replay"]


class Needs(NamedTuple):
    """What it takes to compute values."""

    made: list[Value]  # in the order in which they are to be computed
    inputs: list[Value]  # that are not recomputed here
    uses: dict[Value, int]


def find_needs(wanted: Iterable[Value], is_own: Callable[[Value], bool]) -> Needs:
    """Find the ops that lead from the nearest values that are there to what is wanted."""
    uses: dict[Value, int] = {}
    made: list[Value] = []
    inputs: list[Value] = []
    values = list(wanted)
    for value in values:  # which grow on the way
        if value in uses:
            uses[value] += 1
            continue
        uses[value] = 1
        if value.array is not None:
            continue
        if not is_own(value):
            inputs.append(value)
            continue
        assert value.op is not None, "a value is neither held nor can it be computed"
        made.append(value)
        values += value.op.reads
    made.sort(key=_number)
    return Needs(made, inputs, uses)


def _number(value: Value) -> int:
    assert value.op is not None
    return value.op.number


def replay(needs: Needs) -> dict[Value, Any]:
    """Compute values, each op once, and free each after its last use; return those wanted."""
    uses = needs.uses
    arrays: dict[Value, Any] = {}

    def get(value: Value) -> Any:
        array = arrays.get(value)
        return value.array if array is None else array

    with np.errstate(all="ignore"):  # what there is to say was said in the forward pass
        for value in needs.made:
            op = value.op
            assert op is not None
            arrays[value] = _run(op, value, get)
            for read in op.reads:
                uses[read] -= 1
                if not uses[read]:
                    arrays.pop(read, None)
    return arrays


def _run(op: Op, value: Value, get: Callable[[Value], Any]) -> Any:
    try:
        array = op.run(get)
    except Exception as error:
        error.add_note(f"{op.name} was run again for the backward pass")
        raise
    value.check(array)
    if op.mark is not None and fingerprint(array) != op.mark:
        raise RecomputeMismatchError(
            f"{op.name} was run again for the backward pass and gave another result than in the "
            "forward pass: it is no function of its arguments (it draws random numbers, or reads "
            "something that changes); mark its result with remat.mark_checkpoint to hold it"
        )
    return array
