"""What `checkpoint(fn)` returns: a callable that runs `fn` as a checkpointed segment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

__all__ = ["CheckpointedFunction", "plain_function", "refuse_module_class"]

P = ParamSpec("P")
R = TypeVar("R")
_COPIED = ("__module__", "__name__", "__qualname__", "__doc__")
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class CheckpointedFunction(Generic[P, R]):
    """Calls a function as a checkpointed segment.

    Like `functools.partial` it can be copied and pickled; a deep copy of a bound method is bound to
    the copy of its object. Like a function it becomes a method as an attribute of a class.
    """

    def __init__(self, fn: Callable[P, R], run: Run) -> None:
        self.__wrapped__ = fn
        self._run = run
        for name in _COPIED:
            value = getattr(fn, name, None)
            if value is not None:
                setattr(self, name, value)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._run(self.__wrapped__, args, kwargs)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bind = getattr(self.__wrapped__, "__get__", None)
        bound = self.__wrapped__ if bind is None else bind(instance, owner)
        return self if bound is self.__wrapped__ else type(self)(bound, self._run)

    def __reduce__(self) -> Any:
        # By name, like a function, if the name resolves to this object.
        if _lookup(self.__module__, getattr(self, "__qualname__", "")) is self:
            return self.__qualname__
        return type(self), (self.__wrapped__, self._run)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CheckpointedFunction):
            return NotImplemented
        return bool(self.__wrapped__ == other.__wrapped__ and self._run == other._run)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return f"<checkpointed {self.__wrapped__!r}>"


def plain_function(fn: Any) -> Any:
    """Return the function inside a checkpointed one, or `fn` itself."""
    return fn.__wrapped__ if isinstance(fn, CheckpointedFunction) else fn


def refuse_module_class(value: Any, name: str) -> None:
    """Raise for a class of modules where a module is meant."""
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    if module is not None and isinstance(value, type) and issubclass(value, module):
        raise TypeError(
            f"{name} must be a module, got class {value.__name__}; make one: {value.__name__}(...)"
        )


def _lookup(module: str, qualified_name: str) -> Any:
    found: Any = sys.modules.get(module)
    for name in qualified_name.split("."):
        found = getattr(found, name, None)
    return found
