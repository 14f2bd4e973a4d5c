"""Gradients of plain NumPy functions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from autograd.core import vspace

from ... import trees
from ...sizes import shown
from .budget import record_within
from .captures import refuse_traced_inside
from .nodes import cast, shape_and_dtype
from .overlaps import guarded
from .recording.constants import Constant, Constants
from .tape import is_differentiable, plain, zeros_like

__all__ = ["value_and_grad"]


def value_and_grad(
    function: Callable[..., Any],
    wrt: Sequence[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    init_grad: Any,
) -> tuple[Any, list[Any]]:
    """Return the value of `function(*args, **kwargs)` and a gradient for each argument in `wrt`."""
    parts = [trees.flatten(args[i]) for i in wrt]
    large: dict[int, Constant] = {}
    inputs = _apart([leaf for leaves, _ in parts for leaf in leaves])
    inputs = [_as_now(leaf, large) for leaf in inputs]
    wanted = [is_differentiable(leaf) for leaf in inputs]
    for i, (leaves, _) in zip(wrt, parts, strict=True):
        if not any(map(is_differentiable, leaves)):
            raise TypeError(
                f"argument {i} holds no floating-point number to differentiate with respect to, "
                f"got {shown(args[i])}"
            )
    structures: list[trees.Structure] = []

    def run(boxes: list[Any]) -> list[Any]:
        given, rest = list(args), iter(boxes)
        for i, (leaves, structure) in zip(wrt, parts, strict=True):
            given[i] = trees.unflatten(structure, [next(rest) for _ in leaves])
        results, structure = trees.flatten(function(*given, **kwargs))
        structures.append(structure)
        refuse_traced_inside(results)
        return results

    recording = record_within(run, inputs, wanted)
    value = trees.unflatten(structures[0], recording.results)
    if all(end is None for end in recording.ends):
        warnings.warn(
            "the output does not depend on the arguments to differentiate by: the gradient is 0",
            stacklevel=4,
        )
    for constant in large.values():
        constant.array()  # raises if the function has changed it by another name
    seeds = _seeds(recording.results, structures[0], init_grad)
    gathered = recording.go_back(seeds, once=True)
    gradients = iter(
        None if not want else zeros_like(leaf) if total is None else _own(*total)
        for leaf, want, total in zip(inputs, wanted, gathered, strict=True)
    )
    return value, [
        trees.unflatten(structure, [next(gradients) for _ in leaves]) for leaves, structure in parts
    ]


def _apart(inputs: list[Any]) -> list[Any]:
    """Return read-only copies of arrays that overlap: a write to one would not show in the other.

    (Looked at through views of their own, so that an array that is given twice overlaps, too.)
    """
    looks = [leaf.view() if isinstance(leaf, np.ndarray) else leaf for leaf in inputs]
    return guarded(looks, inputs)


def _as_now(leaf: Any, large: dict[int, Constant]) -> Any:
    """Return an input as it is now: the function may write to it by another name.

    (By this name it writes to a traced array.) One that is too large to be copied goes to `large`.
    """
    if type(leaf) is not np.ndarray or not leaf.flags.writeable:
        return leaf
    return Constants().kept(leaf, "the function", large)


def _own(gradient: Any, is_sum: bool) -> Any:
    """Return a gradient that shares no memory with anything else.

    A sum is new; anything else may be the seed, another gradient or an array of a rule.
    """
    owns = is_sum and getattr(plain(gradient), "base", None) is None
    return gradient if owns else copy.copy(gradient)


def _seeds(results: list[Any], structure: trees.Structure, init_grad: Any) -> list[Any]:
    if init_grad is None:
        return [_fitting(vspace(r).ones(), r) if is_differentiable(r) else None for r in results]
    seeds, given = trees.flatten(init_grad)
    if given != structure:
        raise ValueError(
            f"init_grad has another structure than the output: {given} instead of {structure}"
        )
    for seed, result in zip(seeds, results, strict=True):
        if np.shape(plain(seed)) != np.shape(plain(result)):
            raise ValueError(
                f"init_grad has shape {np.shape(plain(seed))}, the output has "
                f"{np.shape(plain(result))}"
            )
    return [_fitting(seed, result) for seed, result in zip(seeds, results, strict=True)]


def _fitting(seed: Any, result: Any) -> Any:
    return cast(seed, shape_and_dtype(result)[1]) if is_differentiable(result) else None
