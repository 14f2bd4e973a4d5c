"""From values to the engine that knows them, without importing anything to find out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any, Protocol, cast

from ..errors import UnsupportedError

__all__ = ["Engine", "engine_for"]


class Engine(Protocol):
    """What an engine brings; a module can be one."""

    def run_loop(self, function: Any, state: Any, options: Any, **keywords: Any) -> Any: ...

    def run_while(
        self, condition: Any, function: Any, state: Any, *args: Any, **keywords: Any
    ) -> Any: ...

    def run_segment(self, function: Any, args: Any, kwargs: Any, **keywords: Any) -> Any: ...

    def value_and_grad(
        self, function: Any, wrt: Any, args: Any, kwargs: Any, init_grad: Any
    ) -> Any: ...


# The array type that tells a framework, looked up only if the framework has been imported.
_FOREIGN = {"torch": "Tensor", "jax": "Array"}


def engine_for(leaves: Iterable[Any]) -> Engine:
    """Return the engine for these values: NumPy unless one of them belongs to another framework."""
    leaves = list(leaves)
    for framework, array in _FOREIGN.items():
        kind = getattr(sys.modules.get(framework), array, None)
        if kind is not None and any(isinstance(leaf, kind) for leaf in leaves):
            raise UnsupportedError(
                f"this version of remat has no engine for {framework} yet; convert to NumPy "
                "arrays, or use a version that lists it in its CHANGELOG"
            )
    return cast(Engine, importlib.import_module("remat.engines.numpy"))
