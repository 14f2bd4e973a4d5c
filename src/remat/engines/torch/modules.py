"""Modules whose calls are checkpointed: what `checkpoint(module)` returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["checkpointed_module"]

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def checkpointed_module(module: nn.Module, run: Run) -> nn.Module:
    """Return a module with the same state as `module` whose calls are `run(call, args, kwargs)`.

    Its class is a subclass of the module's class, and it shares the `__dict__`: parameters,
    buffers, hooks and attributes are the same objects. Copies and pickles are checkpointed, too.
    """
    copy: nn.Module = _make(type(module), run)
    object.__setattr__(copy, "__dict__", module.__dict__)
    return copy


def _make(cls: type[nn.Module], run: Run) -> Any:
    copy: Any = object.__new__(_checkpointed_class(cls))  # type: ignore[arg-type]
    object.__setattr__(copy, "_remat_run", run)
    return copy


class _PlainCall:
    """The original `__call__` of a module, named after its class."""

    def __init__(self, cls: Any, module: nn.Module) -> None:
        self.__qualname__ = cls.__qualname__
        self.__self__ = module
        self._call = cls.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.__self__, *args, **kwargs)


@functools.cache
def _checkpointed_class(cls: Any) -> type[nn.Module]:
    """Return a subclass with checkpointed calls and the name of the class."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._remat_run(_PlainCall(cls, self), args, kwargs)

    def reduce(self: Any, _: Any = None) -> Any:
        return _make, (cls, self._remat_run), self.__dict__

    body = {
        "__slots__": ("_remat_run",),  # not in `__dict__`, which belongs to the module
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__call__": call,
        "__reduce_ex__": reduce,
    }
    return type(cls.__name__, (cls,), body)
