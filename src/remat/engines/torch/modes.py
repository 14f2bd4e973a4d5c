"""Dispatch modes that only observe, and those of the program that may change what ops give.

A region records the results of ops under the modes around it, but a replay runs without modes. So a
mode that changes the results of ops would be missing in the replay.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .backend import (
    OBSERVING_MODES,
    TorchDispatchMode,
    count_dispatch_modes,
    dispatch_mode_stack,
)
from .schema import SchemaTraits, call_in_mode, traits_of

__all__ = ["ObservingMode", "changing_mode", "why_it_counts"]


class ObservingMode(TorchDispatchMode):
    """Calls `ran` after each op. A region around it records the op as if there were no mode."""

    remat_looks_on = True
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # avoids a wrapper around every op that disables the compiler

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled; its ops are not seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        traits, kwargs = traits_of(func), kwargs or {}
        out = self.call(traits, args, kwargs)
        self.ran(traits, args, kwargs, out)
        return out

    def call(self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_in_mode(traits, partial(traits.call, *args, **kwargs))

    def ran(
        self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        raise NotImplementedError


def changing_mode() -> Any:
    """Return an active dispatch mode that may change the results of ops, or None."""
    if not count_dispatch_modes():
        return None
    return next((m for m in dispatch_mode_stack() if not _only_observes(m)), None)


def _only_observes(mode: Any) -> bool:
    kind = type(mode)
    return (
        getattr(kind, "remat_looks_on", False)
        or kind.__module__ in OBSERVING_MODES
        or kind.is_infra_mode()  # fake and functional tensors, which have no memory
    )


def why_it_counts(mode: Any) -> str:
    name = f"{type(mode).__module__}.{type(mode).__qualname__}"
    return (
        f"the dispatch mode {name} is active around it and may change the results of ops, which a "
        "recomputation would miss. Enter it inside of the region, or, if it only observes, set "
        "remat_looks_on = True on its class"
    )
