"""A result lies in memory as NumPy's does: whether a reshape of it is a view depends on that."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import remat
from remat.engines.numpy.array_function import plain

from .every_function import (
    PATTERNS,
    Pattern,
    _copied,
    _filled,
    _is_float,
    _leaves,
    functions,
    methods,
)

FUNCTIONS = {**functions(), **methods()}


def layout(results: Any) -> list[Any]:
    """Return the shapes and strides of arrays, without axes that have one entry."""
    found: list[Any] = []
    for result in map(plain, _leaves(results)):
        if isinstance(result, np.ndarray) and result.size:
            pairs = zip(result.shape, result.strides, strict=True)
            found.append((result.shape, [stride for n, stride in pairs if n > 1]))
    return found


def layouts(function: Any, pattern: Pattern, order: Any) -> tuple[Any, Any] | None:
    """Return the layouts of what NumPy gives and of what a traced call gives."""
    skeleton = (pattern.args, pattern.kwargs)
    leaves = _leaves(skeleton)
    traced = [i for i, x in enumerate(leaves) if isinstance(x, np.ndarray) and _is_float(x)]
    found: list[Any] = []

    def run(*values: Any) -> Any:
        given = [_copied(leaf) for leaf in leaves]
        for place, value in zip(traced, values, strict=True):
            given[place] = value
        args, kwargs = _filled(skeleton, iter(given))
        found.append(layout(function(*args, **kwargs)))
        return sum(np.sum(value) for value in values)

    values = [np.asarray(leaves[i], order=order).copy(order="K") for i in traced]
    if not values:
        return None
    try:
        run(*[value.copy(order="K") for value in values])
        remat.grad(run, wrt=tuple(range(len(values))))(*values)
    except Exception:
        return None  # NumPy or remat refuses
    return found[0], found[1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_traced_result_has_the_strides_of_numpys(name: str) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for pattern in PATTERNS:
            for order in ("C", "F"):
                pair = layouts(FUNCTIONS[name], pattern, order)
                assert pair is None or pair[0] == pair[1], (pattern.name, order)


def test_most_are_compared() -> None:
    """So that the test above cannot pass because everything is refused."""
    names = ("np.take", "np.cumprod", "np.tile", "np.gradient", "np.cross")
    for name in names:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairs = [layouts(FUNCTIONS[name], pattern, "F") for pattern in PATTERNS]
        assert any(pair is not None and pair[0] for pair in pairs)
