"""Rounding by exact fractions, and what the operating system says of open files.

Slow, and nothing of it is used by what it checks.
"""

from __future__ import annotations

import math
import os
import threading
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import strategies as st

FORMATS = {"bfloat16": (8, -126), "float16": (11, -14)}  # digits, smallest exponent of normals
LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0}


def nearest(value: float, dtype: str) -> float:
    """Round to nearest, ties to even; infinite beyond the largest."""
    if not math.isfinite(value) or value == 0:
        return value
    digits, lowest = FORMATS[dtype]
    exponent = max(math.frexp(value)[1] - 1, lowest)
    spacing = Fraction(2) ** (exponent - digits + 1)
    rounded = round(Fraction(value) / spacing) * spacing  # Python rounds fractions half to even
    if abs(rounded) > LARGEST[dtype]:
        return math.copysign(math.inf, value)
    return math.copysign(float(rounded), value)


@st.composite
def near_the_middle(draw: st.DrawFn, dtype: str) -> float:
    """A float64 at, or a hair from, the middle between two narrow numbers."""
    digits, lowest = FORMATS[dtype]
    count = draw(st.integers(0, 2**digits - 1))
    exponent = draw(st.integers(lowest - digits + 1, -lowest - digits + 1))
    middle = (count + 0.5) * 2.0**exponent
    steps = draw(st.integers(-2, 2))
    for _ in range(abs(steps)):
        middle = math.nextafter(middle, math.inf if steps > 0 else 0.0)
    return draw(st.sampled_from([middle, -middle]))


def numbers(dtype: str) -> st.SearchStrategy[float]:
    """Floats of all sizes that do not overflow, and those that are hard to round."""
    largest = LARGEST[dtype]
    return st.one_of(
        st.floats(-largest, largest),
        near_the_middle(dtype),
        st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, largest, 5e-324]),
    )


def open_files(directory: Path) -> list[Path]:
    """Return paths to the files below a directory that this process has open, named or not."""
    found = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    # (The one that lists this folder is closed by now.)
    return [path for path in found if path.is_symlink() and _is_below(os.readlink(path), directory)]


def _is_below(file: str, directory: Path) -> bool:
    return file.startswith(f"{directory.resolve()}/")


class HeldUp:
    """Holds a method up, in whichever thread it is called, until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.started = threading.Event()
        self.go_on = threading.Event()
        real = getattr(owner, name)

        def method(*args: object) -> object:
            self.started.set()
            assert self.go_on.wait(600)
            return real(*args)

        monkeypatch.setattr(owner, name, method)
