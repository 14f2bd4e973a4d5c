"""Retention: the one place that holds, drops and lends the data of values.

1. Values that a policy keeps or that the program marks are held.
2. Small secondary outputs of an op (by-products) are held with its main output.
3. A replay starts from the nearest data that is held: by a value, or by a saved tensor that has not
   been taken yet (`lend`).

What comes from outside of a recording is held by the engine, which knows how it may be written to.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakSet, ref

from ..plans.policy import (
    Candidate,
    Decision,
    Policy,
    SaveBelow,
    SaveEverything,
    SaveNames,
    SaveNothing,
)
from .engine import Engine
from .records import Held, Holder, Made, Value

__all__ = [
    "CallPolicy",
    "Retention",
    "drop",
    "hold",
    "is_available",
    "is_held",
    "keep_by_products",
    "lend",
]

Tensor = Any  # an array of the engine

_TINY = 1 << 12  # bytes of by-products that are always held
_TINY_SHARE = 1000  # if the main output is this many times larger
_SMALL_SHARE = 16  # by-products this many times smaller are held with the main output


def hold(value: Value, tensor: Tensor, engine: Engine) -> None:
    """Hold a value by a detached tensor with the original geometry."""
    value.held = Held(tensor, engine.version(tensor))


def drop(value: Value) -> None:
    """Drop the data of a value, if it can be recomputed."""
    if value.op is not None:
        value.held = None
    for holder in value.living_holders():
        holder.drop()


def is_available(value: Value, engine: Engine) -> bool:
    """Return whether a value is held; a recomputable one must also be unmodified."""
    held = value.held
    return held is not None and (value.op is None or engine.version(held.tensor) == held.version)


def is_held(value: Value) -> bool:
    """Return whether a value or one of its saved tensors holds its data."""
    return value.held is not None or any(h.tensor is not None for h in value.living_holders())


def lend(value: Value, engine: Engine) -> Tensor | None:
    """Return the data of a value from a saved tensor that holds it unmodified, if any.

    Call it under a guard of the engine.
    """
    for holder in value.living_holders():
        tensor = holder.unchanged_tensor()
        if tensor is not None:
            if type(holder.operand) is Value:
                return tensor
            if value.geometry is not None:
                return engine.view(tensor, value.geometry)
    return None


def keep_by_products(made: Made, engine: Engine) -> None:
    """Hold by-products of an op, such as the statistics of a norm, to avoid its replay.

    Tiny ones are always held. Small ones, such as the logsumexp of an attention kernel, are held
    while the main output is alive, and longer if that is held.
    """
    main, largest = max(made, key=lambda pair: pair[1].nbytes)
    small = []
    for value, tensor in made:
        if tensor.nbytes <= min(largest.nbytes // _TINY_SHARE, _TINY):
            hold(value, engine.alias(tensor), engine)
        elif tensor.nbytes <= largest.nbytes // _SMALL_SHARE:
            hold(value, engine.alias(tensor), engine)
            small.append(ref(value))
    for reference in small:
        by_product = reference()
        if by_product is not None:
            by_product.dies_with = ref(largest, partial(_drop_by_product, ref(main), reference))


def _drop_by_product(main: ref[Value], by_product: ref[Value], _: Any) -> None:
    """Drop a by-product when the main output has been freed and is not held."""
    value, small = main(), by_product()
    if small is not None and small.op is not None and (value is None or not is_held(value)):
        small.held = None


# -- policies --------------------------------------------------------------------------------------


class CallPolicy(Policy):
    """A policy that gets the whole call of an op: its arguments and its output."""

    __slots__ = ()

    def decide(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision:
        raise NotImplementedError


class Retention:
    """Decides what one region keeps: asks its policy when a value is computed, saved or named.

    With a `limit` the region keeps everything that is saved for derivatives if that is at most
    `limit` bytes, and otherwise nothing.
    """

    def __init__(self, policy: Policy | None, limit: int | None, engine: Engine) -> None:
        self.policy = policy
        self._engine = engine
        self._was_asked = self._has_kept = False
        self.asks_about_made = policy is not None and not isinstance(policy, _ABOUT_SAVED)
        self._room = limit
        self._counted = WeakSet[Value]()  # values that were subtracted from the room
        self._kept: list[ref[Holder]] = []

    @property
    def has_kept_none(self) -> bool:
        """Whether a policy was asked and kept no value."""
        return self.policy is not None and self._was_asked and not self._has_kept

    def made(self, made: Made, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Decide about the outputs of an op. By-products follow the main output."""
        policy = self.policy
        self._was_asked = True
        main, tensor = max(made, key=lambda pair: self._engine.nbytes(pair[1]))
        if isinstance(policy, CallPolicy):
            assert main.op is not None
            decision = policy.decide(main.op.traits.func, args, kwargs, out)
        else:
            decision = self._ask(main, tensor)
        if decision is Decision.KEEP:
            self._has_kept = True
            for value, result in made:
                if value.op is not None:
                    self._engine.hold_made(value, result)

    def named(self, value: Value, tensor: Tensor) -> None:
        """Decide about a value that was named with `remat.name`."""
        if self._ask(value, tensor) is Decision.KEEP and not is_held(value):
            self._has_kept = True
            hold(value, self._engine.alias(tensor), self._engine)

    def saved(self, saved: Any, value: Value, tensor: Tensor) -> None:
        """Decide about a tensor that is saved for a derivative."""
        if value.must_recompute:
            return
        if self._room is None:
            if self._ask(value, tensor, is_saved=True) is Decision.KEEP:
                self._has_kept = True
                saved.keep(tensor)
            return
        if value not in self._counted:
            self._counted.add(value)
            self._room -= self._engine.nbytes(tensor)
        if self._room >= 0:
            saved.keep(tensor)
            self._kept.append(ref(saved))
        else:
            self._drop_kept()

    def _drop_kept(self) -> None:
        """The limit is exceeded: drop what was kept so far."""
        self._room = None
        for reference in self._kept:
            if (saved := reference()) is not None:
                saved.drop()
        self._kept.clear()

    def _ask(self, value: Value, tensor: Tensor, *, is_saved: bool = False) -> Decision:
        policy = self.policy
        if policy is None or value.must_recompute or isinstance(policy, CallPolicy):
            return Decision.RECOMPUTE
        self._was_asked = True
        op = value.op
        reads = () if op is None else tuple(tuple(read.size) for read in op.reads)
        name = "" if op is None else str(op.traits.func)
        shapes = (tuple(getattr(tensor, "shape", ())), *reads)  # a list of arrays has none
        nbytes = self._engine.nbytes(tensor)
        return policy(Candidate(name, shapes, nbytes, value.name, is_saved))


_ABOUT_SAVED = (SaveNothing, SaveEverything, SaveBelow, SaveNames)
