"""Checks of arguments, and their messages: what each must be, and what was given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from numbers import Real
from operator import index
from typing import Any, SupportsIndex, TypeVar

from ..sizes import did_you_mean, shown

__all__ = [
    "amount",
    "function",
    "keep_whole",
    "one_of",
    "options_by_name",
    "true_or_false",
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


def true_or_false(value: object, name: str) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def function(value: object, name: str, what: str = "a function") -> None:
    if not callable(value):
        raise TypeError(f"{name} must be {what}, got {shown(value)}")


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
            called = trace is None or trace.tb_next is not None  # then it is not of this call
            unknown = () if called else kwargs.keys() - inspect.signature(function).parameters
            if not unknown or "Did you mean" in str(error):
                raise
            near = did_you_mean(next(iter(unknown)), inspect.signature(function).parameters)
            error.args = (f"{error}{near}",)
            raise

    return call  # type: ignore[return-value]
