"""What is right: plain autograd over ordinary Python loops, and difference quotients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def plain_loop(step: Callable[[Any], Any], state: Any, steps: int) -> Any:
    for _ in range(steps):
        state = step(state)
    return state


def plain_states(step: Callable[[Any], Any], state: Any, steps: int) -> list[Any]:
    """Return the states before every step, and the final one."""
    states = [state]
    for _ in range(steps):
        states.append(step(states[-1]))
    return states


def difference_quotient(f: Callable[[Any], Any], x: Any, h: float = 1e-6) -> Any:
    """Return the gradient of a scalar function, entry by entry."""
    x = np.asarray(x, dtype=float)
    result = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        ahead, back = x.copy(), x.copy()
        ahead[index] += h
        back[index] -= h
        result[index] = (f(ahead) - f(back)) / (2 * h)
    return result


def same_bits(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )
