"""Gradients of loops reach all that a step closes over, and what it puts aside is not lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat

from .oracles import SCHEDULES, Plain, Remat, same
from .test_run import Twice

ALL = pytest.mark.parametrize("schedule", SCHEDULES)


def matrices(count: int):
    return [nn.Parameter(torch.randn(4, 4) * 0.5) for _ in range(count)]


def state():
    return torch.randn(2, 4)


# -- what is closed over ---------------------------------------------------------------------------


def leaves(run, x, Ws):
    return run.loop(lambda s: torch.tanh(s @ Ws[0]) + s @ Ws[1], x, 7)


def a_part_of_a_graph(run, x, Ws):
    V = Ws[0].exp() * 0.1
    return run.loop(lambda s: torch.tanh(s @ V), x, 7)


def a_part_of_a_graph_and_its_leaf(run, x, Ws):
    V = Ws[0].exp() * 0.1
    return run.loop(lambda s: torch.tanh(s @ V + s @ Ws[0] + V.sum(0)), x, 7)


def a_view_of_a_leaf(run, x, Ws):
    v = Ws[0][:2].T
    return run.loop(lambda s: torch.tanh(torch.cat([s @ v, s @ v], 1)), x, 7)


def a_list_by_step(run, x, Ws):
    def step(s):
        h, i = s
        return torch.tanh(h @ Ws[i]), i + 1

    return run.loop(step, (x, 0), 7)


def a_list_by_step_of_parts_of_graphs(run, x, Ws):
    Vs = [W.sin() for W in Ws]

    def step(s):
        h, i = s
        return torch.tanh(h @ Vs[i]), i + 1

    return run.loop(step, (x, 0), 7)


def rows_of_a_part_of_a_graph(run, x, Ws):
    V = torch.stack(Ws) * 1.1

    def step(s):
        h, i = s
        return torch.tanh(h @ V[i]), i + 1

    return run.loop(step, (x, 0), 7)


def in_a_list_argument(run, x, Ws):
    V = Ws[0].sin()
    return run.loop(lambda s: torch.cat([s @ V, V], 0)[-2:] + s, x, 7)


def by_keyword(run, x, Ws):
    V, b = Ws[0].sin(), Ws[1].sum(0)
    return run.loop(lambda s: F.linear(s, weight=V, bias=b).tanh(), x, 7)


def attributes(run, x, Ws):
    V = Ws[0].sin()
    return run.loop(lambda s: torch.tanh(s @ V.T) + V.mT[:2] * V.shape[0], x, 7)


def returned_as_it_is(run, x, Ws):
    V = Ws[0].sin()
    return run.loop(lambda s: (s[0] @ s[1] + s[0], V), (x, Ws[1]), 7)


def frozen(run, x, Ws):
    Ws[0].requires_grad_(False)
    return run.loop(lambda s: torch.tanh(s @ Ws[0] @ Ws[1]), x, 7)


def tied(run, x, Ws):
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    a.weight = b.weight = Ws[0]
    return run.loop(lambda s: torch.tanh(F.linear(F.linear(s, a.weight), b.weight)), x, 7)


def used_by_some_steps(run, x, Ws):
    def step(s):
        h, i = s
        return torch.tanh(h @ Ws[0] if i in (2, 5) else h @ Ws[1] if i == 0 else h + 0.1), i + 1

    return run.loop(step, (x, 0), 7)


def whose_gradients_are_one_tensor(run, x, Ws):
    a, b = Ws[0][:2], Ws[1][:2]  # as large as the state, whose gradient is theirs, too
    return run.loop(lambda s: s + a + b, x, 7)


def whose_gradients_are_views_of_one_tensor(run, x, Ws):
    def step(s):
        whole = torch.cat([Ws[0], Ws[1]])
        return torch.tanh(s @ whole[:4] + whole[4:6]) + Ws[2][:2]

    return run.loop(step, x, 7)


def most_of_which_no_step_of_a_run_uses(run, x, Ws):
    def step(s):
        h, i = s
        return torch.tanh(h @ (Ws[6] if i == 3 else Ws[0])), i + 1

    return run.loop(step, (x, 0), 7)


def by_a_custom_function(run, x, Ws):
    w = Ws[0]
    return run.loop(lambda s: Twice.apply(s @ w, w[:2]), x, 7)


def gradient_mode_inside(run, x, Ws):
    def step(s):
        with torch.no_grad():
            scale = (s @ Ws[0]).norm()
        return torch.tanh(s @ Ws[1] / (1 + scale))

    return run.loop(step, x, 7)


PROGRAMS = [
    leaves,
    a_part_of_a_graph,
    a_part_of_a_graph_and_its_leaf,
    a_view_of_a_leaf,
    a_list_by_step,
    a_list_by_step_of_parts_of_graphs,
    rows_of_a_part_of_a_graph,
    in_a_list_argument,
    by_keyword,
    attributes,
    returned_as_it_is,
    frozen,
    tied,
    used_by_some_steps,
    whose_gradients_are_one_tensor,
    whose_gradients_are_views_of_one_tensor,
    most_of_which_no_step_of_a_run_uses,
    by_a_custom_function,
    gradient_mode_inside,
]


@ALL
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_reach_what_a_step_uses(program, traced, schedule) -> None:
    same(program, lambda: (state().requires_grad_(traced), matrices(7)), Remat(schedule=schedule))


@ALL
def test_modules(schedule) -> None:
    def program(run, x, layers):
        def step(s):
            h, i = s
            return layers[i](h), i + 1

        return run.loop(step, (x, 0), 5)

    def inputs():
        layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(5)
        )
        return state(), layers

    same(program, inputs, Remat(schedule=schedule))


def test_something_that_only_a_later_step_uses_needs_a_state_that_requires_grad() -> None:
    w = nn.Parameter(torch.ones(3))

    def step(s):
        h, i = s
        return (h * w if i == 3 else h * 2), i + 1

    with pytest.raises(remat.UnsupportedError, match="requires_grad_"):
        remat.checkpointed_loop(step, (torch.ones(3), 0), 6)


def test_where_remat_does_not_look_is_refused() -> None:
    """A tensor from a graph that goes into a custom function, which modes do not see."""
    V = torch.randn(4, requires_grad=True).exp()
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(remat.UnsupportedError, match="does not look"):
        remat.checkpointed_loop(lambda s: Twice.apply(s, V), x, 5)


# -- hooks -----------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("budget", [False, True])
def test_hooks_of_parameters_see_whole_gradients(schedule, budget) -> None:
    calls = []

    def run_with(run):
        torch.manual_seed(0)
        x, (W, V) = state(), matrices(2)
        U = V.sin()
        W.register_hook(lambda g: calls.append("W") or 2 * g)
        U.register_hook(lambda g: calls.append("U") or 3 * g)
        W.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
        U.retain_grad()
        run.loop(lambda s: torch.tanh(s @ W @ U), x, 9).sum().backward()
        found, calls[:] = (list(calls), [W.grad, V.grad, U.grad]), []
        return found

    options = {"memory_budget": "1MB", "slots": None} if budget else {}
    found, gradients = run_with(Remat(schedule=schedule, **options))
    expected_calls, expected = run_with(Plain())
    assert sorted(found) == sorted(expected_calls) == ["U", "W", "after"]
    assert all(map(torch.equal, gradients, expected))


def test_a_hook_that_is_added_after_the_loop_and_removed_after_the_pass() -> None:
    x, (W,) = state(), matrices(1)
    y = Remat().loop(lambda s: torch.tanh(s @ W), x, 9)
    seen = []
    handle = W.register_hook(lambda g: seen.append(g.clone()))
    y.sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], W.grad)
    handle.remove()
    Remat().loop(lambda s: torch.tanh(s @ W), x, 9).sum().backward()
    assert len(seen) == 1


@ALL
def test_hooks_inside_of_a_step(schedule) -> None:
    def program(run, x, Ws):
        def step(s):
            h = s @ Ws[0]
            h.register_hook(lambda g: g * 0.5)
            return torch.tanh(h)

        return run.loop(step, x, 7)

    same(program, lambda: (state().requires_grad_(), matrices(1)), Remat(schedule=schedule))


# -- what is stored -----------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("both", [False, True])
def test_a_loss_through_what_a_step_put_aside_is_refused(schedule, both) -> None:
    x, (W,) = state(), matrices(1)
    losses = []

    def step(s):
        s = torch.tanh(s @ W)
        losses.append(s.sum())
        return s

    final = Remat(schedule=schedule).loop(step, x.requires_grad_(), 7)
    if both:  # (then autograd may find first that parts of the graph are used up)
        with pytest.raises((remat.UnsupportedError, RuntimeError), match=r"scan|second time"):
            (final.sum() + sum(losses)).backward()
    else:
        with pytest.raises(remat.UnsupportedError, match="checkpointed_scan"):
            sum(losses).backward()


@ALL
def test_a_loss_through_a_part_of_a_graph_that_a_step_put_aside_is_refused(schedule) -> None:
    x, (W,) = state(), matrices(1)
    V, aside = W.exp(), []

    def step(s):
        aside.append(V.sum() * 2)
        return torch.tanh(s @ V)

    final = Remat(schedule=schedule).loop(step, x, 7)
    with pytest.raises(remat.UnsupportedError, match="checkpointed_scan"):
        (final.sum() + sum(aside)).backward()


@ALL
def test_what_was_put_aside_may_be_looked_at(schedule) -> None:
    def program(run, x, Ws):
        seen = []

        def step(s):
            s = torch.tanh(s @ Ws[0])
            seen.append(s)
            return s

        y = run.loop(step, x, 7)
        return y, [s.detach().clone() for s in seen[:7]]

    same(program, lambda: (state().requires_grad_(), matrices(1)), Remat(schedule=schedule))


@ALL
@pytest.mark.parametrize("direct", [True, False])
def test_a_step_that_uses_what_an_earlier_one_put_aside_is_refused(schedule, direct) -> None:
    x, (W,) = state().requires_grad_(), matrices(1)
    aside = []

    def step(s):
        new = torch.tanh(s @ W)
        if aside:
            new = new + aside[-1]
        aside.append(s if direct else s * 2)
        return new

    with pytest.raises(remat.UnsupportedError, match="earlier step and stored"):
        Remat(schedule=schedule).loop(step, x, 7)


@ALL
def test_what_one_loop_put_aside_is_refused_in_another(schedule) -> None:
    x, (W,) = state().requires_grad_(), matrices(1)
    aside = []

    def first(s):
        aside.append(s)
        return torch.tanh(s @ W)

    y = Remat(schedule=schedule).loop(first, x, 7)
    z = Remat(schedule=schedule).loop(lambda s: s * aside[3], y, 3)
    with pytest.raises((remat.UnsupportedError, RuntimeError), match=r"stored|second time"):
        z.sum().backward()


def test_a_cache_that_a_step_fills_is_no_silent_error() -> None:
    x, (W,) = state(), matrices(1)
    cache = []

    def step(s):
        if not cache:
            cache.append(W.exp())
        return torch.tanh(s @ cache[0])

    with pytest.raises(RuntimeError, match="second time") as caught:
        Remat().loop(step, x, 7).sum().backward()
    assert "earlier step" in caught.value.__notes__[0]


@ALL
def test_leaves_that_a_step_makes_for_itself(schedule) -> None:
    def program(run, x, Ws):
        def step(s):
            own = torch.full((4,), 0.5, requires_grad=True)
            (g,) = torch.autograd.grad((own * own).sum() * 0.5, own, create_graph=True)
            return torch.tanh(s @ Ws[0]) * g + own

        return run.loop(step, x, 7)

    same(program, lambda: (state(), matrices(1)), Remat(schedule=schedule))


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])
def test_leaves_that_a_step_makes_and_keeps_are_refused(schedule) -> None:
    x, (W,) = state(), matrices(1)
    made = []

    def step(s):
        made.append(torch.full((4,), 0.5, requires_grad=True))
        return torch.tanh(s @ W) * made[-1]

    y = Remat(schedule=schedule).loop(step, x, 7)
    with pytest.raises(remat.UnsupportedError, match="Make it before the loop"):
        y.sum().backward()


# -- between the two passes ------------------------------------------------------------------------


@ALL
def test_a_parameter_that_was_changed_before_the_backward_pass(schedule) -> None:
    x, (W,) = state(), matrices(1)
    y = Remat(schedule=schedule).loop(lambda s: torch.tanh(s @ W), x, 7)
    with torch.no_grad():
        W.mul_(0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@ALL
def test_a_parameter_that_has_other_data_before_the_backward_pass(schedule) -> None:
    x, (W,) = state(), matrices(1)
    y = Remat(schedule=schedule).loop(lambda s: torch.tanh(s @ W), x, 7)
    W.data = W.data * 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@ALL
def test_a_parameter_that_was_frozen_before_the_backward_pass(schedule) -> None:
    x, (W,) = state(), matrices(1)
    y = Remat(schedule=schedule).loop(lambda s: torch.tanh(s @ W), x, 7)
    W.requires_grad_(False)
    with pytest.raises(RuntimeError, match="required grad when the loop ran"):
        y.sum().backward()


@ALL
def test_a_parameter_that_was_thawed_before_the_backward_pass(schedule) -> None:
    x, (W, V) = state(), matrices(2)

    def gradient(run):
        V.requires_grad_(False)
        W.grad = V.grad = None
        y = run.loop(lambda s: torch.tanh(s @ W @ V), x, 7)
        V.requires_grad_()
        y.sum().backward()
        assert V.grad is None
        return W.grad

    assert torch.equal(gradient(Remat(schedule=schedule)), gradient(Plain()))


# -- threads ---------------------------------------------------------------------------------------


def gradient_of_a_thread(run, number, wait=lambda: None):
    generator = torch.Generator().manual_seed(number)
    W = torch.randn(4, 4, generator=generator).requires_grad_()
    V = W.sin()
    x = torch.randn(2, 4, generator=generator)

    def step(s):
        h, i = s
        if i == 3:
            wait()
        mask = torch.empty(2, 4).bernoulli_(0.7, generator=generator)
        return torch.tanh(h @ V) * mask, i + 1

    run.loop(step, (x, 0), 9)[0].sum().backward()
    return W.grad


@ALL
def test_loops_in_several_threads(schedule) -> None:
    count = 3
    barrier = threading.Barrier(count, timeout=600)
    once = threading.local()

    def wait():
        if not getattr(once, "waited", False):
            once.waited = True
            barrier.wait()

    with ThreadPoolExecutor(count) as pool:
        found = list(
            pool.map(
                lambda n: gradient_of_a_thread(Remat(schedule=schedule), n, wait), range(count)
            )
        )
    for number, one in enumerate(found):
        assert torch.equal(one, gradient_of_a_thread(Plain(), number))


@pytest.mark.parametrize("make", [lambda W: W.exp() * 0.1, lambda W: W + 1, lambda W: W.T])
@ALL
def test_parts_of_graphs_of_another_thread(schedule, make) -> None:
    """(Autograd counts its nodes in each thread by itself.)"""
    x, (W,) = state(), matrices(1)

    def gradient(run):
        V = make(W)
        W.grad = None
        body = partial(run.loop, lambda s: torch.tanh(s @ V), x, 7)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(body).result().sum().backward()
        return W.grad

    assert torch.equal(gradient(Remat(schedule=schedule)), gradient(Plain()))


@pytest.mark.parametrize("schedule", ["auto", "revolve", "all"])
def test_leaves_that_a_step_makes_for_itself_do_not_stop_a_second_way_back(schedule) -> None:
    weight = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
    start = torch.linspace(0, 1, 4, dtype=torch.float64).requires_grad_()

    def step(x):
        place = x.detach().requires_grad_()
        energy = torch.tanh(place @ weight).square().sum()
        (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return 0.9 * x - 0.1 * force

    final, _ = remat.checkpointed_loop(step, start, 30, 4, schedule=schedule)
    once = torch.autograd.grad(final.sum(), [start, weight], retain_graph=True)
    twice = torch.autograd.grad(final.sum(), [start, weight])
    assert all(map(torch.equal, once, twice))
