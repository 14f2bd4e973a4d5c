"""Checks of arguments that all schedules share."""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import SupportsIndex

__all__ = ["amount", "keep_whole", "whole_number"]


def whole_number(value: SupportsIndex, name: str, *, least: int = 0) -> int:
    """Return `value` as an int of at least `least`, or say which argument is wrong and how."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} is a whole number, got {value!r}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} is a whole number, got {value!r}")
    if number < least:
        raise ValueError(f"{name} is at least {least}, got {number}")
    return number


def keep_whole(schedule: object, **least: int) -> None:
    """Check fields of a frozen dataclass; what is kept are Python ints, which never overflow."""
    for name, value in least.items():
        number = whole_number(getattr(schedule, name), name, least=value)
        object.__setattr__(schedule, name, number)


def amount(value: float, name: str, what: str) -> float:
    """Return a finite number of at least 0, or say which argument is wrong and how."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {what}, got {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {what} of at least 0, got {value!r}")
    return value
