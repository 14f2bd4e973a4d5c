"""Plain NumPy functions on traced arrays (the `__array_function__` protocol).

Three sources, in this order:
1. the functions in `rules/`, for what autograd lacks or gets wrong (lists of arrays,
   broadcasting in `where`, aliases that NumPy 2 added);
2. autograd's wrapper of the same function, if it has a derivative rule or needs none;
3. otherwise an error that names the function. Never a plain array in silence.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import autograd.numpy as anp
import autograd.numpy.fft
import autograd.numpy.linalg
import numpy as np
from autograd.core import VJPNode, primitive_vjps
from autograd.tracer import isbox, notrace_primitives

from ...errors import RematError, UnsupportedError

__all__ = [
    "as_array",
    "call",
    "fitting_error",
    "has_box",
    "memory_of",
    "numpy_functions",
    "plain",
    "positional",
    "refuse",
    "rule_for",
    "rules",
    "ufunc_method",
]

rules: dict[Any, Callable[..., Any]] = {}


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a NumPy function some of whose arguments are, or contain, traced arrays."""
    _refuse_options(func, args, kwargs)
    if kwargs.get("out", kwargs) is None:
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    rule = rules.get(func)
    wrapper = None if rule else _wrapper(func)
    if rule is None and wrapper is None:
        name = f"{func.__module__}.{func.__name__}".replace("numpy", "np")
        raise UnsupportedError(
            f"{name} is not supported on traced arrays; write it with other NumPy functions, or "
            "give it a rule with autograd.extend.primitive and defvjp"
        )
    try:
        if rule is not None:
            return rule(*args, **kwargs)
        assert wrapper is not None
        args, kwargs = positional(func, args, kwargs)
        result = wrapper(*map(as_array, args), **kwargs)
    except RematError:
        raise
    except Exception as error:
        raise fitting_error(func, args, kwargs, error) from error
    return _same_if_alias(result, args)


def fitting_error(func: Any, args: Any, kwargs: Any, error: Exception) -> Exception:
    """Return NumPy's own error, if it does not accept such arguments either."""
    try:
        func(*_plain_tree(args), **_plain_tree(kwargs))
    except Exception as own:
        return own
    reason = str(error) or str(error.__cause__ or type(error).__name__)
    return UnsupportedError(f"np.{func.__name__} is not supported with these arguments ({reason})")


def _plain_tree(value: Any) -> Any:
    """Return arguments with copies of arrays in place of boxes."""
    if isinstance(value, dict):
        return {key: _plain_tree(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain_tree, value))
    value = plain(value)
    return value.copy() if isinstance(value, np.ndarray) else value


def ufunc_method(ufunc: Any, method: str, inputs: Any, kwargs: Any) -> Any:
    """`np.add.reduce(x)` and its kind."""
    same = {
        (np.add, "reduce"): np.sum,
        (np.multiply, "reduce"): np.prod,
        (np.maximum, "reduce"): np.max,
        (np.minimum, "reduce"): np.min,
        (np.add, "accumulate"): np.cumsum,
    }.get((ufunc, method))
    if same is None:
        raise UnsupportedError(f"np.{ufunc.__name__}.{method} is not supported on traced arrays")
    if len(inputs) < 2:
        kwargs.setdefault("axis", 0)  # unlike np.sum, np.add.reduce goes over the first axis
    return call(same, inputs, kwargs)


def as_array(value: Any) -> Any:
    """Join traced values that stand in a list or tuple into one traced array."""
    return anp.array(value) if isinstance(value, list | tuple) and has_box(value) else value


def plain(value: Any) -> Any:
    """Look through the boxes."""
    while isbox(value):
        value = value._value
    return value


def memory_of(value: Any) -> Any:
    """Return the array that owns the memory which `value` looks at."""
    value = plain(value)
    while isinstance(getattr(value, "base", None), np.ndarray):
        value = value.base
    return value


def has_box(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(has_box, value))
    return bool(isbox(value))


@lru_cache(maxsize=512)
def _wrapper(func: Any) -> Callable[..., Any] | None:
    modules = {
        "numpy": anp,
        "numpy.linalg": autograd.numpy.linalg,
        "numpy.fft": autograd.numpy.fft,
    }
    module = modules.get(func.__module__)
    wrapper = getattr(module, func.__name__, None)
    known = wrapper in primitive_vjps or wrapper in notrace_primitives[VJPNode]
    return wrapper if known else None


@lru_cache(maxsize=512)
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


@lru_cache(maxsize=512)
def _names(func: Any) -> tuple[str, ...]:
    """Return the names of the arguments that may be given by position."""
    try:
        parameters = _signature(func).parameters.values()
    except ValueError:  # a C function without a signature
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in itertools.takewhile(lambda p: p.kind in by_position, parameters))


def positional(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Move traced keyword arguments to the front: autograd looks at positional ones only."""
    traced = [name for name, value in kwargs.items() if has_box(value)]
    if not traced:
        return args, kwargs
    names = _names(func)
    if not set(traced) <= set(names):
        raise UnsupportedError(f"np.{func.__name__}: pass {traced} by position")
    parameters, rest, given = _signature(func).parameters, dict(kwargs), list(args)
    for name in names[len(args) : max(map(names.index, traced)) + 1]:
        given.append(rest.pop(name, parameters[name].default))
    return tuple(given), rest


# Options that autograd's rules leave out of account, and what they may be nevertheless.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "out": (None,),
    "where": (True,),
    "initial": (None,),
    "order": ("C", "K", None),
    "correction": (None,),
    "mean": (None,),
    "casting": ("same_kind", "unsafe"),
    "subok": (False, True),
}


def _refuse_options(func: Any, args: Any, kwargs: Any) -> None:
    given = {**dict(zip(_names(func), args, strict=False)), **kwargs}
    for name, allowed in _OPTIONS.items():
        value = given.get(name, np._NoValue)
        is_word = isinstance(value, str | bool | type(None))
        if value is not np._NoValue and not (is_word and value in allowed):
            raise UnsupportedError(
                f"np.{func.__name__} is not supported with {name}={value!r}; leave {name} out"
            )
    dtype = given.get("dtype")
    if dtype is not None and np.dtype(dtype).kind not in "fc":
        raise UnsupportedError(f"np.{func.__name__} is not supported with dtype={dtype!r}")


def _same_if_alias(result: Any, args: Any) -> Any:
    """Where NumPy returns its argument itself (np.real of reals), so do we: it stays an alias."""
    for arg in args:
        if isbox(result) and isbox(arg) and result._value is arg._value:
            return arg
    return result


def rule_for(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(ours: Callable[..., Any]) -> Callable[..., Any]:
        for func in funcs:
            rules[func] = ours
        return ours

    return register


def numpy_functions(*names: str) -> list[Any]:
    """The functions of these names that this NumPy has."""
    found = []
    for name in names:
        function: Any = np
        for part in name.split("."):
            function = getattr(function, part, None)
        if function is not None:
            found.append(function)
    return found


def refuse(name: str, options: dict[str, Any]) -> None:
    unknown = [key for key, value in options.items() if value is not None]
    if unknown:
        raise UnsupportedError(f"np.{name} is supported without {', '.join(sorted(unknown))}")
