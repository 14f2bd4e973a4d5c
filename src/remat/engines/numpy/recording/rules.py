"""A derivative rule that gets its arrays when backward comes to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autograd.core import primitive_vjps

from .constants import Constant
from .records import Op, Value
from .rule_templates import NotUnderstoodError, filled, operands_in, template_of

if TYPE_CHECKING:
    from .region import Region

__all__ = ["Rule", "checked_rule", "make_rule"]


class Rule:
    """What stands in a node in place of autograd's closure: `rule(gradient)`."""

    __slots__ = ("__weakref__", "_template", "due_in", "needs", "number", "region", "stage")

    def __init__(self, region: Region, template: Any, needs: list[Value], number: int) -> None:
        self.region = region
        self.needs = needs
        self.number = number  # of its op
        self.stage = 0
        self.due_in: object = None  # the last backward pass that was to come to it
        self._template = template
        region.add_pending()

    def __call__(self, gradient: Any) -> tuple[Any, ...]:
        self.region.provide(self)
        try:
            return tuple(filled(self._template, _array_of)(gradient))
        finally:
            self.region.used(self)

    def __del__(self) -> None:
        self.region.end_pending()


class RemadeRule(Rule):
    """A rule that holds more than operands: made again from all of them."""

    __slots__ = ("_argnums", "_op", "_value")

    def __init__(self, region: Region, op: Op, value: Value, argnums: Any) -> None:
        super().__init__(region, None, list(dict.fromkeys([*op.reads, value])), op.number)
        self._op = op
        self._value = value
        self._argnums = argnums

    def __call__(self, gradient: Any) -> tuple[Any, ...]:
        self.region.provide(self)
        try:
            args, keywords = self._op.arguments(_array_of)
            maker = primitive_vjps[self._op.function]
            rule = maker(self._argnums, self._value.array, tuple(args), keywords)
            return tuple(rule(gradient))
        finally:
            self.region.used(self)


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
    region: Region, closure: Any, op: Op, value: Value, argnums: Any, operands: dict[int, Any]
) -> Any:
    """Return what takes the place of a rule: itself, if it holds no operand."""
    try:
        template = template_of(closure, operands)
    except NotUnderstoodError:
        return RemadeRule(region, op, value, argnums)
    if template is closure:
        return closure
    needs = [operand for operand in operands_in(template) if type(operand) is Value]
    return Rule(region, template, needs, op.number)


def _array_of(operand: Value | Constant) -> Any:
    if type(operand) is Value:
        array = operand.array
        assert array is not None, "a value is neither held nor was it computed again"
        return array
    return operand.array()
