"""How people write bytes ("2GB", 4096, fractions of a whole), and how messages write values."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterable
from fractions import Fraction
from numbers import Integral, Number
from types import BuiltinFunctionType, ModuleType
from typing import Any

__all__ = ["counted", "did_you_mean", "format_bytes", "parse_budget", "parse_bytes", "shown"]

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = _DECIMAL | _BINARY
# As text these are no budgets.
_FRACTION = re.compile(r"\s*(0?\.[0-9]+|1\.0*|[0-9]+\.?[0-9]*(?=\s*%))\s*(%?)\s*")
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, *, name: str = "bytes") -> int:
    """Read a number of bytes: an int, or text with a decimal or binary unit.

    Without a unit it is a whole number: "0.1" is more likely a fraction of something.

    >>> parse_bytes("2GB"), parse_bytes("512MiB"), parse_bytes(4096)
    (2000000000, 536870912, 4096)
    """
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise TypeError(
            f'{name} must be bytes as an int or text such as "64MB", got {shown(value)}'
        )
    if isinstance(value, Integral):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
        return int(value)
    match = _TEXT.fullmatch(value)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f'{name} must be a number with a unit such as "64MB" or "2GiB", got {shown(value)}'
        )
    if unit == 1 and not match[1].isdigit():
        raise ValueError(
            f'{name} must be a whole number of bytes, or have a unit such as "64MB", got {value!r}'
        )
    return math.floor(Fraction(match[1]) * unit)  # exact: floats would lose the last bytes


def parse_budget(value: int | float | str, *, whole: int, name: str = "memory_budget") -> int:
    """Read a budget: bytes, or a float in (0, 1] as the fraction of `whole` bytes.

    >>> parse_budget(0.25, whole=1000), parse_budget("1KB", whole=10)
    (250, 1000)
    """
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(
                f"{name} as a float must be a fraction in (0, 1], got {value!r}; give bytes as an "
                'int or as text such as "64MB"'
            )
        return math.floor(value * whole)
    if isinstance(value, str) and (fraction := _FRACTION.fullmatch(value)):
        share = float(fraction[1]) / (100 if fraction[2] else 1)
        raise ValueError(
            f"{name} must be a float if it is a fraction, got the text {value!r}; write {share:g}"
        )
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise TypeError(
            f'{name} must be bytes as an int, text such as "64MB", or a fraction as a float in '
            f"(0, 1], got {shown(value)}"
        )
    return parse_bytes(value, name=name)


def format_bytes(count: float) -> str:
    """Write bytes for people.

    >>> format_bytes(0), format_bytes(1536), format_bytes(2_500_000)
    ('0 B', '1.5 KB', '2.5 MB')
    """
    sign = "-" if count < 0 else ""
    count = abs(count)
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        # Why 0.9995? What would be shown as "1000.0 KB" is shown as "1.0 MB".
        if count >= size * 0.9995:
            return f"{sign}{count / size:.1f} {unit}"
    return f"{sign}{count:.0f} B"


def counted(count: int, what: str) -> str:
    """Write a number of things.

    >>> counted(1, "step"), counted(1000, "step")
    ('1 step', '1,000 steps')
    """
    return f"{count:,} {what}" + "s" * (count != 1)


def shown(value: object) -> str:
    """Write a value that was given for a message: on one short line, whatever it is.

    >>> import numpy as np
    >>> shown("2 apples"), shown([np.zeros((500, 500))] * 9), shown(np.zeros), shown(dict)
    ("'2 apples'", '[float64 ndarray of shape (500, 500), ...]', 'function zeros', 'class dict')
    """
    return _SHORT.repr(value)


class _Short(reprlib.Repr):
    """Short texts of values; arrays, functions and large objects are named, not printed."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlist, self.maxtuple, self.maxdict = 2, 60, 1, 3, 2

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, type | ModuleType):
            return f"{'class' if isinstance(x, type) else 'module'} {x.__name__}"
        kind = type(x).__name__
        if isinstance(getattr(x, "shape", None), tuple) and not isinstance(x, Number):
            dtype = str(getattr(x, "dtype", "")).removeprefix("torch.")
            return f"{dtype} {kind} of shape {tuple(x.shape)}".lstrip()
        if callable(x) and hasattr(x, "__qualname__"):
            name = x.__name__ if isinstance(x, BuiltinFunctionType) else x.__qualname__
            return f"function {name}"
        try:
            text = repr(x)
        except Exception:  # a message about a value must not fail
            text = "\n"
        short = "\n" not in text and len(text) <= _LONGEST and " at 0x" not in text
        return text if short else f"{kind} object"


_LONGEST = 80  # of the text of a value, in characters
_SHORT = _Short()


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return a question to end a message with, if what was given is nearly something known.

    >>> did_you_mean("revlove", ["auto", "revolve"]), did_you_mean("all", ["auto", "revolve"])
    ("; did you mean 'revolve'?", '')
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), names, 1) if isinstance(given, str) else []
    return f"; did you mean {names[near[0]]!r}?" if near else ""
