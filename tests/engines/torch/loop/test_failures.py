"""Steps of loops that raise or return something else; nothing is left switched on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat

from .oracles import SCHEDULES, Plain, Remat

ALL = pytest.mark.parametrize("schedule", SCHEDULES)


class Bomb:
    """A step that raises at one of its calls."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.calls = at, error, 0
        self.w = nn.Parameter(torch.tensor([0.5, 0.7]))

    def __call__(self, x):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return torch.tanh(x * self.w)


def gradient(run, step):
    step.w.grad = None
    run.loop(step, torch.tensor([1.0, -0.4]), 8).sum().backward()
    return step.w.grad


@ALL
@pytest.mark.parametrize("at", [1, 2, 7, 8, 9, 11, 14, 17])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_comes_out_as_it_is_with_the_step(schedule, at, kind) -> None:
    step = Bomb(-1, kind("mine"))
    gradient(Remat(schedule=schedule), step)
    if at > step.calls:
        return
    step.calls, step.at = 0, at
    with pytest.raises(kind) as caught:
        gradient(Remat(schedule=schedule), step)
    assert caught.value is step.error
    if at <= 8 and kind is ValueError:
        assert f"step {at - 1} " in caught.value.__notes__[0]
    step.at = -1
    assert torch.equal(gradient(Remat(schedule=schedule), step), gradient(Plain(), step))


@ALL
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "step",
    [lambda s: (s, s), lambda s: [s], lambda s: None, lambda s: {"a": s}, lambda s: 3.0],
    ids=["tuple", "list", "None", "dict", "number"],
)
def test_a_step_that_returns_another_structure(step, schedule, traced) -> None:
    if step(1) == 3.0:
        pytest.skip("a number is a leaf as well")
    with pytest.raises(TypeError, match="step 0 returned"):
        Remat(1, schedule=schedule).loop(step, torch.ones(3, requires_grad=traced), 5)


@ALL
def test_a_structure_that_changes_on_the_way(schedule) -> None:
    def step(s):
        return (s["x"], s["k"] + 1) if s["k"] == 3 else {"x": s["x"] * 2, "k": s["k"] + 1}

    with pytest.raises(TypeError, match="step 3 returned"):
        Remat(schedule=schedule).loop(step, {"x": torch.ones(3, requires_grad=True), "k": 0}, 6)


@pytest.mark.parametrize("state", [torch.arange(3), (torch.arange(3), 1)])
def test_a_state_without_floating_tensors(state) -> None:
    with pytest.raises(TypeError, match="no floating-point tensor"):
        remat.checkpointed_loop(lambda s: s, state, 10)


@ALL
def test_a_state_that_was_written_to_before_the_backward_pass(schedule) -> None:
    """Either it makes no difference, or it is an error."""
    w = nn.Parameter(torch.tensor(1.1))

    def run(api, spoil):
        x = torch.ones(3)
        y = api.loop(lambda s: torch.tanh(s * w), x, 9)
        if spoil:
            x.add_(1)
        return torch.autograd.grad(y.sum(), w)[0]

    found = unless_refused(lambda: run(Remat(schedule=schedule), spoil=True))
    assert found is None or torch.equal(found, run(Plain(), spoil=False))


def unless_refused(call):
    """Return what a call returns; None if something was written to."""
    try:
        return call()
    except RuntimeError as error:
        if "inplace operation" in str(error):
            return None
        raise


@ALL
@pytest.mark.parametrize("op", [torch.tanh, lambda x: x + 1])
def test_a_final_state_that_was_written_to(schedule, op) -> None:
    """As in a plain loop: an error if the last step needs it, otherwise none."""
    w = nn.Parameter(torch.tensor(1.1))

    def run(api):
        y = api.loop(lambda s: op(s * w), torch.ones(3), 9)
        y.mul_(2)
        return torch.autograd.grad(y.sum(), w)[0]

    if op is torch.tanh:
        for api in (Plain(), Remat(schedule=schedule)):
            with pytest.raises(RuntimeError, match="inplace operation"):
                run(api)
    else:
        assert torch.equal(run(Remat(schedule=schedule)), run(Plain()))


@pytest.mark.parametrize("slots", [0, 2, 50])
@pytest.mark.parametrize("op", [torch.tanh, lambda x: x + 1])
def test_the_final_state_of_a_while_that_was_written_to(slots, op) -> None:
    """It is an error, or makes no difference."""
    w = nn.Parameter(torch.tensor(1.1))

    def run(api):
        y, _ = api.until(lambda s: s[1] < 9, lambda s: (op(s[0] * w), s[1] + 1), (torch.ones(3), 0))
        if not isinstance(api, Plain):
            y.mul_(2)
            return torch.autograd.grad(y.sum(), w)[0]
        return torch.autograd.grad(2 * y.sum(), w)[0]

    try:
        found = run(Remat(slots))
    except (RuntimeError, remat.RecomputeMismatchError):
        return
    assert torch.equal(found, run(Plain()))


@ALL
def test_changing_a_checkpoint_does_not_change_the_gradient(schedule) -> None:
    x = torch.randn(4, requires_grad=True)

    def run(spoil):
        final, checkpoints = remat.checkpointed_loop(torch.sin, x, 30, 5, schedule=schedule)
        if spoil:
            with torch.no_grad():
                for state in checkpoints.values():
                    state.zero_()
        return torch.autograd.grad(final.sum(), x)[0]

    found = unless_refused(lambda: run(spoil=True))
    assert found is None or torch.equal(found, run(spoil=False))
