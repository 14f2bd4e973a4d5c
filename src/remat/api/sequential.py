"""A sequence of layers, divided into checkpointed segments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, overload

from ..schedules.check import options_by_name, whole_number
from ..segments import SegmentOptions
from ..sizes import shown
from .budgets import check_memory_budget
from .layer_budgets import run_layers_within
from .segments import check_option, refuse_reentrant, run_segment

__all__ = ["checkpoint_sequential"]

_MISSING: Any = object()


@overload
def checkpoint_sequential(
    functions: Iterable[Callable[[Any], Any]],
    input: Any,
    /,
    *,
    segments: int | None = None,
    memory_budget: int | float | str | None = None,
    preserve_rng_state: bool = True,
    use_reentrant: bool | None = None,
) -> Any: ...
@overload
def checkpoint_sequential(
    functions: Iterable[Callable[[Any], Any]],
    segments: int,
    input: Any,
    /,
    *,
    preserve_rng_state: bool = True,
    use_reentrant: bool | None = None,
) -> Any: ...
@overload
def checkpoint_sequential(
    functions: Iterable[Callable[[Any], Any]],
    *,
    input: Any,
    segments: int | None = None,
    memory_budget: int | float | str | None = None,
    preserve_rng_state: bool = True,
    use_reentrant: bool | None = None,
) -> Any: ...
@options_by_name
def checkpoint_sequential(
    functions: Any,
    *args: Any,
    input: Any = _MISSING,
    segments: int | None = None,
    memory_budget: int | float | str | None = None,
    preserve_rng_state: bool = True,
    use_reentrant: bool | None = None,
) -> Any:
    """Run `input` through the functions one after the other, in checkpointed segments.

    Each segment but the last keeps its input and drops its activations, as `checkpoint` does.
    Backward needs the last segment first, so dropping its activations would save nothing.

    With a `memory_budget` instead of segments, the first pass measures what layers hold and how
    long they take; from then on a plan is followed that recomputes as little as the budget allows.
    It never takes more time than the best plan over whole layers of unlike size and cost.

    Args:
        functions: A list of layers, or an `nn.Sequential`. Each gets the output of the one before
            as a single argument, also if it is a tuple, as in `nn.Sequential`.
        args: The input; or, in torch's order, the number of segments and the input.
        input: The input, as a keyword.
        segments: The number of segments, which differ by at most one layer. Default: about the
            square root of the number of layers.
        memory_budget: The peak bytes that the layers may hold above the level at which they began,
            forward and backward, the parameters' own `.grad` aside: an int, text such as "2GB", or
            a float in (0, 1] as the fraction of what a plain pass would hold.
        preserve_rng_state: Backward draws the same random numbers again.
        use_reentrant: False is accepted, as in torch. True is a ValueError.

    Raises:
        BudgetTooSmallError: At the end of the first forward pass, if no plan fits `memory_budget`.
            It says which budget does.

    >>> import numpy as np
    >>> import remat
    >>> layers = [np.sin, np.exp, np.tanh, np.sqrt]
    >>> def f(x):
    ...     return np.sum(remat.checkpoint_sequential(layers, x, segments=2))
    >>> def plain(x):
    ...     return np.sum(np.sqrt(np.tanh(np.exp(np.sin(x)))))
    >>> x = np.arange(3.0)
    >>> bool(np.all(remat.grad(f)(x) == remat.grad(plain)(x)))
    True
    """
    if use_reentrant:
        refuse_reentrant()
    check_option("preserve_rng_state", preserve_rng_state)
    input, segments = _input_and_segments(args, input, segments)
    layers = _checked(functions)
    if memory_budget is not None:
        _check_budget(memory_budget, segments, preserve_rng_state=preserve_rng_state)
        return run_layers_within(memory_budget, layers, input)
    return _run_in_segments(layers, input, segments, preserve_rng_state=preserve_rng_state)


def _run_in_segments(
    layers: list[Any], input: Any, segments: int | None, *, preserve_rng_state: bool
) -> Any:
    if segments is None:
        parts = _default(len(layers))
    else:
        parts = whole_number(segments, "segments", least=1)
    if parts > max(1, len(layers)):
        raise ValueError(
            f"segments must be at most {len(layers)}, the number of layers, got {parts}"
        )
    *ahead, last = pairwise(_edges(len(layers), parts))
    for start, stop in ahead:
        segment = functools.partial(_run, layers[start:stop])
        options = SegmentOptions(preserve_rng_state, name=f"layers {start} to {stop - 1}")
        input = run_segment(segment, (input,), {}, options)
    return _run(layers[slice(*last)], input)


def _input_and_segments(
    args: tuple[Any, ...], input: Any, segments: int | None
) -> tuple[Any, int | None]:
    """Interpret positional arguments: (input), (segments, input), or (segments) alone."""
    by_position = [*args, *([] if input is _MISSING else [input])]
    if len(by_position) == 2 and segments is None:
        return by_position[1], by_position[0]
    if len(by_position) != 1:
        raise TypeError(
            "checkpoint_sequential takes (functions, input), or (functions, segments, input) as "
            f"in torch; got {len(by_position)} arguments after the functions"
            + ("" if segments is None else " and segments=")
        )
    return by_position[0], segments


def _check_budget(memory_budget: Any, segments: int | None, *, preserve_rng_state: bool) -> None:
    check_memory_budget(memory_budget, "memory_budget")
    if segments is not None:
        raise ValueError(f"give segments or memory_budget, not both; got segments={segments!r}")
    if not preserve_rng_state:
        raise ValueError(
            "preserve_rng_state=False goes with segments; within a memory_budget random numbers "
            "are always drawn again as they were"
        )


def _run(layers: list[Callable[[Any], Any]], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def _default(layers: int) -> int:
    return 1 + math.isqrt(max(0, layers - 1))  # the square root, rounded up


def _edges(layers: int, segments: int) -> list[int]:
    """Return the boundaries of the segments, the longer ones first.

    The last one runs plainly while all checkpoints are held, so it should be short.

    >>> _edges(10, 3)
    [0, 4, 7, 10]
    """
    short, longer = divmod(layers, segments)
    return [part * short + min(part, longer) for part in range(segments + 1)]


def _checked(functions: Any) -> list[Callable[[Any], Any]]:
    try:
        layers = list(functions)
    except TypeError:
        raise TypeError(
            f"functions must be a list or an nn.Sequential, got {shown(functions)}"
        ) from None
    for place, layer in enumerate(layers):
        if not callable(layer):
            raise TypeError(f"functions[{place}] must be a function, got {shown(layer)}")
    return layers
