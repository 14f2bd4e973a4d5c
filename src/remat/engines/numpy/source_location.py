"""Source locations: the line of the program that called an op."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import autograd
import numpy as np

__all__ = ["location_of_caller"]

_LIBRARIES = tuple(
    str(folder / "_")[:-1]  # with the separator at its end
    for folder in (
        Path(__file__).parents[2],
        Path(autograd.__file__).parent,
        Path(np.__file__).parent,
    )
)


def location_of_caller() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"
