"""The stacks of dispatch modes and saved-tensor hooks, which the program uses, too.

A program may enter modes and hooks inside of a region and leave them outside of it. What the
recorder removes is therefore not always on top. What is above it stays, also if Ctrl-C interrupts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..backend import (
    dispatch_mode_stack,
    pop_dispatch_mode,
    pop_saved_tensor_hooks,
    push_dispatch_mode,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)

__all__ = [
    "are_hooks_on_top",
    "count_hooks",
    "is_mode_on",
    "mode_disabled",
    "remove_hooks",
    "remove_mode",
]


def are_hooks_on_top(pack: Any) -> bool:
    """Return whether the hooks with this pack function are those that autograd calls."""
    top = top_saved_tensor_hooks(False)
    return top is not None and top[0] is pack


def count_hooks(pack: Any) -> int:
    """Return how many hooks with this pack function are set."""
    above: list[Any] = []
    try:
        while top_saved_tensor_hooks(False) is not None:
            _take_hooks(above)
        return sum(hooks[0] is pack for hooks in above)
    finally:
        while above:
            push_saved_tensor_hooks(*above.pop())


def _take_hooks(above: list[Any]) -> None:
    """Move the topmost hooks to a list: in one line, so that no interrupt comes between."""
    above.append((top_saved_tensor_hooks(False), pop_saved_tensor_hooks())[0])  # type: ignore[func-returns-value]


def remove_hooks(pack: Any) -> None:
    """Remove the topmost hooks with this pack function."""
    above: list[Any] = []
    try:
        while top_saved_tensor_hooks(False) is not None:
            _take_hooks(above)
            if above[-1][0] is pack:
                above.pop()
                break
    finally:
        while above:
            push_saved_tensor_hooks(*above.pop())


def is_mode_on(mode: Any) -> bool:
    return any(other is mode for other in dispatch_mode_stack())


def remove_mode(mode: Any) -> list[Any]:
    """Remove a dispatch mode; return those above it, the topmost first."""
    above: list[Any] = []
    removed: list[Any] = []
    try:
        while not removed:
            above.append(pop_dispatch_mode(None))
            if above[-1] is mode:
                removed.append(above.pop())
        return list(above)
    finally:
        while above:
            push_dispatch_mode(above.pop())


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
