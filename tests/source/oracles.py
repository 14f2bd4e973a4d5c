"""Runs a program plain and transformed, and compares all that can be seen of it."""

from __future__ import annotations

import functools
import traceback
import warnings
from typing import Any, NamedTuple

import numpy as np

import remat
from remat import trees


class Outcome(NamedTuple):
    values: list[Any]  # leaves of the result
    structure: Any
    gradients: list[Any]
    error: tuple[Any, ...] | None  # type, words, line
    regions: int


def inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = (3,), (3, 3), (12, 3)
    return [rng.normal(size=shape) * 0.5 for shape in shapes]


def run(function: Any, engine: str) -> Outcome:
    call = _on_torch if engine == "torch" else _on_numpy
    with warnings.catch_warnings(), remat.CheckpointProfiler() as profiler:
        warnings.simplefilter("ignore", remat.RematWarning)
        try:
            values, structure, gradients = call(function)
        except Exception as error:
            return Outcome([], None, [], _of_error(error), profiler.checkpoint_count())
    return Outcome(values, structure, gradients, None, profiler.checkpoint_count())


def _of_error(error: Exception) -> tuple[Any, ...]:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(_FILES)]
    return type(error), str(error), frames[-1].lineno if frames else None


_FILES = ("corpus.py", "test_programs.py", "test_errors.py")


def _on_numpy(function: Any) -> Any:
    seen: list[Any] = []

    def total(x: Any, W: Any, xs: Any) -> Any:
        leaves, structure = trees.flatten(function(np, x, W, xs))
        seen.append((leaves, structure))
        floats = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
        return functools.reduce(lambda s, leaf: s + np.sum(leaf * leaf), floats, 0.0 * np.sum(x))

    gradients = remat.grad(total, wrt=(0, 1, 2))(*inputs())
    leaves, structure = seen[0]
    return [_plain(leaf) for leaf in leaves], structure, list(gradients)


def _plain(leaf: Any) -> Any:
    return leaf._value if hasattr(leaf, "_value") else leaf


def _on_torch(function: Any) -> Any:
    import torch  # noqa: PLC0415

    given = [torch.tensor(each, requires_grad=True) for each in inputs()]
    leaves, structure = trees.flatten(function(torch, *(each * 1 for each in given)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    total = sum(((leaf * leaf).sum() for leaf in tensors), given[0].sum() * 0)
    gradients = torch.autograd.grad(total, given, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, given, strict=True)]
    values = [leaf.detach().numpy() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return values, structure, [each.numpy() for each in found]


def assert_same(plain: Outcome, transformed: Outcome) -> None:
    assert transformed.error == plain.error
    assert transformed.structure == plain.structure
    for one, other in zip(plain.values, transformed.values, strict=True):
        if isinstance(one, np.ndarray | np.generic):
            np.testing.assert_array_equal(np.asarray(other), np.asarray(one))
        else:
            assert type(one) is type(other)
            assert one == other
    for one, other in zip(plain.gradients, transformed.gradients, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)
