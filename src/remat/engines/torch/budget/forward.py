"""Models whose forward pass keeps to a budget."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from .... import trees
from ....errors import UnsupportedError
from ....plans.planner import Planner
from ....sizes import shown
from ..backend import never_compiled
from .manager import TorchBudget, run_within

__all__ = ["BudgetedForward", "budgeted_forward_of", "restore_forward", "set_budget"]


_MANY = 1000  # calls that are known to need nothing
_DEVICES = ("cpu", "cuda", "xpu", "mps")  # that autocast is switched on for


class BudgetedForward:
    """The forward of a module within a memory budget.

    It is an attribute of the module, in front of its class's method: the module stays the same
    object of the same class. Copies and pickles of the module keep to the budget, too, and make
    plans of their own.
    """

    def __init__(self, forward: Callable[..., Any], budget: TorchBudget) -> None:
        self.__wrapped__ = forward
        self.budget = budget
        self._plain: set[Any] = set()  # calls for which nothing has to be recomputed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            return self.__wrapped__(*args, **kwargs)  # an exported graph has no backward to plan
        return self._within_budget(args, kwargs)

    def _within_budget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        budget = self.budget
        if not budget.can_begin():
            return self.__wrapped__(*args, **kwargs)
        if self._plain and not self._plain.isdisjoint(self._calls(args, kwargs)):
            return self.__wrapped__(*args, **kwargs)
        # In eval mode a backward may never come.
        is_training = getattr(getattr(self.__wrapped__, "__self__", None), "training", True)
        result = run_within(budget, self.__wrapped__, args, kwargs, plans=is_training)
        if not budget.has_backward:
            self._plain.add(self._calls(args, kwargs)[1])
        elif is_training and budget.planned and budget.planned[0].needs_nothing:
            self._plain.add(self._calls(args, kwargs)[0])
        if len(self._plain) > _MANY:
            self._plain.clear()
        return result

    def _calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return what a call is known by, and all calls with gradients of the same things.

        What is frozen is so for inputs of all shapes.
        """
        modes = _modes(self.__wrapped__)
        return (modes, _shapes(args, kwargs)), (modes, _gradients(args, kwargs))

    @property
    def __code__(self) -> CodeType:  # torch.export reads it
        code: CodeType = self.__wrapped__.__code__
        return code

    def __reduce__(self) -> Any:
        return BudgetedForward, (self.__wrapped__, self.budget)

    def __repr__(self) -> str:
        return f"<forward within {self.budget!r}>"


def set_budget(
    module: nn.Module, memory_budget: int | float | str | None, planner: Planner
) -> nn.Module:
    """Let the forward pass of a module keep to a budget; None takes that back."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {shown(module)}")
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UnsupportedError(
            f"a budget is for the model inside of {type(module).__name__}: call "
            "auto_checkpoint(model, ...) before wrapping it"
        )
    current = module.__dict__.get("forward")
    if isinstance(current, BudgetedForward):
        restore_forward(module, current.__wrapped__)
    if memory_budget is not None:
        module.__dict__["forward"] = BudgetedForward(
            module.forward, TorchBudget(memory_budget, planner)
        )
    return module


def restore_forward(module: nn.Module, forward: Any) -> None:
    """Give a module the forward that it had before something was put in front of it."""
    if getattr(forward, "__self__", None) is module and hasattr(forward, "__func__"):
        del module.__dict__["forward"]  # the method of its class is there again
    else:
        module.__dict__["forward"] = forward


def budgeted_forward_of(module: nn.Module) -> BudgetedForward | None:
    """Return the forward of a module, if it keeps to a budget."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, BudgetedForward) else None


def _modes(forward: Callable[..., Any]) -> Any:
    """Return what a user may switch between calls: training, gradients of parameters, autocast."""
    module = getattr(forward, "__self__", None)
    if not isinstance(module, nn.Module):
        return object()  # not known: never the same
    return (
        tuple(each.training for each in module.modules()),
        tuple(parameter.requires_grad for parameter in module.parameters()),
        tuple(map(torch.is_autocast_enabled, _DEVICES)),
    )


def _shapes(args: Any, kwargs: Any) -> Any:
    """Return what tells calls apart: shapes and types of tensors, and all other values.

    Nested tensors have no shape: calls with them are never the same.
    """
    leaves, structure = trees.flatten((args, kwargs))
    return structure, tuple(
        (object() if leaf.is_nested else leaf.shape, leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, int | float | str | bool | None)
        else type(leaf)
        for leaf in leaves
    )


def _gradients(args: Any, kwargs: Any) -> Any:
    """Return which inputs require grad."""
    leaves, _ = trees.flatten((args, kwargs))
    return tuple(leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor))


never_compiled(BudgetedForward._within_budget)
