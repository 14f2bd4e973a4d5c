"""Arguments of the command line: help texts, and how numbers and sizes are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..sizes import parse_bytes

__all__ = ["at_least", "cost", "default", "size", "size_or_fraction", "texts"]


def texts(description: str, examples: str) -> dict[str, Any]:
    return {
        "description": description,
        "epilog": examples,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,  # an option added later must not change what a script means
    }


def default(text: str) -> str:
    return f"{text} (default: %(default)s)"


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        wanted = f"a whole number of at least {least}, got {text!r}"
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(wanted) from None
        if number < least:
            raise argparse.ArgumentTypeError(wanted)
        return number

    return parse


def size(text: str) -> int:
    try:
        return parse_bytes(text, name="a size")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size_or_fraction(text: str) -> int | float:
    """Read a size; a decimal number without a unit is a fraction of the plain pass, as in Python.

    The number 1 is one byte, and 1.0 all of the plain pass.
    """
    try:
        fraction = float(text) if "." in text else None
    except ValueError:
        fraction = None
    if fraction is None:
        return size(text)
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(
            f"a fraction in (0, 1], or a size with a unit such as 64MB, got {text!r}"
        )
    return fraction


def cost(text: str) -> float:
    try:
        cost = float(text)
    except ValueError:
        cost = -1.0
    if not 0 <= cost < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of at least 0, got {text!r}")
    return cost
