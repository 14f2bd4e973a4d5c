"""A derivative rule that gets its arrays when backward comes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from autograd.core import primitive_vjps

from ....core.records import Op, Value
from ....core.region import SavedTensor
from .constants import Constant, decode
from .rule_templates import NotUnderstoodError, filled, operands_in, template_of

__all__ = ["Rule", "checked_rule", "make_rule"]


# Returns what a rule holds instead of an array: a value that is held anyway, or a placeholder.
Pack = Callable[[Value], SavedTensor | Value]


class Rule:
    """What stands in a node in place of autograd's closure: `rule(gradient)`."""

    __slots__ = ("_saved", "_template")

    def __init__(self, pack: Pack, template: Any, needs: Iterable[Value]) -> None:
        self._saved = {value: pack(value) for value in needs}
        self._template = template

    def __call__(self, gradient: Any) -> tuple[Any, ...]:
        arrays = self._take()
        return tuple(filled(self._template, lambda operand: _array_of(operand, arrays))(gradient))

    def _take(self) -> dict[Value, Any]:
        return {value: _unpack(saved) for value, saved in self._saved.items()}


class RemadeRule(Rule):
    """A rule that holds more than operands: made again from all of them."""

    __slots__ = ("_argnums", "_op", "_value")

    def __init__(self, pack: Pack, op: Op, value: Value, function: Any, argnums: Any) -> None:
        super().__init__(pack, function, dict.fromkeys([*op.reads, value]))
        self._op = op
        self._value = value
        self._argnums = argnums

    def __call__(self, gradient: Any) -> tuple[Any, ...]:
        arrays = self._take()
        args = tuple(arrays[arg] if type(arg) is Value else decode(arg) for arg in self._op.args)
        keywords = decode(self._op.keywords) if self._op.keywords else {}
        maker = primitive_vjps[self._template]
        return tuple(maker(self._argnums, arrays[self._value], args, keywords)(gradient))


class CheckedRule:
    """A rule of an op outside of regions, that holds plain arrays which the program may change."""

    __slots__ = ("_closure", "_constants")

    def __init__(self, closure: Any, constants: list[Constant]) -> None:
        self._closure = closure
        self._constants = constants

    def __call__(self, gradient: Any) -> Any:
        for constant in self._constants:
            constant.array()
        return self._closure(gradient)


def checked_rule(closure: Any, constants: dict[int, Constant]) -> Any:
    """Return a rule that raises if plain arrays that it holds, by their ids, have changed."""
    try:
        held = operands_in(template_of(closure, constants))
    except NotUnderstoodError:
        held = list(constants.values())
    return CheckedRule(closure, held) if held else closure


def make_rule(
    pack: Pack,
    closure: Any,
    op: Op,
    value: Value,
    function: Any,
    argnums: Any,
    operands: dict[int, Any],
) -> Any:
    """Return what takes the place of a rule: itself, if it holds no operand."""
    try:
        template = template_of(closure, operands)
    except NotUnderstoodError:
        return RemadeRule(pack, op, value, function, argnums)
    if template is closure:
        return closure
    needs = (operand for operand in operands_in(template) if type(operand) is Value)
    return Rule(pack, template, needs)


def _unpack(saved: SavedTensor | Value) -> Any:
    if type(saved) is Value:
        assert saved.held is not None
        return saved.held.tensor
    return saved.take()


def _array_of(operand: Value | Constant, arrays: dict[Value, Any]) -> Any:
    return arrays[operand] if type(operand) is Value else operand.array()
