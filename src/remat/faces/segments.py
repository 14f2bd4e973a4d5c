"""Segments: calls whose intermediate results are forgotten and computed again on the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import trees
from ..engines.locate import engine_for

__all__ = ["checkpoint"]


def checkpoint(
    fn: Callable[..., Any] | None = None,
    *inputs: Any,
    preserve_rng_state: bool = True,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """Run `fn(*inputs, **kwargs)`; keep its inputs, forget what lies between.

    On the way back `fn` is run again from its inputs. Inputs and results may be any pytrees;
    gradients also reach what `fn` closes over. With no input the wrapped function is returned,
    so this is a decorator as well, with options or without.

    With `preserve_rng_state` (the default) random numbers are drawn again as they were.
    `use_reentrant=False` is accepted, as users of PyTorch are used to write it.

    >>> import numpy as np
    >>> import remat
    >>> @remat.checkpoint
    ... def layer(x, W):
    ...     return np.tanh(x @ W)
    >>> remat.grad(lambda x: np.sum(layer(x, np.eye(2))))(np.zeros(2))
    array([1., 1.])
    """
    if use_reentrant:
        raise ValueError(
            "use_reentrant=True is not supported: re-entrant checkpointing loses gradients of "
            "what is closed over and cannot be nested; leave it out or pass False"
        )
    if fn is None:
        return functools.partial(checkpoint, preserve_rng_state=preserve_rng_state)
    if not callable(fn):
        raise TypeError(
            f"fn is a function, got {type(fn).__name__}; to checkpoint a computation pass the "
            "function that does it: remat.checkpoint(fn, x)"
        )

    @functools.wraps(fn, updated=())
    def checkpointed(*args: Any, **keywords: Any) -> Any:
        leaves, _ = trees.flatten((args, keywords))
        return engine_for(leaves).run_segment(
            fn, args, keywords, preserve_rng_state=preserve_rng_state
        )

    return checkpointed(*inputs, **kwargs) if inputs or kwargs else checkpointed
