"""More than one backward pass over a loop, and what is left of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import remat
from remat.loops import LoopOptions, Measured


def gradient(final, x):
    return torch.autograd.grad(final.sum(), x, retain_graph=True)[0]


def test_a_second_pass_that_leads_elsewhere_is_refused() -> None:
    x, factor = torch.ones(3, requires_grad=True), [1.5]
    final, _ = remat.checkpointed_loop(lambda s: s * factor[0], x, 6, 2)
    assert gradient(final, x).tolist() == [1.5**6] * 3
    factor[0] = 1.25
    with pytest.raises(remat.RecomputeMismatchError, match="whole loop was run again"):
        gradient(final, x)


def test_a_second_pass_over_a_result_that_was_written_to() -> None:
    x = torch.ones(3, requires_grad=True)
    final, _ = remat.checkpointed_loop(lambda s: s * 1.5, x, 6, 2)
    total = final.sum()
    torch.autograd.grad(total, x, retain_graph=True)
    with torch.no_grad():
        final.zero_()
    assert torch.autograd.grad(total, x)[0].tolist() == [1.5**6] * 3


def test_a_second_pass_over_a_while_loop_whose_condition_draws() -> None:
    def condition(s):
        return np.random.rand() < 0.8

    def step(s):
        return s * np.random.rand()

    np.random.seed(3)
    factor = 1.0
    while condition(None):
        factor = step(factor)
    after = np.random.rand()
    np.random.seed(3)
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    final, _ = remat.checkpointed_while(condition, step, x, 2)
    for _ in range(3):
        np.testing.assert_allclose(gradient(final, x), [factor] * 2, rtol=1e-12)
    assert np.random.rand() == after


@pytest.mark.parametrize("traced", [False, True])
def test_a_loop_without_steps_holds_nothing(traced) -> None:
    x = torch.ones(3, requires_grad=traced)
    final, checkpoints = remat.checkpointed_loop(torch.sin, x, 0)
    assert final is x
    assert dict(checkpoints) == {}


def test_the_room_of_checkpoints_and_tapes() -> None:
    measured = Measured(state_bytes=100, tape_bytes=500, working_bytes=1500)
    assert LoopOptions(50, 7, None, "auto").room(measured) == 700
    assert LoopOptions(50, None, 5000, "auto").room(measured) == 5000


def test_a_disk_store_within_a_budget(tmp_path) -> None:
    x, calls = np.linspace(0.1, 1.0, 2000), []

    def step(s):
        calls.append(None)
        return np.sin(s)

    def loss(x):
        options = {"memory_budget": "300KB", "store": remat.DiskStore(tmp_path)}
        final, _ = remat.checkpointed_loop(step, x, 60, **options)
        assert len(calls) == 60
        return np.sum(final)

    expected = np.ones_like(x)
    for _ in range(60):
        expected, x = expected * np.cos(x), np.sin(x)
    np.testing.assert_allclose(remat.grad(loss)(np.linspace(0.1, 1.0, 2000)), expected, rtol=1e-10)
    assert list(tmp_path.iterdir()) == []
