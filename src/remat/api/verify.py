"""A check that checkpointing changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engines.locate import engine_of_call
from ..segments import SegmentOptions
from ..sizes import shown
from ..verification import Verification
from .segments import check_option
from .wrapped import plain_function, refuse_module_class

__all__ = ["verify"]


def verify(
    fn: Callable[..., Any], *inputs: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Verification:
    """Run `fn(*inputs, **kwargs)` with and without checkpointing, and compare, bit for bit.

    Compared are the outputs, the gradients with respect to all arrays that go in or are closed
    over, what `fn` keeps between calls, and the random state. The first thing that differs is
    named in a `RecomputeMismatchError`, with the op that made it where that is known. Of a
    function that `checkpoint` has wrapped, the wrapped function is taken.

    Afterwards random state, inputs and what `fn` keeps are as after one call without
    checkpointing; on PyTorch they, and the buffers and gradients of modules, are as before.

    >>> import numpy as np
    >>> import remat
    >>> print(remat.verify(np.tanh, np.ones(3)))
    tanh is the same with and without checkpointing: 1 output, 1 gradient, 1 op, random state
    """
    fn = plain_function(fn)
    refuse_module_class(fn, "fn")
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {shown(fn)}")
    check_option("preserve_rng_state", preserve_rng_state)
    options = SegmentOptions(preserve_rng_state)
    return engine_of_call(fn, inputs, kwargs).verify(fn, inputs, kwargs, options)
