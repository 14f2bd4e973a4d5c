"""Modules whose calls are checkpointed: what `checkpoint(module)` returns, what `apply` changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

from ...errors import UnsupportedError
from .budget.forward import BudgetedForward, budgeted_forward_of, restore_forward

__all__ = ["CheckpointedForward", "applied_to", "apply_to", "checkpointed_module", "remove_from"]

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


# -- in place --------------------------------------------------------------------------------------


class CheckpointedForward:
    """The forward of a module, checkpointed.

    It is an attribute of the module, in front of its class's method: the module stays the same
    object of the same class. Copies and pickles of the module are checkpointed, too.
    """

    def __init__(self, forward: Callable[..., Any], run: Run) -> None:
        self.__wrapped__ = forward
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.__wrapped__, args, kwargs)

    @property
    def __code__(self) -> CodeType:  # torch.export reads it
        code: CodeType = self.__wrapped__.__code__
        return code

    def __reduce__(self) -> Any:
        return CheckpointedForward, (self.__wrapped__, self.run)

    def __repr__(self) -> str:
        return f"<checkpointed forward, {self.run!r}>"


_OURS = (CheckpointedForward, BudgetedForward)


def apply_to(
    layers: dict[str, nn.Module], run: Callable[[str], Run], skipped: dict[str, nn.Module]
) -> None:
    """Let the forward passes of these layers, given by path, be `run(path)(forward, args, kwargs)`.

    What was applied to a layer before is replaced; from those that are skipped it is removed.
    """
    for module in (*layers.values(), *skipped.values()):
        _refuse_covered(module, "applied again")
    for path, module in layers.items():
        _set_forward(module, CheckpointedForward(_without_ours(module), run(path)))
    for module in skipped.values():
        if any(isinstance(forward, CheckpointedForward) for forward in _chain(module)):
            _set_forward(module, _without_ours(module))


def _set_forward(module: nn.Module, forward: Any) -> None:
    budgeted = budgeted_forward_of(module)
    if budgeted is not None:
        budgeted.__wrapped__ = forward  # regions are inside of a pass with a budget
    elif isinstance(forward, CheckpointedForward):
        module.__dict__["forward"] = forward
    else:
        restore_forward(module, forward)


def remove_from(model: nn.Module) -> None:
    """Give all modules of a model the forward passes that they had."""
    modules = [module for module in model.modules() if "forward" in module.__dict__]
    for module in modules:
        _refuse_covered(module, "removed")
    for module in modules:
        if isinstance(module.__dict__["forward"], _OURS):
            restore_forward(module, _without_ours(module))


def applied_to(model: nn.Module) -> list[str]:
    """Return the paths of the modules whose forward passes are checkpointed."""
    return [
        path
        for path, module in model.named_modules()
        if any(isinstance(forward, CheckpointedForward) for forward in _chain(module))
    ]


def _without_ours(module: nn.Module) -> Any:
    """Return the forward of a module without what we have put in front of it."""
    forward: Any = module.forward
    while isinstance(forward, _OURS):
        forward = forward.__wrapped__
    return forward


def _chain(module: nn.Module) -> list[Any]:
    """Return what stands in front of the forward of a module, outermost first."""
    forward = module.__dict__.get("forward")
    found = []
    while forward is not None:
        found.append(forward)
        forward = getattr(forward, "__wrapped__", None)
    return found


def _refuse_covered(module: nn.Module, what: str) -> None:
    """Raise if another tool has put something in front of a forward of ours."""
    chain = _chain(module)
    ours = [isinstance(forward, _OURS) for forward in chain]
    if any(ours) and not ours[0]:
        raise UnsupportedError(
            f"checkpointing of {type(module).__name__} cannot be {what}: {chain[0]!r} was put in "
            "front of it since, as hooks of Accelerate are. Undo that first "
            "(accelerate.hooks.remove_hook_from_module), or call remat.remove before it"
        )
