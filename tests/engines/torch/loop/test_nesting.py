"""Loops inside of the steps of loops; the oracle is a plain loop inside of a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat

from .oracles import SCHEDULES, Plain, Remat, outcome

ALL = pytest.mark.parametrize("schedule", SCHEDULES)


def close(program, make_inputs, run) -> None:
    """Compare with plain loops; an inner loop is one node, so sums have another order there."""
    expected = outcome(program, Plain(), make_inputs())
    found = outcome(program, run, make_inputs())
    for what in ("outputs", "gradients"):
        for one, other in zip(found[what], expected[what], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0.0)


def double(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def loop_from(run, z, h):
    return run.loop(torch.sin, z, 3)


def scan_from(run, z, h):
    return run.scan(lambda s, x: (torch.sin(s) * x, s), z, torch.ones(3))[0]


def while_from(run, z, h):
    return run.until(lambda s: s[1] < 3, lambda s: (torch.sin(s[0]), s[1] + 1), (z, 0))[0]


def scan_over(run, z, h):
    return run.scan(lambda s, x: (torch.sin(s) + x, s * x), h, z)[1].sum(0)


def scan_over_parts(run, z, h):
    return run.scan(lambda s, x: (s + x["a"] * x["b"], s), h.sum(), {"a": z, "b": z})[0]


def loop_with(run, z, h):
    return run.loop(lambda q: torch.sin(q) * z, h, 3)


def loop_from_and_with(run, z, h):
    return run.loop(lambda q: torch.sin(q) * z + h, z, 3)


def loop_in_loop_with(run, z, h):
    return run.loop(lambda q: run.loop(lambda r: torch.sin(r * z), q * z, 2), h, 2)


def loop_in_loop_from(run, z, h):
    return run.loop(lambda q: q + run.loop(torch.sin, z, 2) * run.loop(torch.cos, h, 2), h, 2)


def result_of_a_step(run, z, h):
    return run.loop(lambda q: z, h, 2)


INNER = [
    loop_from,
    scan_from,
    while_from,
    scan_over,
    scan_over_parts,
    loop_with,
    loop_from_and_with,
    loop_in_loop_with,
    loop_in_loop_from,
    result_of_a_step,
]


@ALL
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("is_leaf", [False, True])
def test_an_inner_loop_over_what_the_outer_step_closes_over(inner, is_leaf, schedule) -> None:
    def program(run, x, h):
        z = x if is_leaf else x * 2
        return run.loop(lambda h: torch.tanh(h * inner(run, z, h)), h, 4)

    close(
        program,
        lambda: (double(0.3, 0.5, -0.2), double(1.0, -0.4, 0.7)),
        Remat(1, schedule=schedule),
    )


@ALL
def test_a_step_that_returns_what_it_closes_over(schedule) -> None:
    def program(run, x, h):
        z = x.exp()
        return run.scan(lambda s, y: (s * z, z), h, torch.ones(5))

    inputs = (0.3, 0.5, -0.2), (1.0, -0.4, 0.7)
    close(program, lambda: tuple(double(*x) for x in inputs), Remat(1, schedule=schedule))


# -- what no gradient flows to ---------------------------------------------------------------------


class Seen(torch.autograd.Function):
    """Passes on; notes the gradients that come back."""

    gradients: list[torch.Tensor] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Seen.gradients.append(gradient)
        return gradient


def detached(run, y, h):
    return run.loop(lambda s: s * y.detach(), h, 4)


def under_no_grad(run, y, h):
    def step(s):
        with torch.no_grad():
            factor = y * 2
        return s * factor

    return run.loop(step, h, 4)


def state_not_used(run, y, h):
    return run.loop(lambda s: h.sin() + s.detach(), y, 4)


def inputs_not_used(run, y, h):
    return run.scan(lambda s, x: (s * x.detach(), s), h, y)[0]


def only_its_shape(run, y, h):
    return run.loop(lambda s: s * y.shape[0] + y.new_ones(3), h, 4)


@ALL
@pytest.mark.parametrize(
    "use", [detached, under_no_grad, state_not_used, inputs_not_used, only_its_shape]
)
def test_what_is_only_looked_at_gets_no_gradient(use, schedule) -> None:
    def run(api):
        Seen.gradients, called = [], []
        x = torch.tensor([0.3, 0.5, 0.2], requires_grad=True)
        h = torch.tensor([1.0, -0.4, 0.7], requires_grad=True)
        y = Seen.apply(x)
        y.register_hook(called.append)
        use(api, y, h).sum().backward()
        return x.grad, called, Seen.gradients, h.grad

    expected, found = run(Plain()), run(Remat(1, schedule=schedule))
    assert expected[:3] == (None, [], [])
    assert found[:3] == (None, [], [])
    assert torch.equal(found[3], expected[3])


def test_a_use_that_a_second_run_adds_is_refused() -> None:
    x, h = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    y, calls = x * 2, []

    def step(s):
        calls.append(None)
        return s * (y.detach() if len(calls) <= 4 else y)

    final, _ = remat.checkpointed_loop(step, h, 4, 1, schedule="revolve")
    with pytest.raises(remat.RecomputeMismatchError, match="did not use the first time"):
        final.sum().backward()


def test_modules_inside_of_an_inner_loop_over_parts_of_graphs() -> None:
    def program(run, model, x, h):
        z = model(x)
        return run.loop(lambda s: model(run.loop(lambda q: torch.tanh(q @ z), s, 3)), h, 4)

    def inputs():
        torch.manual_seed(0)
        like = {"dtype": torch.float64}
        return nn.Linear(3, 3, **like), torch.randn(3, 3, **like), torch.randn(2, 3, **like)

    close(program, inputs, Remat(1))
