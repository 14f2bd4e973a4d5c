"""Regions of traced NumPy functions: what is computed in them is recorded and computed again.

1. What comes from outside of all regions is held when an op of a region reads it.
2. What cannot be computed again (ops that are not understood, sums of gradients) is held.
3. What a policy says to keep, and what the program marks, is held.
4. Derivative rules get placeholders for what they need (core.region.SavedTensor).
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np

from ....core import region
from ....core.accounting import Accounting
from ....core.records import Held, Op, Origin, Value
from ....core.region import SavedTensor
from ....core.retention import Retention
from ....observers import Observer
from ....plans.policy import Policy, SaveNothing
from ..adapter import NUMPY, array_bytes, traits_of
from ..array_function import memory_of
from ..op_facts import FACTS
from ..source_location import location_of_caller
from .constants import Constants, UnknownOperandError
from .inside import observers_of_region
from .rules import make_rule

__all__ = ["SMALL_OPS", "NumpyRegion", "close_region", "enter", "hold", "open_region", "threads"]

_op_numbers = itertools.count()
SMALL_OPS = 256  # bytes: the record of an op takes more than arrays up to this size


class _ThreadRegion(threading.local):
    def __init__(self) -> None:
        self.region: NumpyRegion | None = None  # the innermost that is open
        self.constants = Constants()  # plain operands outside of regions, of the trace that runs
        self.last_op = 0.0  # when the last op was recorded, if a region is attended


threads = _ThreadRegion()


def hold(value: Value, array: Any) -> None:
    """Hold a value from now on."""
    if value.held is None:
        value.held = Held(array, 0)


class NumpyRegion(region.Region):
    """A part of a recorded pass that is computed again as a whole."""

    engine = NUMPY
    parent: NumpyRegion | None

    is_open = True
    skips_below = 0  # bytes: ops all of whose arrays are smaller are not recorded
    observers: tuple[Observer, ...] = ()  # that are told of it once it has an op

    def __init__(self, name: str = "", *, retention: Retention | None = None) -> None:
        super().__init__(name, retention=retention)
        self.ops = 0
        self._constants = Constants()

    # -- forward -----------------------------------------------------------------------------------

    def record(self, node: Any, array: Any, function: Any, args: Any, kwargs: Any) -> bool:
        """Take an op into the recording; `node` is its node, with autograd's rule in it.

        Return whether its operands are understood. If not, the rule is to hold them as they are.
        """
        self._begin_op()
        if self._is_small(array, node.argnums, args):
            return False
        name = f"numpy.{node.name.strip('_')}"
        operands: dict[int, Any] = {}
        seconds = time.perf_counter() - threads.last_op if self.is_attended else 0.0
        is_understood, op = self._op(node, name, function, array, args, kwargs, operands)
        value = node.value = Value(node.box, 0, op)
        value.size, value.dtype = getattr(array, "shape", ()), getattr(array, "dtype", None)
        if not is_understood or node.is_sum or getattr(function, "is_opaque", False):
            value.op, value.origin = None, Origin.OPAQUE
            hold(value, array)
        elif not isinstance(array, np.ndarray | list | tuple):
            hold(value, array)  # a number takes no more than what it is computed from
        elif node.is_view:
            arrays = [args[i] for i in node.argnums]
            value.base = _base_of(array, op.reads, arrays)
        _note(operands, array, value)
        self._attend(op, value, array, seconds)  # it may be held before the rule asks for it
        if value.op is None:
            return is_understood
        known = dict(zip(op.reads, (args[i] for i in node.argnums), strict=True))
        known[value] = array
        node.vjp = make_rule(
            lambda needed: self.pack(needed, known[needed]),
            *(node.vjp, op, value, function, node.argnums, operands),
        )
        if self.is_attended:
            threads.last_op = time.perf_counter()
        return True

    def _is_small(self, array: Any, argnums: Any, args: Any) -> bool:
        """Return whether the record of an op would take more memory than what it is about."""
        limit = self.skips_below
        if not limit or array_bytes(array) >= limit:
            return False
        return all(array_bytes(args[i]) < limit for i in argnums)

    def _begin_op(self) -> None:
        """Count an op in all regions that are open; the first one of a region begins its account.

        The forward part of a loop runs without a trace, and counts for nothing.
        """
        opened: NumpyRegion | None = self
        while opened is not None:
            opened.ops += 1
            if opened.observers:
                opened.attend(Accounting(opened.name, opened.observers, NUMPY, FACTS))
                opened.observers = ()
                threads.last_op = time.perf_counter()
            opened = opened.parent

    def _op(
        self,
        node: Any,
        name: str,
        function: Any,
        result: Any,
        args: Any,
        kwargs: Any,
        found: dict[int, Any],
    ) -> tuple[bool, Op]:
        """Return whether the operands of a call are understood, and its op."""
        reads = [self.operand(p, args[i]) for i, p in zip(node.argnums, node.parents, strict=True)]
        traced = dict(zip(node.argnums, reads, strict=True))
        encoded: list[Any] = []
        keywords: dict[str, Any] = {}
        try:
            encoded = [
                traced[i] if i in traced else self._constants.encode(arg, name, found)
                for i, arg in enumerate(args)
            ]
            keywords = self._constants.encode(kwargs, name, found) if kwargs else {}
            is_understood = True
        except UnknownOperandError:
            is_understood = False
        for i, value in traced.items():
            _note(found, args[i], value)
        traits = traits_of(name, function, result)
        location = f"{name}, {location_of_caller()}" if self.is_attended else ""
        op = Op(
            next(_op_numbers), traits, traits.call, encoded, reads, keywords or None, None, location
        )
        return is_understood, op

    def operand(self, node: Any, array: Any) -> Value:
        """Return the value of an array that an op reads; one from outside is held."""
        value: Value | None = node.value
        if value is None:  # made outside of all regions
            value = node.value = Value(node.box, 0)
            value.origin, value.is_leaf = Origin.EXTERNAL, not node.parents
            value.size, value.dtype = getattr(array, "shape", ()), getattr(array, "dtype", None)
            hold(value, array)
        elif value.held is None and value.op is not None and value.op.number < self._first_op:
            hold(value, array)  # of a region that is closed
        return value

    @property
    def _first_op(self) -> int:
        outermost: NumpyRegion = self
        while outermost.parent is not None:
            outermost = outermost.parent
        return outermost.start

    def _attend(self, op: Op, value: Value, array: Any, seconds: float) -> None:
        """Ask the policy of the region, and notify observers. To them, a view is no op."""
        retention = self.retention
        if retention is not None and retention.asks_about_made and value.op is not None:
            retention.made([(value, array)], (), {}, array)
        opened: NumpyRegion | None = self
        while opened is not None and value.base is None:
            if opened.observer is not None:
                opened.observer.ran(op, [(value, array)], seconds, has_grad=True)
            opened = opened.parent

    # -- what rules save ---------------------------------------------------------------------------

    def pack(self, value: Value, array: Any) -> SavedTensor | Value:
        """Return what a rule holds instead of an array."""
        saved: SavedTensor
        if value.origin.is_external:
            if self.observer is None:
                return value
            saved = self.make_saved(value)
            self.observer.saved(saved, array)
            return saved
        saved = self.save(value, array)
        return saved

    @property
    def is_alive(self) -> bool:
        """Whether it is open, or a derivative still needs something of it."""
        return self.is_open or next(self.living(), None) is not None


def open_region(
    name: str, *, policy: Policy | None = None, limit: int | None = None, skips_below: int = 0
) -> NumpyRegion:
    """Begin a region inside of the innermost one that is open."""
    retention = None
    if limit is not None or (policy is not None and not isinstance(policy, SaveNothing)):
        retention = Retention(policy, limit, NUMPY)
    opened = NumpyRegion(name, retention=retention)
    opened.skips_below = skips_below
    opened.observers = observers_of_region()
    enter(opened)
    return opened


def enter(opened: Any) -> None:
    """Make a region the innermost one."""
    opened.start = next(_op_numbers)
    opened.parent = threads.region
    if opened.parent is not None:
        opened.parent.opened_inside(opened)
    if opened.is_attended:
        threads.last_op = time.perf_counter()
    threads.region = opened


def close_region(closed: NumpyRegion) -> None:
    """End a region, and what was left open inside of it."""
    while threads.region is not None:
        innermost = threads.region
        threads.region = innermost.parent
        innermost.is_open = False
        innermost.close()
        if innermost is closed:
            break


def _note(operands: dict[int, Any], array: Any, value: Value) -> None:
    """Note which value an array is, to find it in rules; numbers stay in them."""
    if isinstance(array, np.ndarray) or (isinstance(array, list | tuple) and array):
        operands.setdefault(id(array), value)


def _base_of(array: Any, reads: list[Value], arrays: list[Any]) -> Value | None:
    memory = memory_of(array)
    pairs = zip(reads, arrays, strict=True)
    return next((read for read, other in pairs if memory_of(other) is memory), None)
