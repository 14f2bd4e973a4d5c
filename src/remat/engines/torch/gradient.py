"""Gradients of plain functions of tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import trees
from .loop.states import refuse_graph_inside

__all__ = ["value_and_grad"]


def value_and_grad(
    function: Callable[..., Any],
    wrt: Sequence[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    init_grad: Any,
) -> tuple[Any, list[Any]]:
    """Return the value of `function(*args, **kwargs)` and a gradient for each argument in `wrt`.

    Gradients of arguments that are part of a graph already stay differentiable, so calls nest.
    """
    parts = [trees.flatten(args[i]) for i in wrt]
    for i, (leaves, _) in zip(wrt, parts, strict=True):
        if not any(map(_is_differentiable, leaves)):
            raise TypeError(
                f"argument {i} holds no floating-point tensor to differentiate with respect to, "
                f"got {type(args[i]).__name__}"
            )
    given, sources = list(args), []
    with torch.enable_grad():
        for i, (leaves, structure) in zip(wrt, parts, strict=True):
            own = [_source(leaf) for leaf in leaves]
            sources += own
            given[i] = trees.unflatten(structure, own)
        results, structure = trees.flatten(function(*given, **kwargs))
        for result in results:
            refuse_graph_inside(result, "the function")
        nested = any(_is_tracked(leaf) for leaves, _ in parts for leaf in leaves)
        gradients = _go_back(results, structure, sources, init_grad, nested=nested)
    found = iter(gradients)
    value = trees.unflatten(structure, results if nested else list(map(_detached, results)))
    return value, [
        trees.unflatten(structure, [next(found) for _ in leaves]) for leaves, structure in parts
    ]


def _go_back(
    results: list[Any],
    structure: trees.Structure,
    sources: list[Any],
    init_grad: Any,
    *,
    nested: bool,
) -> list[Any]:
    wanted = [source for source in sources if _is_differentiable(source)]
    seeds = _seeds(results, structure, init_grad)
    pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if _is_tracked(r)]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if pairs:
        ends, starts = zip(*pairs, strict=True)
        found = torch.autograd.grad(ends, wanted, starts, create_graph=nested, allow_unused=True)
    else:
        warnings.warn(
            "the output does not depend on the arguments to differentiate by: the gradient is 0",
            stacklevel=5,
        )
    totals = iter(found)
    return [
        _or_zeros(next(totals), source) if _is_differentiable(source) else None
        for source in sources
    ]


def _seeds(results: list[Any], structure: trees.Structure, init_grad: Any) -> list[Any]:
    if init_grad is None:
        return [torch.ones_like(r) if isinstance(r, Tensor) else None for r in results]
    seeds, given = trees.flatten(init_grad)
    if given != structure:
        raise ValueError(
            f"init_grad has another structure than the output: {given} instead of {structure}"
        )
    for seed, result in zip(seeds, results, strict=True):
        if isinstance(result, Tensor) and torch.as_tensor(seed).shape != result.shape:
            raise ValueError(
                f"init_grad has shape {list(torch.as_tensor(seed).shape)}, the output has "
                f"{list(result.shape)}"
            )
    return [
        torch.as_tensor(seed, dtype=result.dtype, device=result.device)
        if isinstance(result, Tensor)
        else None
        for seed, result in zip(seeds, results, strict=True)
    ]


def _source(leaf: Any) -> Any:
    """Return a tensor to differentiate by, that only this argument stands for."""
    if not _is_differentiable(leaf):
        return leaf
    return leaf.view_as(leaf) if leaf.requires_grad else leaf.detach().requires_grad_()


def _or_zeros(gradient: Tensor | None, source: Tensor) -> Tensor:
    return torch.zeros_like(source) if gradient is None else gradient


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_tracked(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
