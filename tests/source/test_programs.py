"""The corpus: every program gives the same, plain and transformed, and its errors are the same."""

from __future__ import annotations

import pytest

import remat

from .corpus import PROGRAMS
from .oracles import assert_same, run

pytest.importorskip("torch")
CASES = [(name, engine) for name, each in PROGRAMS.items() for engine in each.engines]


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize(("name", "engine"), CASES, ids=map("-".join, CASES))
def test_a_program_does_the_same(name: str, engine: str) -> None:
    function, is_plain, _ = PROGRAMS[name]
    plain = run(function, engine)
    transformed = run(remat.checkpoint_loops(function, min_steps=2), engine)
    assert_same(plain, transformed)
    assert (transformed.regions == 0) == is_plain


def test_the_corpus_is_large() -> None:
    assert len(PROGRAMS) >= 80


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_lists_while_dynamo_evaluates_frames(engine: str) -> None:
    """Callers hold one more reference to their arguments then."""
    from torch._C._dynamo import eval_frame  # noqa: PLC0415

    function = PROGRAMS["appended"].function
    plain = run(function, engine)
    before = eval_frame.set_eval_frame(False)
    try:
        transformed = run(remat.checkpoint_loops(function, min_steps=2), engine)
    finally:
        eval_frame.set_eval_frame(before)
    assert_same(plain, transformed)
    assert transformed.regions
