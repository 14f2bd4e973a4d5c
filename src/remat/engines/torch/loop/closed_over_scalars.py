"""Numbers that a step closes over: where states are zero they must not change.

A counter times zeros is zero every time, but its slope is the counter. States are compared when a
step is run again; where these are zeros, a number in reach that has changed is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, MutableSequence
from functools import partial
from operator import getitem
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import RecomputeMismatchError

__all__ = ["ClosedOverScalars"]

_MANY = 1000  # entries of a container: more than that are data
_KINDS = (int, float, complex)


class _Place(NamedTuple):
    name: str
    read: Callable[[], Any]
    value: Any  # when it was found


class ClosedOverScalars:
    """The numbers in what a function refers to, as they were when they were found."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._change: str | None = None  # in words

    def add_scalars_of(self, value: Any, names: Iterable[str] = ()) -> None:
        """Note the numbers that an object holds; of a function's globals, those it `names`."""
        if isinstance(value, CellType):
            self._note("a variable", partial(getattr, value, "cell_contents"))
        elif isinstance(value, FunctionType):
            for name in names:
                self._note(name, partial(getitem, value.__globals__, name))
        elif isinstance(value, MutableSequence) and len(value) <= _MANY:
            for place in range(len(value)):
                self._note(f"entry {place} of a list", partial(getitem, value, place))
        elif isinstance(value, MutableMapping) and len(value) <= _MANY:
            for key in list(value):
                self._note(f"{key!r}", partial(getitem, value, key))
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            for name in list(attributes):
                self._note(f"{type(value).__name__}.{name}", partial(getitem, attributes, name))

    def _note(self, name: str, read: Callable[[], Any]) -> None:
        found = _value_of(read)
        if isinstance(found, _KINDS):
            self._places.append(_Place(name, read, found))

    def update(self) -> None:
        """Find out whether one has changed; once is enough, it may be back where it was later."""
        if self._change is None:
            for name, read, before in self._places:
                now = _value_of(read)
                if now is not before and repr(now) != repr(before):
                    self._change = f"{name} was {before!r} and then {now!r}"
                    break

    @property
    def changed(self) -> bool:
        return self._change is not None

    def check(self, step: int, before: list[Any], after: list[Any]) -> None:
        """Raise if the states around a step are no proof that the change makes no difference."""
        start = [leaf for leaf in before if _counts(leaf)]
        ends = [leaf for leaf in after if _counts(leaf)]
        if any(map(_is_zero, ends)) or (start and all(map(_is_zero, start))):
            raise RecomputeMismatchError(
                f"step {step} was run again, and whether it did the same cannot be seen: zeros "
                f"agree whatever they are multiplied by, and a number that it closes over has "
                f"changed: {self._change}. Keep the number in the state, take it from the xs of "
                'remat.checkpointed_scan, or run no step twice (schedule="all")'
            )


def _value_of(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (KeyError, IndexError, ValueError):  # no longer there, or not yet
        return None


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _is_zero(leaf: Tensor) -> bool:
    return leaf.numel() > 0 and not bool(torch.any(leaf.detach() != 0))
