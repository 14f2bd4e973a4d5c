"""ModuleSections: a pass under a budget is cut at the modules that `fully_shard` was called on.

What one sharded module makes and the code around it reads, or the other way round, is kept. So what
is recomputed for the backward of a module needs the parameters of that module alone, and FSDP has
gathered these by then. No replay has to gather parameters: ranks whose shapes, and so whose plans,
differ never wait for one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ....core.records import Op, Value
from ..backend import (
    is_in_forward,
    sharded_states,
    with_version_counters,
    without_dispatch_modes,
)
from ..memory.geometry import view_over
from ..memory.tensors import alias, flat, is_plain
from ..memory.values import current_tensor
from ..retention import keep, made_by_op

__all__ = ["ModuleSections", "find_sections"]

_OUTSIDE = 0


def find_sections() -> ModuleSections | None:
    """Return the sections of a pass; None if nothing is sharded."""
    states = sharded_states()
    return ModuleSections(states) if states else None


class ModuleSections:
    """Tells which sharded module an op belongs to: the innermost one that runs."""

    def __init__(self, states: Sequence[Any]) -> None:
        # `fully_shard` is called on the modules inside before it is called on those around them.
        self._outer_first = list(reversed(states))
        self._running: list[Any] = []  # the innermost comes last
        self._sections: dict[int, int] = {}  # by the numbers of ops
        self._arguments: tuple[Any, ...] = ()  # of the op that has run last

    def ran_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the arguments of an op, for `ran`."""
        self._arguments = *args, *kwargs.values()

    def ran(self, op: Op, made: Sequence[tuple[Value, Tensor]]) -> list[Value]:
        """Note the section of an op; keep what it reads of others, and return that."""
        section = self._sections[op.number] = self._current()
        reads = [value for value in dict.fromkeys(op.reads) if self._is_of_other(value, section)]
        kept = [value for value in reads if self._keep_read(value)]
        for value, tensor in made:
            if self._is_over_other(value, op, section):
                _keep(value, tensor)
                kept.append(value)
        self._arguments = ()
        return kept

    def _is_over_other(self, value: Value, op: Op, section: int) -> bool:
        """Return whether a value was written over that of another section, which is gone."""
        if value.argument is None or value.op is not op:
            return False
        return self._is_of_other(op.overwritten(value.argument), section)

    def section_of(self, value: Value) -> int:
        """Return the section that a value is recomputed in."""
        return _OUTSIDE if value.op is None else self._sections.get(value.op.number, _OUTSIDE)

    def _is_of_other(self, value: Value, section: int) -> bool:
        return value.op is not None and self._sections.get(value.op.number, section) != section

    def _current(self) -> int:
        running = [state for state in self._running if is_in_forward(state)]
        for state in self._outer_first:
            if is_in_forward(state) and state not in running:
                running.append(state)
        self._running = running
        return id(running[-1]) if running else _OUTSIDE

    def _keep_read(self, value: Value) -> bool:
        """Keep a value that was read; return False if it has been overwritten since."""
        tensor = current_tensor(value)
        if tensor is None:
            tensor = next((t for t in flat(self._arguments) if _is_over(t, value)), None)
            if tensor is None or value.geometry is None:
                return False
            with without_dispatch_modes(), with_version_counters():
                tensor = view_over(alias(tensor), value.geometry)
        _keep(value, tensor)
        return True


def _is_over(tensor: Any, value: Value) -> bool:
    """Return whether a tensor is a view of what a value is now."""
    if not isinstance(tensor, Tensor) or not is_plain(tensor):
        return False
    return getattr(tensor.untyped_storage(), "_remat", None) == value.note


def _keep(value: Value, tensor: Tensor) -> None:
    keep(value, made_by_op(value, tensor))
    assert value.held is not None
    value.held.version = value.version  # autograd counts a write when the op is done
