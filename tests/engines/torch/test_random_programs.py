"""Random programs: right, or refused with an error; never silently wrong."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import remat
from remat.check.programs import compiled, draw

from .oracles import APIS, assert_same, outcome, plain

REFUSALS = ("modified by an inplace operation", "given other memory")


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4, 3, generator=generator).requires_grad_()
    return w, torch.randn(4, 3, generator=generator)


def right(program) -> dict[str, object] | None:
    """Return what is right; None if the program itself is wrong.

    Where plain autograd refuses because what it needs was overwritten, it is asked again, with
    copies of all that it saves.
    """
    try:
        return outcome(program, plain, inputs())
    except (RuntimeError, IndexError):
        pass
    try:
        with saved_tensors_hooks(torch.clone, lambda t: t):
            return outcome(program, plain, inputs())
    except (RuntimeError, IndexError):
        return None


def verdict_of(source: str, api: str) -> str:
    """Return "right", "refused", "plain refuses", or what is wrong."""
    program = compiled(source)
    expected = right(program)
    if expected is None:
        return "plain refuses"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.RematWarning)
        try:
            found = outcome(program, APIS[api], inputs())
        except RuntimeError as error:
            if not any(text in str(error) for text in REFUSALS):
                raise
            return "refused"
    try:
        assert_same(found, expected)
    except AssertionError as error:
        return str(error)
    return "right"


@pytest.mark.parametrize("seed", range(250))
def test_a_random_program(seed: int) -> None:
    api = list(APIS)[seed % len(APIS)]
    source = draw(seed)
    assert verdict_of(source, api) in ("right", "refused", "plain refuses"), f"{api}\n{source}"


def test_most_programs_are_right() -> None:
    verdicts = [verdict_of(draw(seed), "segment") for seed in range(80)]
    assert verdicts.count("right") >= 35
    assert verdicts.count("refused") <= 28
