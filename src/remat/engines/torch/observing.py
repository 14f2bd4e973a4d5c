"""A dispatch mode that observes ops and changes nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

from .backend import TorchDispatchMode
from .schema import SchemaTraits, call_in_mode, traits_of

__all__ = ["ObservingMode"]


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
