"""A chain of layers within a memory budget: recorded once, planned, and followed from then on."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ..engines.compiling import uncompiled
from ..engines.locate import EngineFunctions, engine_of_call, is_torch_module
from ..observers import warn_once
from ..plans import Trace
from ..plans.planner import Plans

__all__ = ["run_layers_within"]

Layer = Callable[[Any], Any]
_MANY = 32  # chains that are remembered in a thread


@uncompiled
def run_layers_within(memory_budget: int | float | str, layers: list[Layer], input: Any) -> Any:
    """Run the layers one after the other; the pass keeps to the budget."""
    engine = engine_of_call(functools.partial(_run, layers), (input,), {})
    budget = _remembered(engine, memory_budget, layers)
    why = budget.why_not()
    if why:
        warn_once(
            ("layer budget", why), f"the memory_budget of checkpoint_sequential is ignored: {why}"
        )
    return budget.run(layers, input)


def _run(layers: Sequence[Layer], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


class _LayerBudget:
    """The budget of one chain, with the plans that were made for it."""

    def __init__(self, engine: EngineFunctions, memory_budget: int | float | str) -> None:
        self._budget = engine.Budget(memory_budget, self._plans_of)
        self._ends: list[int] = []

    def why_not(self) -> str:
        return self._budget.why_not()

    def run(self, layers: list[Layer], input: Any) -> Any:
        return self._budget.run(self._run, (layers, input))

    def _run(self, layers: list[Layer], value: Any) -> Any:
        self._ends = ends = []
        for layer in layers:
            value = layer(value)
            ends.append(self._budget.position)
        return value

    def _plans_of(self, trace: Trace) -> Plans:
        from ..plans.search import Search  # noqa: PLC0415  (the planner is loaded late)

        return Search(trace, self._ends)


class _ThreadChains(threading.local):
    def __init__(self) -> None:
        self.chains: OrderedDict[Any, _LayerBudget] = OrderedDict()


_threads = _ThreadChains()


def _remembered(
    engine: EngineFunctions, memory_budget: int | float | str, layers: list[Layer]
) -> _LayerBudget:
    """Return the budget of a chain that ran before in this thread, or a new one.

    Chains that are taken for each other do no harm: plans are recognised by the ops that run.
    """
    chains = _threads.chains
    key = (id(engine), memory_budget, *map(_identity, layers))
    found = chains.pop(key, None)
    if found is None:
        found = _LayerBudget(engine, memory_budget)
    chains[key] = found
    if len(chains) > _MANY:
        chains.popitem(last=False)
    return found


def _identity(layer: Any) -> Any:
    """Return what stands for a layer from call to call, without keeping its arrays alive."""
    if is_torch_module(layer):
        return weakref.ref(layer)
    if isinstance(layer, functools.partial):
        return _identity(layer.func)
    return getattr(layer, "__code__", None) or type(layer)
