"""The stacks of dispatch modes and saved-tensor hooks, which the program uses, too.

A program may enter modes and hooks inside of a region and leave them outside of it. What the
recorder removes is therefore not always on top. What is above it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..backend import (
    pop_dispatch_mode,
    pop_saved_tensor_hooks,
    push_dispatch_mode,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)

__all__ = ["are_hooks_on_top", "mode_disabled", "remove_hooks", "remove_mode"]


def are_hooks_on_top(pack: Any) -> bool:
    """Return whether the hooks with this pack function are those that autograd calls."""
    top = top_saved_tensor_hooks(False)
    return top is not None and top[0] is pack


def remove_hooks(pack: Any) -> None:
    """Remove the topmost hooks with this pack function."""
    above = []
    while (hooks := top_saved_tensor_hooks(False)) is not None:
        pop_saved_tensor_hooks()
        if hooks[0] is pack:
            break
        above.append(hooks)
    for hooks in reversed(above):
        push_saved_tensor_hooks(*hooks)


def remove_mode(mode: Any) -> list[Any]:
    """Remove a dispatch mode; return those above it, the topmost first."""
    above = []
    while (top := pop_dispatch_mode(None)) is not mode:
        above.append(top)
    for other in reversed(above):
        push_dispatch_mode(other)
    return above


@contextmanager
def mode_disabled(mode: Any) -> Iterator[None]:
    """Remove a dispatch mode, and insert it again at the same position."""
    above = remove_mode(mode)
    try:
        yield
    finally:
        for _ in above:
            pop_dispatch_mode(None)
        push_dispatch_mode(mode)
        for other in reversed(above):
            push_dispatch_mode(other)
