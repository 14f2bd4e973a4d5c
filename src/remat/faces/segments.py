"""Segments: calls whose intermediate results are forgotten and computed again on the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..engines.compiling import compiled_segment, is_compiling
from ..engines.locate import engine_for, engine_of_call
from ..segments import SegmentOptions
from ..sizes import parse_bytes

__all__ = [
    "adaptive_checkpoint",
    "checkpoint",
    "checkpoint_segment",
    "refuse_reentrant",
    "run_or_wrap",
    "run_segment",
    "without_checkpoint",
    "wrap",
]

_WITH_RANDOM_STATE = SegmentOptions()
_WITHOUT_RANDOM_STATE = SegmentOptions(preserve_rng_state=False)


def checkpoint(
    fn: Callable[..., Any] | Any = None,
    *inputs: Any,
    preserve_rng_state: bool = True,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """Run `fn(*inputs, **kwargs)`; keep its inputs, forget what lies between.

    On the way back what is needed is computed again from the inputs. Inputs and results may be
    any pytrees; gradients also reach what `fn` closes over. With no input the wrapped function is
    returned, so this is a decorator as well, with options or without.

    With `preserve_rng_state` (the default) random numbers are drawn again as they were.
    `use_reentrant=False` is accepted, as users of PyTorch are used to write it. Keywords of these
    names are options, and never reach `fn`: give `functools.partial(fn, use_reentrant=...)`, or a
    lambda, if it has an argument that is called so.

    A tensor of PyTorch in the place of `fn`, inside a scope or a segment: do not hold this one,
    compute it again when it is needed.

    >>> import numpy as np
    >>> import remat
    >>> @remat.checkpoint
    ... def layer(x, W):
    ...     return np.tanh(x @ W)
    >>> remat.grad(lambda x: np.sum(layer(x, np.eye(2))))(np.zeros(2))
    array([1., 1.])
    """
    if use_reentrant:
        refuse_reentrant()
    options = _WITH_RANDOM_STATE if preserve_rng_state else _WITHOUT_RANDOM_STATE
    if inputs and callable(fn):
        return run_segment(fn, inputs, kwargs, options)
    return run_or_wrap(options, fn, *inputs, **kwargs)


def adaptive_checkpoint(
    fn_or_tensor: Callable[..., Any] | Any = None,
    *inputs: Any,
    threshold: int | str,
    preserve_rng_state: bool = True,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """Do as `checkpoint` does, but only if what would be held exceeds `threshold`.

    `threshold` is bytes, or text such as "10KB". Up to it everything is held, and nothing is
    computed again. With no input this is a decorator, too. Keywords that are called `threshold`,
    `preserve_rng_state` or `use_reentrant` are options, and never reach `fn`: bind those of `fn`
    with `functools.partial` or in a lambda.

    >>> import numpy as np
    >>> import remat
    >>> def wave(x):
    ...     return np.sum(np.sin(np.exp(x)))
    >>> def small_is_held(x):
    ...     return remat.adaptive_checkpoint(wave, x, threshold="10KB")
    >>> bool(remat.grad(small_is_held)(np.zeros(2))[0] == np.cos(1.0))
    True
    """
    if use_reentrant:
        refuse_reentrant()
    # A compiler cannot say beforehand what a segment would hold, and it does not trace text.
    limit = 0 if is_compiling() else parse_bytes(threshold, name="threshold")
    options = SegmentOptions(preserve_rng_state, limit)
    return run_or_wrap(options, fn_or_tensor, *inputs, **kwargs)


def checkpoint_segment(
    fn: Callable[[Sequence[Any]], Any],
    inputs: Sequence[Any],
    *,
    preserve_rng_state: bool = True,
    use_reentrant: bool = False,
) -> Any:
    """Run `fn(inputs)` as `checkpoint` does: `fn` gets the whole sequence of inputs.

    >>> import numpy as np
    >>> import remat
    >>> def product(inputs):
    ...     return np.sum(inputs[0] * inputs[1])
    >>> def f(x, y):
    ...     return remat.checkpoint_segment(product, [x, y])
    >>> remat.grad(f, wrt=(0, 1))(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    (array([3., 4.]), array([1., 2.]))
    """
    if use_reentrant:
        refuse_reentrant()
    if not callable(fn):
        raise TypeError(f"fn is a function of a sequence, got {type(fn).__name__}")
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Sequence):
        raise TypeError(
            f"inputs is a list or tuple of what fn gets, got {type(inputs).__name__}; write "
            "[x] for a single x"
        )
    if not inputs:
        raise ValueError("inputs is empty; a segment needs at least one input to start from")
    options = _WITH_RANDOM_STATE if preserve_rng_state else _WITHOUT_RANDOM_STATE
    given = inputs if isinstance(inputs, list | tuple) else list(inputs)
    return run_segment(fn, (given,), {}, options)


def run_or_wrap(options: SegmentOptions, fn: Any = None, /, *inputs: Any, **kwargs: Any) -> Any:
    """Take what the faces of a segment have in common: a call, a decorator, or a tensor."""
    if callable(fn):
        if inputs or kwargs:
            return run_segment(fn, inputs, kwargs, options)
        return wrap(fn, functools.partial(run_segment, options=options))
    if not inputs and not kwargs:
        if fn is None:
            return functools.partial(run_or_wrap, options)
        if hasattr(fn, "dtype") and hasattr(fn, "shape"):
            return engine_for([fn]).checkpoint_tensor(fn, options.threshold)
    raise TypeError(
        f"fn is a function, got {type(fn).__name__}; to checkpoint a computation pass the "
        "function that does it: remat.checkpoint(fn, x)"
    )


def run_segment(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: SegmentOptions
) -> Any:
    # First of all: a compiler sees nothing but what it knows.
    if is_compiling():
        return compiled_segment(fn, args, kwargs, preserve_rng_state=options.preserve_rng_state)
    return engine_of_call(fn, args, kwargs).run_segment(fn, args, kwargs, options)


def without_checkpoint(fn: Any) -> Any:
    """Return the function that `wrap` has wrapped, or `fn` itself."""
    return getattr(fn, "_remat_plain", fn)


def wrap(fn: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `fn` whose calls are `run(fn, args, kwargs)`."""

    @functools.wraps(fn, updated=())
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return run(fn, args, kwargs)

    checkpointed._remat_plain = fn  # type: ignore[attr-defined]
    return checkpointed


def refuse_reentrant() -> None:
    raise ValueError(
        "use_reentrant=True is not supported: re-entrant checkpointing loses gradients of what is "
        "closed over and cannot be nested; leave it out or pass False"
    )
