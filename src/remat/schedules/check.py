"""Checks of arguments, and their messages: what each must be, and what was given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from numbers import Real
from operator import index
from typing import Any, SupportsIndex, TypeVar, cast

from ..sizes import did_you_mean, shown

__all__ = [
    "amount",
    "keep_whole",
    "one_of",
    "options_by_name",
    "whole_number",
]

F = TypeVar("F", bound=Callable[..., Any])


def whole_number(value: SupportsIndex, name: str, *, least: int = 0) -> int:
    """Return `value` as an int of at least `least`, or say which argument is wrong and how."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {shown(value)}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def keep_whole(schedule: object, **least: int) -> None:
    """Check fields of a frozen dataclass; what is kept are Python ints, which never overflow."""
    for name, value in least.items():
        number = whole_number(getattr(schedule, name), name, least=value)
        object.__setattr__(schedule, name, number)


def amount(value: float, name: str, what: str) -> float:
    """Return a finite number of at least 0, or say which argument is wrong and how."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {what}, got {shown(value)}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be {what} of at least 0, got {shown(value)}")
    return value


def one_of(value: object, name: str, choices: Iterable[str], *, other: str = "") -> None:
    """Check a text that says which one of a few; `other` says what else there is."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        raise (ValueError if isinstance(value, str) else TypeError)(
            f"{name} must be one of {', '.join(map(repr, choices))}{other}, "
            f"got {shown(value)}{did_you_mean(value, choices)}"
        )


def options_by_name(function: F) -> F:
    """Decorate a function that takes options: for a misspelled one, say which one is near.

    (From 3.13 on Python says it itself.)
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            trace = error.__traceback__
            is_of_this_call = trace is not None and trace.tb_next is None
            if is_of_this_call and "Did you mean" not in str(error):
                known = inspect.signature(function).parameters
                unknown = [name for name in kwargs if name not in known]
                error.args = (f"{error}{''.join(did_you_mean(name, known) for name in unknown)}",)
            raise

    return cast(F, call)
