"""Regions: what is computed in them is dropped, and computed again in backward.

1. What comes from outside of all regions is held when an op of a region reads it.
2. What a region reads of others is held, too; a region inside of another one leaves that to the
   outer one, which computes it again together with what its own rules need.
3. What cannot be computed again (ops that are not known to be pure, sums of gradients) is held.
4. What a policy says to keep, and what the program marks, is held.
5. When a rule first asks for a value that is not there, all that the living rules of its region
   need is computed in one go. It is freed when the last of them has used it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from ....plans.policy import Candidate, Decision, Policy, SaveEverything, SaveNothing
from ..array_function import memory_of
from ..fingerprints import fingerprint
from .accounting import RegionAccounting, accounting_of
from .constants import Constants, UnknownOperandError, checked_once
from .records import Op, Value
from .replay import Needs, find_needs, replay
from .rules import Rule, make_rule

__all__ = [
    "Region",
    "backward_pass",
    "close_region",
    "coming_to",
    "drop",
    "free",
    "hold",
    "is_pure",
    "threads",
]

_PURE = {"numpy", "autograd", "remat", "scipy"}  # packages whose primitives give the same again
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type, type(np.sum))


class _Threads(threading.local):
    def __init__(self) -> None:
        self.region: Region | None = None  # the innermost that is open
        # What the backward pass that runs has computed again.
        self.fresh: list[weakref.ref[Value]] = []
        self.passes: set[object] = set()  # the backward passes that run
        self.constants = Constants()  # plain operands outside of regions, of the trace that runs


threads = _Threads()


@contextmanager
def coming_to(rules: Iterable[Any]) -> Iterator[None]:
    """Run a backward pass that comes to these rules.

    Others are alive if the program holds a traced array that the result does not depend on. What
    they need is not computed: it may be gone.
    """
    this = object()
    for rule in rules:
        if isinstance(rule, Rule):
            rule.due_in = this
    threads.passes.add(this)
    try:
        yield
    finally:
        threads.passes.remove(this)


@contextmanager
def backward_pass() -> Iterator[None]:
    """Drop at the end what was computed again and not asked for."""
    before, threads.fresh = threads.fresh, []
    try:
        with checked_once():
            yield
    finally:
        for reference in threads.fresh:
            if (value := reference()) is not None:
                _drop_fresh(value)
        threads.fresh = before


def hold(value: Value, array: Any) -> None:
    """Hold a value from now on."""
    if value.held is None:
        value.held = array
        region = value.region
        if region is not None:
            region.kept.append(weakref.ref(value))
            if region.accounting is not None:
                region.accounting.holds(array, forward=True)


def drop(value: Value) -> None:
    """Do not hold a value that can be computed again."""
    if value.op is not None:
        _drop_held(value)


def free(value: Value) -> None:
    """Let go of a value: backward has gone past the op that made it, and will not run it again."""
    _drop_held(value)
    _drop_fresh(value)
    value.op = None  # which holds plain arrays


def _drop_held(value: Value) -> None:
    held, value.held = value.held, None
    if held is not None and value.region is not None:
        value.region.frees(held)


def _drop_fresh(value: Value) -> None:
    fresh, provider = value.fresh, value.provider
    value.fresh, value.provider, value.waiting = None, None, 0
    if fresh is not None and provider is not None and provider.accounting is not None:
        provider.accounting.frees(fresh)


class Region:
    """A part of a recorded pass that is computed again as a whole."""

    def __init__(self, name: str, policy: Policy | None = None) -> None:
        self.name = name
        self.parent = threads.region
        self.policy = None if isinstance(policy, SaveNothing) else policy
        self.pending = 0  # rules that are alive, and regions inside that have some
        self.kept: list[weakref.ref[Value]] = []
        self.ops = 0
        self._rules: list[weakref.ref[Rule]] = []
        self._children: list[weakref.ref[Region]] = []
        self._awaited: set[Value] = set()  # that the region around computes for this one
        self._constants = Constants()
        self.accounting: RegionAccounting | None = accounting_of(name)
        if self.parent is not None:
            self.parent._children.append(weakref.ref(self))

    # -- forward -----------------------------------------------------------------------------------

    def record(self, node: Any, array: Any, function: Any, args: Any, kwargs: Any) -> bool:
        """Take an op into the recording; `node` is its node, with autograd's rule in it.

        Return whether its operands are understood. If not, the rule is to hold them as they are.
        """
        self._count_op()
        name = f"numpy.{node.name.strip('_')}"
        operands: dict[int, Any] = {}
        op = self._op(node, name, function, args, kwargs, operands)
        value = Value(op, self, array)
        node.value = value
        if op is None or node.is_sum or _holds_code(function):
            value.op = None
            hold(value, array)
            self.recorded(value, array, None)
            return op is not None
        if node.is_view:
            value.base = _base_of(array, op.reads, [args[i] for i in node.argnums])
        if not is_pure(function):
            op.mark = fingerprint(array)
        if not isinstance(array, np.ndarray | list | tuple):
            value.held = array  # a number takes no more than what it is computed from
        _note(operands, array, value)
        node.vjp = make_rule(self, node.vjp, op, value, node.argnums, operands)
        if isinstance(node.vjp, Rule):
            self._rules.append(weakref.ref(node.vjp))
        self._decide(node, value, array, args)
        self.recorded(value, array, node.vjp)
        return True

    def recorded(self, value: Value, array: Any, rule: Any) -> None:
        """An op has run; the region of a whole pass takes note of it."""
        if self.parent is not None:
            self.parent.recorded(value, array, rule)

    def _count_op(self) -> None:
        region: Region | None = self
        while region is not None:
            region.ops += 1
            region = region.parent

    def _op(
        self, node: Any, name: str, function: Any, args: Any, kwargs: Any, found: dict[int, Any]
    ) -> Op | None:
        """Return the op with its operands; None if it is not understood."""
        reads = [self._operand(p, args[i]) for i, p in zip(node.argnums, node.parents, strict=True)]
        traced = dict(zip(node.argnums, reads, strict=True))
        try:
            encoded = [
                traced[i] if i in traced else self._constants.encode(arg, name, found)
                for i, arg in enumerate(args)
            ]
            keywords = self._constants.encode(kwargs, name, found) if kwargs else {}
        except UnknownOperandError:
            return None
        for i, value in traced.items():
            _note(found, args[i], value)
        return Op(name, function, encoded, keywords, reads)

    def _operand(self, node: Any, array: Any) -> Value:
        value: Value | None = node.value
        if value is None:  # made outside of all regions
            value = node.value = Value(None, None, array)
            value.held = array
            if self.accounting is not None and node.parents:
                self.accounting.holds(array, forward=True)
        elif value.region is not self:
            self._take_input(value, array)
        return value

    def _take_input(self, value: Value, array: Any) -> None:
        region = self
        while value.held is None:
            if region.contains(value):
                region.lend(value, array)
                return
            if region.parent is None:
                hold(value, array)
                return
            region = region.parent

    def lend(self, value: Value, array: Any) -> None:
        """A region inside reads a value of this one: as if a rule needed it."""
        self.ask(value, array, is_saved=True)

    def contains(self, value: Value) -> bool:
        """Return whether a value was made in here, or in a region inside."""
        region = value.region
        while region is not None:
            if region is self:
                return True
            region = region.parent
        return False

    # -- retention ---------------------------------------------------------------------------------

    def _decide(self, node: Any, value: Value, array: Any, args: Any) -> None:
        self.ask(value, array, is_saved=False)
        if not isinstance(node.vjp, Rule) or (self.policy is None and self.accounting is None):
            return
        known = dict(zip(node.parents, (args[i] for i in node.argnums), strict=True))
        arrays = {parent.value: known[parent] for parent in node.parents} | {value: array}
        for needed in node.vjp.needs:
            is_root = needed.region is None and not any(
                parent.parents for parent in node.parents if parent.value is needed
            )
            if self.accounting is not None and not is_root:  # the caller's own are not counted
                self.accounting.needs(arrays[needed])
            self.ask(needed, arrays[needed], is_saved=True)

    def ask(self, value: Value, array: Any, *, is_saved: bool) -> None:
        """Hold a value if the policy says so."""
        op = value.op
        if self.policy is None or op is None or value.held is not None or value.must_recompute:
            return
        if not self.contains(value):
            return
        shapes = (value.shape, *(read.shape for read in op.reads))
        candidate = Candidate(op.name, shapes, value.nbytes, value.name, is_saved)
        if self.policy(candidate) is Decision.KEEP:
            hold(value, array)

    def frees(self, array: Any) -> None:
        """What was held of this region no longer is."""
        if self.accounting is not None:
            self.accounting.frees(array)

    @property
    def keeps_everything(self) -> bool:
        return isinstance(self.policy, SaveEverything)

    # -- backward ----------------------------------------------------------------------------------

    def living(self) -> Iterator[Rule]:
        for reference in self._rules:
            if (rule := reference()) is not None:
                yield rule

    def _wanted(self, stage: int | None) -> dict[Value, int]:
        """Return what is not there and will be asked for, and by how many."""
        wanted: dict[Value, int] = {}
        for rule in self.living():
            is_due = not threads.passes or rule.due_in in threads.passes
            if is_due and (stage is None or rule.stage == stage):
                for value in rule.needs:
                    if value.array is None:
                        wanted[value] = wanted.get(value, 0) + 1
        for reference in self._children:
            child = reference()
            if child is not None and child.pending:
                for value in child._asked_of_outside():
                    if value.array is None:
                        wanted[value] = wanted.get(value, 0) + 1
        return wanted

    def _asked_of_outside(self) -> list[Value]:
        """Return what the living rules in here will ask the region around for.

        Not all that was ever read: backward may have gone past it, and have freed what it takes.
        """
        asked = find_needs(self._wanted(None), self._computes).inputs
        self._awaited.update(asked)
        return asked

    def provide(self, rule: Rule) -> None:
        """See to it that what a rule needs is there."""
        if any(value.array is None for value in rule.needs):
            self._compute(rule.stage)

    def _compute(self, stage: int | None) -> None:
        wanted = self._wanted(stage)
        started = time.perf_counter()
        needs = self._find(wanted)
        arrays = replay(needs)
        for value in wanted.keys() & arrays.keys():
            value.fresh, value.provider, value.waiting = arrays[value], self, wanted[value]
            threads.fresh.append(weakref.ref(value))
            if self.accounting is not None:
                self.accounting.holds(arrays[value], forward=False)
        self._recomputed(len(needs.made), time.perf_counter() - started)

    def _find(self, wanted: Iterable[Value]) -> Needs:
        needs = find_needs(wanted, self._computes)
        if needs.inputs:
            self._provide_from_outside(needs.inputs)
        return needs

    def _computes(self, value: Value) -> bool:
        """Return whether it is for this region to compute a value."""
        return self.parent is None or self.contains(value)

    def _provide_from_outside(self, inputs: list[Value]) -> None:
        outer = self.parent
        assert outer is not None
        further = [value for value in inputs if not outer._computes(value)]
        if further:
            outer._provide_from_outside(further)
        if any(value.array is None for value in inputs):
            outer._compute(None)

    def _recomputed(self, ops: int, seconds: float) -> None:
        if self.accounting is not None:
            self.accounting.recomputed(ops, seconds)

    def used(self, rule: Rule) -> None:
        """A rule has used what it needs."""
        for value in rule.needs:
            if value.provider is self:
                _release(value)

    def add_pending(self) -> None:
        self.pending += 1
        if self.pending == 1 and self.parent is not None:
            self.parent.add_pending()

    def end_pending(self) -> None:
        self.pending -= 1
        if not self.pending and self.parent is not None:
            for value in self._awaited:
                if value.provider is self.parent:
                    _release(value)
            self.parent.end_pending()

    # -- what can be seen from outside -------------------------------------------------------------

    def held(self) -> list[Any]:
        """Return what is held of what was made in here, each value once."""
        found: dict[int, Any] = {}
        for reference in self.kept:
            if (value := reference()) is not None and value.held is not None:
                found[id(value)] = value.held
        return list(found.values())

    def recompute(self) -> list[Any]:
        """Return what was dropped and is still to be asked for, computed now, each value once."""
        with backward_pass():
            wanted = self._wanted(None)
            arrays = replay(self._find(wanted))
            return [arrays.get(value, value.array) for value in wanted]

    def drop_all(self) -> None:
        """Hold nothing of what can be computed again."""
        for reference in self.kept:
            if (value := reference()) is not None and value.region is self:
                drop(value)


def close_region(region: Region) -> None:
    """End a region, and what was left open inside of it."""
    threads.region = region.parent
    if region.accounting is not None:
        region.accounting.closes()


def _release(value: Value) -> None:
    if value.waiting:
        value.waiting -= 1
        if not value.waiting:
            _drop_fresh(value)


def _note(operands: dict[int, Any], array: Any, value: Value) -> None:
    """Note which value an array is, to find it in rules; numbers stay in them."""
    if isinstance(array, np.ndarray) or (isinstance(array, list | tuple) and array):
        operands.setdefault(id(array), value)


def _base_of(array: Any, reads: list[Value], arrays: list[Any]) -> Value | None:
    memory = memory_of(array)
    pairs = zip(reads, arrays, strict=True)
    return next((read for read, other in pairs if memory_of(other) is memory), None)


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


def _holds_code(function: Any) -> bool:
    """Return whether a replay would call code of the program: a checkpointed call or loop."""
    return getattr(function, "is_opaque", False)
