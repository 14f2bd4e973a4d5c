"""Functions that torch.compile must not look into: they run as they are, between two graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .compiling import is_compiling

__all__ = ["outside_of_graphs"]

Given = ParamSpec("Given")
Result = TypeVar("Result")


def outside_of_graphs(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return a function that ends the graph that is being traced, and runs without the compiler."""

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if is_compiling():
            eager: Callable[Given, Result] = sys.modules["torch"].compiler.disable(function)
            return eager(*args, **kwargs)
        return function(*args, **kwargs)

    return call
