"""Templates of derivative rules: the rules without the arrays that they hold.

A rule of autograd is a closure: `lambda g: g * y` holds `y`. To drop `y` and have it computed
again, the closure is copied with a placeholder for `y`, and copied once more with `y` in backward.
Whatever else it holds (shapes, numbers that were computed from `y`) stays what it was. The original
is never changed: other closures may share its cells.

A closure that holds arrays which are no operands, or in a way that is not understood, is made anew
in backward, from all operands and the result.
"""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any, NamedTuple

import numpy as np
from autograd.core import VSpace

from ..views import ViewChain
from .constants import SMALL

__all__ = [
    "NotUnderstoodError",
    "Placeholder",
    "filled",
    "operands_in",
    "shape_only",
    "template_of",
]

_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), slice, type(...), type, range),
    *(np.generic, np.dtype, np.ufunc, VSpace, ViewChain),
)


class NotUnderstoodError(Exception):
    """A rule holds something that may hold arrays."""


class Placeholder(NamedTuple):
    """Stands for an operand or a result in a template."""

    operand: Any


class _Closure(NamedTuple):
    """A function whose cells hold placeholders."""

    # Its parts, not the function itself: that would hold the arrays.
    code: Any
    scope: dict[str, Any]
    name: str
    defaults: Any
    keyword_defaults: Any
    cells: tuple[Any, ...]  # the original ones, or a `_Cell`


class _Cell(NamedTuple):
    key: int  # the same for the same cell
    content: Any


_ZEROS = bytes(64)


def shape_only(array: Any) -> Any:
    """Return an array of zeros of the same shape and type that takes no memory."""
    return np.ndarray(array.shape, array.dtype, _ZEROS, 0, (0,) * array.ndim)


def _is_shape_only(array: Any) -> bool:
    return array.base is _ZEROS


def template_of(rule: Any, operands: dict[int, Any]) -> Any:
    """Return a rule with placeholders for `operands`, which are given by the ids of arrays.

    Raises:
        NotUnderstoodError: It holds other arrays, or something that is not understood.
    """
    return _emptied(rule, operands, {})


def _emptied(value: Any, operands: dict[int, Any], seen: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is np.ndarray or (kind in (tuple, list) and id(value) in operands):
        return _placeholder(value, operands)
    if kind is FunctionType:
        return _closure(value, operands, seen)
    if kind is list or kind is dict:  # which the program may change later: always a copy
        if kind is list:
            return [_emptied(part, operands, seen) for part in value] if value else value
        return {key: _emptied(part, operands, seen) for key, part in value.items()} or value
    if kind is tuple:
        parts = [_emptied(part, operands, seen) for part in value]
        same = all(a is b for a, b in zip(parts, value, strict=True))
        return value if same else tuple(parts)
    if isinstance(value, _ATOMS) or getattr(value, "_is_autograd_primitive", False):
        return value
    if callable(value) and getattr(value, "__closure__", None) is None and not _has_state(value):
        return value  # a builtin function
    raise NotUnderstoodError(type(value).__name__)


def _has_state(value: Any) -> bool:
    return getattr(value, "__self__", None) is not None and not isinstance(value.__self__, type(np))


def _placeholder(array: Any, operands: dict[int, Any]) -> Any:
    if id(array) in operands:
        return Placeholder(operands[id(array)])
    if not _is_shape_only(array) and (array.nbytes > SMALL or array.base is not None):
        raise NotUnderstoodError("an array of its own")
    return array


def _closure(function: FunctionType, operands: dict[int, Any], seen: dict[int, Any]) -> Any:
    if id(function) in seen:
        if seen[id(function)] is None:
            raise NotUnderstoodError("a function that refers to itself")
        return seen[id(function)]
    seen[id(function)] = None
    emptied = _emptied_function(function, operands, seen)
    seen[id(function)] = emptied
    return emptied


def _emptied_function(
    function: FunctionType, operands: dict[int, Any], seen: dict[int, Any]
) -> Any:
    if getattr(function, "_is_autograd_primitive", False):
        return function
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if _emptied(default, operands, seen) is not default:
            raise NotUnderstoodError("an operand in a default")
    if function.__closure__ is None:
        return function
    cells: list[Any] = []
    for cell in function.__closure__:
        try:
            content = cell.cell_contents
        except ValueError as error:  # it has no value yet
            raise NotUnderstoodError("an empty cell") from error
        emptied = _emptied(content, operands, seen)
        cells.append(cell if emptied is content else _Cell(id(cell), emptied))
    if not any(type(cell) is _Cell for cell in cells):
        return function
    return _Closure(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__kwdefaults__,
        tuple(cells),
    )


def filled(template: Any, get: Any, cells: dict[int, Any] | None = None) -> Any:
    """Return a rule from its template; `get(operand)` returns what its placeholders stand for."""
    kind = type(template)
    cells = {} if cells is None else cells
    if kind is Placeholder:
        return get(template.operand)
    if kind is _Closure:
        return _filled_closure(template, get, cells)
    if kind is tuple or kind is list:
        return kind(filled(part, get, cells) for part in template)
    if kind is dict:
        return {key: filled(part, get, cells) for key, part in template.items()}
    return template


def _filled_closure(template: _Closure, get: Any, cells: dict[int, Any]) -> Any:
    closure = []
    for cell in template.cells:
        if type(cell) is not _Cell:
            closure.append(cell)
            continue
        if cell.key not in cells:
            cells[cell.key] = CellType(filled(cell.content, get, cells))
        closure.append(cells[cell.key])
    code, scope, name, defaults, keyword_defaults, _ = template
    function = FunctionType(code, scope, name, defaults, tuple(closure))
    function.__kwdefaults__ = keyword_defaults
    return function


def operands_in(template: Any) -> list[Any]:
    """Return the operands that a template has placeholders for, each once."""
    found: dict[int, Any] = {}
    filled(template, lambda operand: found.setdefault(id(operand), operand))
    return list(found.values())
