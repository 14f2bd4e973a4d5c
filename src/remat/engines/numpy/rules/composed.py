"""Functions whose derivative is that of a composition of others, while the value is NumPy's own.

A composition may round in another way than NumPy's function does, or give another dtype. So the
function is a primitive, whose value NumPy computes; only when backward comes to it is the
composition run, with a tape, and differentiated.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from autograd.core import defvjp_argnums
from autograd.extend import primitive
from autograd.tracer import isbox

from ....errors import RematError, UnsupportedError
from ..array_function import as_array, positional, rules
from ..tape import record, zeros_like

__all__ = ["composed", "composed_of_list"]

_Function = Callable[..., Any]


def composed(*functions: Any, check: _Function | None = None) -> Callable[[_Function], _Function]:
    """Register a composition for functions of NumPy; `check` refuses arguments at once."""

    def register(composition: _Function) -> _Function:
        for function in functions:
            rules[function] = _rule(function, composition, check)
        return composition

    return register


def composed_of_list(function: Any) -> Callable[[_Function], _Function]:
    """Register a composition for a function whose only argument is a sequence of arrays."""

    def register(composition: _Function) -> _Function:
        def of_arrays(*arrays: Any) -> Any:
            return function(arrays)

        ours = _with_composed_rule(of_arrays, function, lambda *arrays: composition(arrays))

        def rule(arrays: Sequence[Any]) -> Any:
            return ours(*map(as_array, arrays))

        rules[function] = rule
        return composition

    return register


def _rule(function: Any, composition: _Function, check: _Function | None) -> _Function:
    signature = inspect.signature(composition)
    ours = _with_composed_rule(function, function, composition)

    def rule(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)  # raises if it lacks an option
        if check is not None:
            check(*args, **kwargs)
        args, kwargs = positional(function, args, kwargs)
        args = tuple(map(as_array, args))
        return ours(*args, **kwargs) if any(map(isbox, args)) else composition(*args, **kwargs)

    return rule


def _with_composed_rule(function: Any, named: Any, composition: _Function) -> Any:
    def value(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    ours = primitive(functools.wraps(named)(value))

    def maker(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Callable[[Any], Any]:
        return lambda g: _go_back(composition, argnums, args, kwargs, g)

    defvjp_argnums(ours, maker)
    return ours


def _go_back(composition: _Function, argnums: Any, args: Any, kwargs: Any, g: Any) -> Any:
    """Run the composition with a tape, and pull a gradient back through it."""

    def run(boxes: list[Any]) -> list[Any]:
        given = list(args)
        for argnum, box in zip(argnums, boxes, strict=True):
            given[argnum] = box
        return [composition(*given, **kwargs)]

    inputs = [args[argnum] for argnum in argnums]
    try:
        recording = record(run, inputs, [True] * len(inputs))
    except RematError:
        raise
    except Exception as error:  # NumPy accepts what the composition does not
        name = composition.__name__.strip("_")
        raise UnsupportedError(
            f"np.{name} is not supported with these arguments ({error})"
        ) from error
    sums = recording.go_back([g], once=not isbox(g))
    pairs = zip(inputs, sums, strict=True)
    return tuple(zeros_like(x) if total is None else total[0] for x, total in pairs)
