"""Results in objects that are no pytrees: gradients do not flow through them."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from ..errors import UnsupportedError
from ..introspect import find_within, is_lazy

__all__ = ["refuse_hidden"]


def refuse_hidden(
    result: Any, is_wanted: Callable[[Any], bool], what: str, known: Container[int] = ()
) -> None:
    """Refuse a result that holds something that is wanted, or that computes later.

    Objects that are `known`, by their ids, hold nothing new.
    """
    if find_within(result, lambda part: is_wanted(part) or is_lazy(part), known):
        raise UnsupportedError(
            f"{what} returned a {type(result).__name__}, which is no pytree, with numbers in it, "
            "or to be computed later: their gradient would be lost. Return arrays in a tuple, "
            "list, dict, named tuple or dataclass"
        )
