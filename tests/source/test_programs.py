"""The corpus: every program gives the same, plain and transformed, and its errors are the same."""

from __future__ import annotations

import sys
from inspect import getsource

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


LISTS = [case for case in CASES if ".append(" in getsource(PROGRAMS[case[0]].function)]


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize(("name", "engine"), LISTS, ids=map("-".join, LISTS))
def test_lists_while_dynamo_evaluates_frames(name: str, engine: str) -> None:
    """Callers hold one more reference to their arguments then."""
    from torch._C._dynamo import eval_frame  # noqa: PLC0415

    function, is_plain, _ = PROGRAMS[name]
    plain = run(function, engine)
    before = eval_frame.set_eval_frame(False)
    try:
        transformed = run(remat.checkpoint_loops(function, min_steps=2), engine)
    finally:
        eval_frame.set_eval_frame(before)
    assert_same(plain, transformed)
    assert (transformed.regions == 0) == is_plain


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "LBFGS"])
@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_lists_in_and_after_the_step_of_an_optimizer(engine: str, optimizer: str) -> None:
    """It loads the compiler, which is told to leave the step alone."""
    import torch  # noqa: PLC0415

    function = PROGRAMS["appended"].function
    plain, transformed = run(function, engine), []
    weight = torch.ones(3, requires_grad=True)

    def closure() -> torch.Tensor:
        transformed.append(run(remat.checkpoint_loops(function, min_steps=2), engine))
        loss = weight.square().sum()
        loss.backward()
        return loss

    getattr(torch.optim, optimizer)([weight]).step(closure)
    assert "torch._dynamo" in sys.modules
    closure()
    for each in transformed:
        assert_same(plain, each)
        assert each.regions
