"""Random loop programs do the same, plain and transformed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .random_loops import NamesWriter, check, write

pytest.importorskip("torch")

# Seeds that once went wrong: what a list held was looked up too late; what a loop reads belonged to
# no step; results of a loop that were changed in place; numbers of exits that differed; items of
# one stack were taken for views; a step after the end of a loop had outputs of another kind.
ONCE_WRONG = [
    12,
    17,
    49,
    51,
    70,
    74,
    107,
    113,
    133,
    155,
    179,
    235,
    333,
    2046,
    2505,
    2679,
    3773,
    3982,
    21807,
]


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("seed", ONCE_WRONG)
def test_programs_that_once_went_wrong(seed: int, engine: str) -> None:
    words, _ = check(seed, engine)
    assert words is None, write(seed)


# Arrays with several names: items of lists, what a body reads, parts that are written to later,
# functions that are kept.
NAMES_ONCE_WRONG = [1, 4, 13, 18, 25, 43, 45, 49, 55, 135, 149, 180, 560, 568, 2694]


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("seed", NAMES_ONCE_WRONG)
def test_names_that_once_went_wrong(seed: int, engine: str) -> None:
    words, _ = check(seed, engine, NamesWriter)
    assert words is None, write(seed, NamesWriter)


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@settings(max_examples=20)
@given(seed=st.integers(0, 10**9))
def test_a_random_program_with_many_names(engine: str, seed: int) -> None:
    words, _ = check(seed, engine, NamesWriter)
    assert words is None, write(seed, NamesWriter)


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@settings(max_examples=25)
@given(seed=st.integers(0, 10**9))
def test_a_random_program(engine: str, seed: int) -> None:
    words, _ = check(seed, engine)
    assert words is None, write(seed)


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("options", [{"store": "disk"}, {"num_checkpoints": 1}], ids=str)
@settings(max_examples=10)
@given(seed=st.integers(0, 10**9))
def test_with_options(engine: str, options: dict, seed: int) -> None:
    words, _ = check(seed, engine, **options)
    assert words is None, write(seed)


def test_many_programs_really_run_in_steps() -> None:
    assert sum(check(seed, "numpy")[1] > 0 for seed in range(40)) >= 20
