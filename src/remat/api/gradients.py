"""Gradients of plain functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import trees
from ..engines.locate import engine_for
from ..schedules.check import options_by_name
from ..sizes import counted, shown
from .budgets import GradientBudget

__all__ = ["grad", "value_and_grad"]


@options_by_name
def grad(
    f: Callable[..., Any],
    wrt: int | tuple[int, ...] = 0,
    *,
    memory_budget: int | float | str | None = None,
) -> Callable[..., Any]:
    """Return a function that computes the gradient of `f`.

    `wrt` is the position of the argument to differentiate by (any pytree), or a tuple of
    positions: then the gradients come as a tuple. An output that is not a scalar is seeded with
    ones, or with `init_grad=`, a keyword of the returned function, in the structure of the output.
    A gradient has the type of its argument, and memory of its own.

    With `memory_budget` (bytes, text such as "64MB", or a fraction of what a plain pass holds) `f`
    is checkpointed automatically: the first call is recorded and planned, and runs `f`'s ops once
    more; later ones follow the plan. Gradients stay the same, bit for bit.

    >>> import numpy as np
    >>> dx, dy = grad(lambda x, y: np.sum(x**2 * y), wrt=(0, 1))(np.array([1.0, 2.0]), 3.0)
    >>> dx, float(dy)
    (array([ 6., 12.]), 5.0)
    """
    positions, budget = _positions(f, wrt), GradientBudget(memory_budget)

    @functools.wraps(f, updated=())
    def gradient(*args: Any, init_grad: Any = None, **kwargs: Any) -> Any:
        gradients = _evaluate(f, positions, args, kwargs, init_grad, budget)[1]
        return tuple(gradients) if isinstance(wrt, tuple) else gradients[0]

    return gradient


@options_by_name
def value_and_grad(
    f: Callable[..., Any],
    wrt: int | tuple[int, ...] = 0,
    *,
    memory_budget: int | float | str | None = None,
) -> Callable[..., Any]:
    """Return a function that computes the value and the gradient of `f`; see `grad`.

    >>> import numpy as np
    >>> value, gradient = value_and_grad(np.sum)(np.array([1.0, 2.0]))
    >>> float(value), gradient
    (3.0, array([1., 1.]))
    """
    positions, budget = _positions(f, wrt), GradientBudget(memory_budget)

    @functools.wraps(f, updated=())
    def value_and_gradient(*args: Any, init_grad: Any = None, **kwargs: Any) -> Any:
        value, gradients = _evaluate(f, positions, args, kwargs, init_grad, budget)
        return value, tuple(gradients) if isinstance(wrt, tuple) else gradients[0]

    return value_and_gradient


def _positions(f: Callable[..., Any], wrt: int | tuple[int, ...]) -> tuple[int, ...]:
    if not callable(f):
        raise TypeError(f"f must be a function, got {shown(f)}")
    positions = wrt if isinstance(wrt, tuple) else (wrt,)
    if not positions or any(isinstance(p, bool) or not isinstance(p, int) for p in positions):
        raise TypeError(
            f"wrt must be the position of an argument, or a tuple of them, got {shown(wrt)}"
        )
    return positions


def _evaluate(
    f: Callable[..., Any],
    positions: tuple[int, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    init_grad: Any,
    budget: GradientBudget,
) -> tuple[Any, list[Any]]:
    for position in positions:
        if not -len(args) <= position < len(args):
            raise ValueError(
                f"wrt must be the position of an argument, got {position} for a call with "
                f"{counted(len(args), 'positional argument')}"
            )
    places = [position % len(args) for position in positions]
    if len(set(places)) < len(places):
        raise ValueError(f"wrt must name each argument once, got {positions!r}")
    engine = engine_for(leaf for place in places for leaf in trees.flatten(args[place])[0])
    with budget.within(engine):
        value, gradients = engine.value_and_grad(_checked(f), places, args, kwargs, init_grad)
    return value, gradients


def _checked(f: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what has no gradient: a function that returns None has forgotten its `return`."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        output = f(*args, **kwargs)
        if not any(map(_is_numeric, trees.flatten(output)[0])):
            name = getattr(f, "__name__", type(f).__name__)
            raise TypeError(
                f"{name} returned {_shown(output)}, which holds no number and no array of numbers: "
                "there is nothing to differentiate; return a number, an array, or a tuple, list "
                "or dict of them"
            )
        return output

    return checked


def _is_numeric(leaf: Any) -> bool:
    kind = getattr(getattr(leaf, "dtype", None), "kind", None)
    return isinstance(leaf, int | float | complex) or (
        hasattr(leaf, "dtype") and kind not in ("O", "S", "U", "V", "M", "m", "T")
    )


def _shown(output: Any) -> str:
    return "None" if output is None else f"{shown(output)} ({type(output).__name__})"
