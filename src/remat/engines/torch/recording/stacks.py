"""The stacks of dispatch modes and saved-tensor hooks, which the program uses, too.

A program may enter modes and hooks inside of a region and leave them outside of it. What the
recorder removes is therefore not always on top. What is above it stays, also if Ctrl-C interrupts.

That may happen at any line, in a `finally`, too. So what has to be put back is put back at the end
of a `try` and once more in its `except`, by a function that can be called again.
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
    return top is not None and pack == top[0]


def count_hooks(pack: Any) -> int:
    """Return how many hooks with this pack function are set."""
    above: list[Any] = []
    try:
        while top_saved_tensor_hooks(False) is not None:
            _take_hooks(above)
        count = sum(bool(pack == hooks[0]) for hooks in above)
        _put_hooks_back(above)
        return count
    except BaseException:
        _put_hooks_back(above)
        raise


def _take_hooks(above: list[Any]) -> None:
    """Move the topmost hooks to a list: in one line, so that no interrupt comes between."""
    above.append((top_saved_tensor_hooks(False), pop_saved_tensor_hooks())[0])  # type: ignore[func-returns-value]


def _put_hooks_back(above: list[Any]) -> None:
    """Set hooks again, the last of the list first; what an interrupt leaves is set by a retry."""
    while above:
        push_saved_tensor_hooks(*above.pop())


def remove_hooks(pack: Any) -> None:
    """Remove the topmost hooks with this pack function."""
    above: list[Any] = []
    try:
        while top_saved_tensor_hooks(False) is not None:
            _take_hooks(above)
            if pack == above[-1][0]:
                above.pop()
                break
        _put_hooks_back(above)
    except BaseException:
        _put_hooks_back(above)
        raise


def is_mode_on(mode: Any) -> bool:
    return any(other is mode for other in dispatch_mode_stack())


def remove_mode(mode: Any) -> None:
    """Remove a dispatch mode; those above it stay."""
    above: list[Any] = []
    try:
        while True:
            above.append(pop_dispatch_mode(None))
            if above[-1] is mode:
                above.pop()
                break
        _put_modes_back(above)
    except BaseException:
        _put_modes_back(above)
        raise


def _put_modes_back(above: list[Any]) -> None:
    """Enter modes again, the last of the list first; what an interrupt leaves a retry enters."""
    while above:
        push_dispatch_mode(above.pop())


@contextmanager
def mode_disabled(mode: Any) -> Iterator[None]:
    """Remove a dispatch mode, and insert it again at the same position."""
    modes = dispatch_mode_stack()
    depth = len(modes) - 1 - next(n for n, other in enumerate(modes) if other is mode)
    try:
        remove_mode(mode)
        yield
        _insert_mode(mode, depth)
    except BaseException:
        _insert_mode(mode, depth)
        raise


def _insert_mode(mode: Any, depth: int) -> None:
    """Enter a mode below some others, unless it is on."""
    if is_mode_on(mode):
        return
    above: list[Any] = []
    try:
        while len(above) < depth:
            above.append(pop_dispatch_mode(None))
        above.append(mode)
        _put_modes_back(above)
    except BaseException:
        _put_modes_back(above)
        raise
