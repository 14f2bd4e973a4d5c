"""Long runs of random programs: `python -m tests.engines.numpy.fuzz --count 5000 --seed 0`.

A program is judged by the bits of NumPy's own value, by a difference quotient, and by the bits of
its plain gradient: with scopes, marks and policies, as a segment and within a budget, they have to
be the same. As a segment it may get its argument, and return its result, in an object; that is
right or refused. `--functions` compares the values of all calls of all functions of NumPy instead.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

import remat

from . import every_function
from .oracles import same_bits
from .random_programs import (
    COMPLEX,
    IN_PLACE,
    OUT_OF_PLACE,
    SCALARS,
    SINGLE,
    VIEWS,
    compiled,
    draw,
    with_scopes,
)

__all__ = ["DIRECTION", "FAILURES", "START", "bits", "judge", "main", "run"]

STATEMENTS = OUT_OF_PLACE + IN_PLACE + VIEWS + SCALARS
# One program in so many has complex numbers, and one in so many those of single precision, too.
_COMPLEX, _SINGLE = 3, 4
START = np.linspace(-0.7, 0.9, 6)
DIRECTION = np.sin(1.0 + np.arange(6.0))
_BUDGETS = 3  # one program in so many is run within a budget, too (`--budgets`)
_REFUSALS = (
    "gradient would be lost",
    "NumPy gets them after they were written",
    "whose entries share memory",
)
FAILURES = ("value", "slope", "bits", "raises")


def judge(source: str) -> str:
    """Say "right", "refused", "kink", or how value or slope differ from NumPy's."""
    program = compiled(source)
    expected = program(START.copy())
    try:
        value, gradient = remat.value_and_grad(program)(START.copy())
    except remat.UnsupportedError as error:
        if not any(words in str(error) for words in _REFUSALS):
            raise
        return "refused"
    if not same_bits(value, expected):
        return f"value {value!r} instead of {expected!r}"
    if "float32" in source:
        return "kink"  # too coarse for a quotient

    def quotient(h: float) -> Any:
        return (program(START + h * DIRECTION) - program(START - h * DIRECTION)) / (2 * h)

    slope = quotient(1e-5)
    if not np.isclose(slope, quotient(2.5e-6), rtol=1e-4, atol=1e-5):
        return "kink"
    found = np.sum(gradient * DIRECTION)
    right = np.isclose(found, slope, rtol=1e-4, atol=1e-5)
    return "right" if right else f"slope {found} instead of {slope}"


def within_a_budget(program: Any) -> list[Any]:
    """Return what two calls give: one that is planned, and one that follows the plan."""
    gradient = remat.value_and_grad(program, memory_budget=0.9)
    found = []
    for _ in range(2):
        try:
            found.append(gradient(START.copy()))
        except remat.BudgetTooSmallError as error:
            gradient = remat.value_and_grad(program, memory_budget=error.smallest)
            found.append(gradient(START.copy()))
    return found


def segments(seed: int, program: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the program gives as a segment; an object around a result may be refused."""

    def returned(x: Any) -> Any:
        return remat.checkpoint(lambda y: SimpleNamespace(h=program(y)), x).h

    def taken(x: Any) -> Any:
        return remat.checkpoint(lambda y: program(y.h), SimpleNamespace(h=x))

    ways = {"a segment": lambda x: remat.checkpoint(program, x), "an object taken": taken}
    ways["an object returned"] = returned
    for what in ("a segment", list(ways)[1 + seed % 2]):
        with contextlib.suppress(remat.UnsupportedError):
            yield what, remat.value_and_grad(ways[what])(START.copy())


def bits(seed: int, source: str, budgets: int = _BUDGETS) -> str:
    """Say "same", or what gives other bits than the plain gradient."""
    plain = remat.value_and_grad(compiled(source))(START.copy())
    scoped = compiled(with_scopes(seed, source))
    found = {"scopes": [remat.value_and_grad(scoped)(START.copy())]}
    for what, pair in segments(seed, compiled(source)):
        found[what] = [pair]
    if seed % budgets == 0:  # planning takes far longer than running a program of this size
        found["a budget"] = within_a_budget(scoped if seed % 2 else compiled(source))
    for what, pairs in found.items():
        if not all(same_bits(a, b) for pair in pairs for a, b in zip(pair, plain, strict=True)):
            return f"bits differ with {what}"
    return "same"


def run(seed: int, budgets: int = _BUDGETS) -> tuple[str, str]:
    """Return the verdict about the program of a seed, and its source."""
    statements = STATEMENTS + COMPLEX * (seed % _COMPLEX == 0) + SINGLE * (seed % _SINGLE == 0)
    source = draw(seed, statements)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scopes around plain numbers
        try:
            verdict = judge(source)
            if verdict in ("right", "kink"):
                words = bits(seed, source, budgets)
                verdict = verdict if words == "same" else words
        except Exception as error:
            verdict = f"raises {type(error).__name__}: {error}"
    return verdict, source


def values_of_functions() -> int:
    """Print where a traced call differs from a plain one; return whether any does."""
    differ = 0
    for name in every_function.all_names():
        for words in every_function.value_complaints(name):
            sys.stdout.write(f"{name}: {words}\n")
            differ += 1
    sys.stdout.write(f"{differ} calls differ\n")
    return int(differ > 0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--budgets", type=int, default=_BUDGETS, help="one in so many is planned")
    parser.add_argument("--functions", action="store_true", help="all functions instead")
    given = parser.parse_args(arguments)
    if given.functions:
        return values_of_functions()
    verdicts: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.count):
        verdict, source = run(seed, given.budgets)
        kind = verdict.partition(" ")[0]
        verdicts[kind] += 1
        if kind in FAILURES:
            sys.stdout.write(f"seed {seed}: {verdict}\n{source}\n{with_scopes(seed, source)}\n")
        if (seed - given.seed) % 500 == 499:
            sys.stdout.write(f"{seed - given.seed + 1} programs: {dict(verdicts)}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{given.count} programs from seed {given.seed}: {dict(verdicts)}\n")
    return int(any(verdicts[kind] for kind in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
