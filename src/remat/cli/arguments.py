"""What commands share: help texts, how numbers and sizes are read, JSON, names of options."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

from ..sizes import parse_bytes

__all__ = [
    "at_least",
    "cost",
    "default",
    "in_options",
    "print_json",
    "size",
    "size_or_fraction",
    "texts",
]


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


_OPTIONS = {
    "memory_bytes": "--memory",
    "state_bytes": "--state-bytes",
    "tape_bytes": "--tape-bytes",
    "num_checkpoints": "--checkpoints",
    "disk_slots": "--disk",
    "write_cost": "--disk-write",
    "read_cost": "--disk-read",
}


def in_options(text: str) -> str:
    """Name options of the command line where the library names its arguments."""
    return re.sub(rf"\b({'|'.join(_OPTIONS)})\b", lambda found: _OPTIONS[found[0]], text)


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))
