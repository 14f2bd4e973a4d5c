"""Regions that are opened and closed by hand, and single arrays in them."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from autograd.tracer import isbox

from ...core.records import Value
from ...core.retention import drop
from ...errors import RematError, UnsupportedError
from ...loops import is_inside_a_region
from ...observers import warn_once
from ...plans.policy import Policy, as_policy
from ...sizes import shown
from ..region_access import RegionAccess
from .adapter import array_bytes
from .nodes import Node
from .recording.region import NumpyRegion, close_region, hold, open_region, threads
from .tape import is_tracing, plain

__all__ = [
    "NumpyScope",
    "checkpoint_tensor",
    "is_marked",
    "mark",
    "name_tensor",
    "open_scope",
]


class NumpyScope(RegionAccess[NumpyRegion]):
    """Access to a region that does not keep it alive: only its backward pass does."""

    def __init__(self, name: str, policy: Policy | None) -> None:
        self.name = name
        self.records = is_tracing()
        self._open: NumpyRegion | None = None
        if self.records:
            self._open = open_region(name, policy=policy)
        super().__init__(self._open)
        if not self.records and not is_inside_a_region():
            warn_once(
                ("numpy", "scope", name),
                f"scope {name!r} has no effect: no function is being differentiated, so nothing "
                "would be held; it works inside of what remat.grad and remat.value_and_grad "
                "differentiate",
            )

    @property
    def is_alive(self) -> bool:
        region = self._region()
        return region is not None and region.is_alive

    def close(self, *, quiet: bool) -> None:
        region, self._open = self._open, None
        if region is None or not _is_open(region):
            return  # nothing was recorded, or the function that it was opened in has ended
        if threads.region is not region:
            while threads.region is not region:
                assert threads.region is not None
                threads.region = threads.region.parent
            threads.region = region.parent
            raise RematError(
                f"scope {self.name!r} was left before a scope that was entered later; leave them "
                "in the reverse order, as nested `with` statements do"
            )
        close_region(region)
        if not region.ops and not quiet and not is_inside_a_region():
            warn_once(
                ("numpy", "empty scope", self.name),
                f"scope {self.name!r} has no effect: nothing that is computed in it depends on "
                "what is differentiated",
            )


def _is_open(region: NumpyRegion) -> bool:
    opened = threads.region
    while opened is not None:
        if opened is region:
            return True
        opened = opened.parent
    return False


def open_scope(name: str, *, policy: Any) -> NumpyScope:
    return NumpyScope(name, None if policy is None else as_policy(policy))


# -- single arrays ---------------------------------------------------------------------------------


def mark(array: Any) -> Any:
    """Hold this array; what follows is recomputed from here."""
    if not isbox(array):
        if not isinstance(array, np.ndarray | np.generic | float | complex | int):
            raise TypeError(f"mark_checkpoint must be given an array, got {shown(array)}")
        _remember(array)
        return array
    node = array._node
    if isinstance(node, Node):
        node.is_marked = True
        value: Value | None = node.value
        if value is not None:
            value.must_recompute = False
            hold(value, array._value)
            if threads.region is not None:
                threads.region.marked(value)
    return array


def is_marked(array: Any) -> bool:
    if isbox(array):
        return bool(getattr(array._node, "is_marked", False))
    reference = _marked.get(id(array))
    return reference is not None and reference() is array


def name_tensor(array: Any, name: str) -> Any:
    """Give an array a name for policies and reports."""
    value = _value_of(array)
    region = threads.region
    if value is not None and region is not None:
        value.name = name
        if region.retention is not None and value.op is not None:
            region.retention.named(value, plain(array))
            region.marked(value)
    return array


def checkpoint_tensor(array: Any, threshold: int | None) -> Any:
    """Do not hold this array, if it has more bytes than `threshold`."""
    if threads.region is None:
        if is_inside_a_region():
            return array  # of a segment, which holds nothing of what it computes
        raise UnsupportedError(
            "checkpoint(array) works inside of a scope, which knows how the array was made; here "
            "there is none. Use `with remat.CheckpointScope(name):` around the code that makes it, "
            "inside of the function that is differentiated, or remat.checkpoint(fn, x)"
        )
    value = _value_of(array)
    if value is None or (threshold is not None and array_bytes(plain(array)) <= threshold):
        return array
    array._node.is_marked = False
    if value.op is not None:
        value.must_recompute = True
        drop(value)
    return array


def _value_of(array: Any) -> Value | None:
    node = array._node if isbox(array) else None
    value: Value | None = getattr(node, "value", None)
    return value


_marked: dict[int, weakref.ref[Any]] = {}  # plain arrays, by id


def _remember(array: Any) -> None:
    """Note a plain array; a number cannot be told from an equal one, and is not noted."""
    if isinstance(array, np.ndarray):
        place = id(array)
        _marked[place] = weakref.ref(array, lambda gone: _forget(place, gone))


def _forget(place: int, gone: Any) -> None:
    if _marked.get(place) is gone:  # or another array has taken the place already
        del _marked[place]
