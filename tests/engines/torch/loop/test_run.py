"""`checkpointed_loop`, `_scan` and `_while` on tensors, against plain loops under autograd."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.schedules import Revolve, StoreAll, Uniform

from .oracles import SCHEDULES, Plain, Remat, note_schedules, same

ALL = pytest.mark.parametrize("schedule", SCHEDULES)


def rnn(run, x, W, b, steps=9):
    return run.loop(lambda s: torch.tanh(s @ W + b), x, steps)


def rnn_inputs(dtype=torch.float32, rows=2):
    return (
        torch.randn(rows, 4, dtype=dtype).requires_grad_(),
        nn.Parameter(torch.randn(4, 4, dtype=dtype) * 0.5),
        nn.Parameter(torch.randn(4, dtype=dtype) * 0.1),
    )


# -- gradients -------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 10, 37])
@pytest.mark.parametrize("slots", [None, 0, 1, 3, 50])
def test_gradients_have_the_bits_of_a_plain_loop(schedule, steps, slots) -> None:
    same(partial(rnn, steps=steps), rnn_inputs, Remat(slots, schedule=schedule))


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_types(schedule, dtype) -> None:
    same(rnn, partial(rnn_inputs, dtype), Remat(schedule=schedule))


@ALL
def test_gradcheck(schedule) -> None:
    def f(x, W, b):
        return rnn(Remat(schedule=schedule), x, W, b, 7)

    assert torch.autograd.gradcheck(f, rnn_inputs(torch.float64))


@ALL
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 2), (2, 1, 3)])
def test_shapes(schedule, shape) -> None:
    def program(run, x):
        return run.loop(lambda s: s.sin() + s, x, 7)

    same(program, lambda: (torch.full(shape, 0.3).requires_grad_(),), Remat(schedule=schedule))


def grows(s):
    return torch.cat([s * 0.9, s[-1:].sin()])


def shrinks(s):
    return s[1:] * s[:-1]


def shrinks_as_a_view(s):
    return s[1:]


def turns(s):
    return s.T * 1.1


def turns_as_a_view(s):
    return s.T


def repeats_itself(s):
    return s


def is_expanded(s):
    return s.mean(0, keepdim=True).expand(s.shape)


@ALL
@pytest.mark.parametrize(
    "step", [grows, shrinks, shrinks_as_a_view, turns, turns_as_a_view, repeats_itself, is_expanded]
)
def test_layouts_and_changing_shapes(schedule, step) -> None:
    same(
        lambda run, x: run.loop(step, x, 7),
        lambda: (torch.randn(9, 9).requires_grad_(),),
        Remat(schedule=schedule),
    )


@ALL
def test_nan_and_infinity(schedule) -> None:
    factors = torch.tensor([1.0, math.nan, math.inf, -2.0])
    same(
        lambda run, x: run.loop(lambda s: s * factors, x, 7),
        lambda: (torch.tensor([1.0, 1.0, 0.0, -0.0]).requires_grad_(),),
        Remat(schedule=schedule),
    )


@ALL
def test_remat_grad(schedule) -> None:
    x, W, b = (t.detach() for t in rnn_inputs())
    value, found = remat.value_and_grad(
        lambda *a: rnn(Remat(schedule=schedule), *a).sum(), wrt=(0, 1, 2)
    )(x, W, b)
    given = [t.clone().requires_grad_() for t in (x, W, b)]
    expected = rnn(Plain(), *given).sum()
    assert torch.equal(value, expected)
    assert all(map(torch.equal, found, torch.autograd.grad(expected, given)))


# -- states ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Point:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenPoint:
    x: Any
    y: Any


TREES = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"y": y, "x": x},
    "named": Pair,
    "dataclass": Point,
    "frozen": FrozenPoint,
    "nested": lambda x, y: {"a": [Point(x, (y, None))]},
}


def parts(tree):
    match tree:
        case {"a": [Point(x=x, y=(y, None))]}:
            return x, y
        case {"x": x, "y": y}:
            return x, y
        case Point() | FrozenPoint():
            return tree.x, tree.y
    return tuple(tree)


@ALL
@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_any_tree_is_a_state(make, schedule) -> None:
    def step(tree):
        x, y = parts(tree)
        return make(x.cos() * y, y.sin() + x)

    def program(run, x, y):
        final = run.loop(step, make(x, y), 11)
        assert type(final) is type(make(x, y))
        return parts(final)

    same(
        program,
        lambda: (torch.randn(4).requires_grad_(), torch.randn(4).requires_grad_()),
        Remat(schedule=schedule),
    )


EXTRAS = {
    "int": (0, lambda k: k + 1),
    "bool": (True, lambda k: not k),
    "float": (0.5, lambda k: k * 0.9),
    "int tensor": (torch.arange(4), lambda k: k + 1),
    "bool tensor": (torch.tensor([True, False, True, True]), lambda k: ~k),
    "float tensor": (torch.linspace(0, 1, 4), lambda k: k.exp() * 0.3),
}


@ALL
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("name", EXTRAS)
def test_what_requires_no_grad_passes_through(name, schedule, traced) -> None:
    start, change = EXTRAS[name]

    def program(run, x):
        return run.loop(lambda s: (s[0] * (0.9 + 0.01 * s[1]), change(s[1])), (x, start), 9)

    same(program, lambda: (torch.randn(4).requires_grad_(traced),), Remat(schedule=schedule))


@ALL
def test_what_begins_to_require_grad_on_the_way(schedule) -> None:
    def program(run, x, w):
        def step(s):
            a, b, k = s
            return a.sin(), b + (a * w).sum() if k == 3 else b * 1.5, k + 1

        return run.loop(step, (x, torch.zeros(()), 0), 7)

    def inputs():
        return torch.randn(4).requires_grad_(), nn.Parameter(torch.randn(4))

    same(program, inputs, Remat(schedule=schedule))


@ALL
def test_what_ceases_to_require_grad_on_the_way(schedule) -> None:
    def program(run, x):
        def step(s):
            a, k = s
            return (a.detach() if k == 3 else a).sin(), k + 1

        return run.loop(step, (x, 0), 7)

    same(program, lambda: (torch.randn(4).requires_grad_(),), Remat(schedule=schedule))


@ALL
def test_one_tensor_that_stands_in_the_state_twice(schedule) -> None:
    def program(run, x):
        h = x * 2
        a, b = run.loop(lambda s: (s[0] * s[1].sin(), s[1]), (h, h), 4)
        c, d = run.loop(lambda s: (s[0] * s[1], s[0] * s[1]), (h, h), 4)
        return a, b, c, d

    same(program, lambda: (torch.randn(4).requires_grad_(),), Remat(schedule=schedule))


def returns_one_twice(s):
    new = s[0] * s[1].cos()
    return new, new


@ALL
def test_a_step_that_returns_one_tensor_twice(schedule) -> None:
    same(
        lambda run, x: run.loop(returns_one_twice, (x, x * 2), 6),
        lambda: (torch.randn(4).requires_grad_(),),
        Remat(schedule=schedule),
    )


@ALL
def test_a_parameter_as_the_initial_state_and_closed_over(schedule) -> None:
    """(Two ways lead to one gradient, in another order: equal up to rounding.)"""
    W = nn.Parameter(torch.randn(4, 4, dtype=torch.float64) * 0.5)

    def program(run):
        return run.loop(lambda s: (s @ W).tanh(), W, 6)

    (expected,) = torch.autograd.grad(program(Plain()).sum(), W)
    (found,) = torch.autograd.grad(program(Remat(schedule=schedule)).sum(), W)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


# -- in place --------------------------------------------------------------------------------------


def whole(u):
    u *= 0.9
    u += 0.1
    return u


def slices(u):
    u[1:-1] += 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2])
    return u


def a_view(u):
    v = u[1:]
    v *= 0.5
    return u


def a_copy(u):
    u = u.clone()
    u[0] = u[-1] * 0.5
    return u


def returns_a_view(u):
    u += 0.1
    return u.flip(0).t().t()[1:]


def without_gradients(u):
    with torch.no_grad():
        u.mul_(1.1)
    return u * 0.9


IN_PLACE = [whole, slices, a_view, a_copy, returns_a_view, without_gradients]


@ALL
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("step", IN_PLACE)
def test_steps_may_work_in_place(step, schedule, traced) -> None:
    same(
        lambda run, x: run.loop(step, x, 7),
        lambda: (torch.randn(9, 3).requires_grad_(traced),),
        Remat(schedule=schedule),
    )


@ALL
def test_steps_may_write_to_their_input(schedule) -> None:
    def step(s, x):
        x += s
        s *= 0.9
        return s + x.sin(), x

    same(
        lambda run, x, xs: run.scan(step, x, xs),
        lambda: (torch.randn(3).requires_grad_(), torch.randn(7, 3).requires_grad_()),
        Remat(schedule=schedule),
    )


@ALL
def test_one_tensor_that_stands_in_the_state_twice_and_is_written_to(schedule) -> None:
    def step(s):
        a, b = s
        a += 1
        return a, b

    def program(run, x):
        h = x * 2
        a, b = run.loop(step, (h, h), 5)
        return a * b

    same(program, lambda: (torch.randn(4).requires_grad_(),), Remat(schedule=schedule))


@ALL
@pytest.mark.parametrize("traced", [True, False])
def test_tensors_over_the_same_memory_are_refused_if_written_to(schedule, traced) -> None:
    """In the plain loop one would change with the other."""

    def step(s):
        a, b = s
        a += 1
        return a, b

    h = torch.randn(4, requires_grad=traced) * 2
    with pytest.raises(remat.UnsupportedError, match="same memory"):
        Remat(schedule=schedule).loop(step, (h, h.view(2, 2)), 5)
    with pytest.raises(remat.UnsupportedError, match="same memory"):
        Remat(schedule=schedule).loop(step, (h, h[1:]), 5)


def test_results_over_the_same_memory_are_refused_if_written_to() -> None:
    def step(s):
        a, _ = s
        a += 1
        return a, a[1:]

    h = torch.randn(4, requires_grad=True)
    with pytest.raises(remat.UnsupportedError, match="same memory"):
        Remat().loop(step, (h, h[1:] * 2), 5)


@pytest.mark.parametrize(
    "overlap",
    [lambda h: h.mean(0, keepdim=True).expand(4, 3), lambda h: h.view(-1).unfold(0, 3, 1)],
)
def test_a_state_that_overlaps_with_itself_is_refused_if_written_to(overlap) -> None:
    def step(s):
        s[:1] += 1
        return overlap(s * 2)[:4]

    with pytest.raises(remat.UnsupportedError, match="same memory"):
        Remat().loop(step, torch.randn(4, 3, requires_grad=True), 5)


@ALL
def test_parts_of_one_tensor_that_do_not_overlap_may_be_written_to(schedule) -> None:
    def step(s):
        a, b = s
        a += 0.1
        b *= 0.9
        new = torch.cat([b, a * b])
        return new[:3], new[3:]

    same(
        lambda run, x: run.loop(step, (x[:3], x[3:]), 6),
        lambda: (torch.randn(6).requires_grad_(),),
        Remat(schedule=schedule),
    )


def test_a_later_step_that_writes_in_place_is_refused() -> None:
    def step(s):
        x, k = s
        if k == 3:
            x.detach().add_(1)
        return x * 2, k + 1

    with pytest.raises(remat.UnsupportedError, match="step 3 writes"):
        Remat().loop(step, (torch.ones(3, requires_grad=True), 0), 6)


# -- scans -----------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("steps", [0, 1, 2, 13])
@pytest.mark.parametrize("slots", [None, 0, 3])
def test_a_scan(schedule, steps, slots) -> None:
    def program(run, h, xs, w):
        def step(h, x):
            h = torch.tanh(h * w + x["a"] + x["b"][0].sum())
            return h, {"sum": h.sum(), "both": (h * 2, x["a"])}

        return run.scan(step, h, {"a": xs[0], "b": xs[1]})

    def inputs():
        xs = torch.randn(steps, 4).requires_grad_(), torch.randn(steps, 2, 3)
        return torch.randn(4).requires_grad_(), xs, nn.Parameter(torch.randn(4))

    same(program, inputs, Remat(slots, schedule=schedule))


@ALL
def test_outputs_of_all_kinds(schedule) -> None:
    def step(s, x):
        h, k = s
        h = h.sin() * x
        return (h, k + 1), (k, float(k), h.argmax(), h > 0, h.detach(), h.sum().double(), h)

    same(
        lambda run, h, xs: run.scan(step, (h, 0), xs),
        lambda: (torch.randn(4).requires_grad_(), torch.randn(7, 4).requires_grad_()),
        Remat(schedule=schedule),
    )


@ALL
def test_only_some_outputs_are_differentiated(schedule) -> None:
    x = torch.randn(4, requires_grad=True)
    xs = torch.randn(9, 4, requires_grad=True)

    def gradients(run):
        _, (_, b) = run.scan(lambda s, x: (s * x, (s.sin(), s.cos())), x, xs)
        return torch.autograd.grad(b[4].sum(), [x, xs])

    found = gradients(Remat(schedule=schedule))
    assert all(map(torch.equal, found, gradients(Plain())))


@ALL
def test_a_scan_with_inputs_that_are_integers(schedule) -> None:
    table = nn.Parameter(torch.randn(5, 4))

    def gradient(run):
        numbers = torch.tensor([0, 3, 3, 1, 4, 2])
        final, _ = run.scan(lambda s, i: (s * F.embedding(i, table), None), torch.ones(4), numbers)
        return torch.autograd.grad(final.sum(), table)[0]

    assert torch.equal(gradient(Remat(schedule=schedule)), gradient(Plain()))


def test_outputs_that_change_their_shape() -> None:
    with pytest.raises(ValueError, match="output of step 1 has shape"):
        Remat().scan(
            lambda s, x: (torch.cat([s, s[:1]]), s),
            torch.ones(2, requires_grad=True),
            torch.ones(5),
        )


def test_outputs_that_change_their_structure() -> None:
    def step(s, x):
        return s, (s, s) if x else s

    with pytest.raises(TypeError, match="another structure"):
        Remat().scan(step, torch.ones(2, requires_grad=True), torch.arange(3))


# -- whiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("limit", [0.1, 0.9, 3.0, 50.0])
def test_a_while(slots, limit) -> None:
    def program(run, x, w):
        return run.until(
            lambda s: s["x"].abs().max() < limit,
            lambda s: {"x": s["x"] * w + 0.1 * s["x"].sin(), "k": s["k"] + 1},
            {"x": x, "k": 0},
        )

    def inputs():
        return torch.full((4,), 0.5).requires_grad_(), nn.Parameter(torch.tensor(1.1))

    same(program, inputs, Remat(slots))


@pytest.mark.parametrize("options", [{"slots": 3}, {"slots": None, "memory_budget": "100KB"}])
@pytest.mark.parametrize("seed", range(4))
def test_a_while_with_a_random_condition(options, seed) -> None:
    def program(run, x, w):
        torch.manual_seed(seed)
        return run.until(
            lambda s: torch.rand(()) < 0.9, lambda s: F.dropout(s.sin() * w, 0.3) + 0.1, x
        )

    def inputs():
        return torch.randn(8).requires_grad_(), nn.Parameter(torch.tensor(1.1))

    same(program, inputs, Remat(**options))


def test_a_while_may_be_gone_back_through_twice() -> None:
    w = nn.Parameter(torch.tensor(1.1))

    def run(api):
        torch.manual_seed(3)
        y = api.until(lambda s: torch.rand(()) < 0.95, lambda s: F.dropout(s) * w, torch.ones(4))
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        gradient, w.grad = w.grad, None
        return gradient, torch.rand(1)

    assert all(map(torch.equal, run(Remat(2)), run(Plain())))


# -- modes -----------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, schedule) -> None:
    x, W, b = rnn_inputs()
    with mode():
        found = rnn(Remat(schedule=schedule), x, W, b)
        expected = rnn(Plain(), x, W, b)
        _, ys = Remat(schedule=schedule).scan(lambda s, x: (s * x, s), W, W)
    assert not found.requires_grad
    assert torch.equal(found, expected)
    assert ys.shape == (4, 4, 4)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 24, 25, 26, 500])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_default_is_the_root_of_the_length(steps, mode) -> None:
    x = torch.randn(4)
    with mode():
        final, checkpoints = remat.checkpointed_loop(torch.sin, x, steps)
        assert len(checkpoints) == min(math.isqrt(steps), steps - 1)
        for position, state in checkpoints.items():
            assert torch.equal(state, Plain().loop(torch.sin, x, position))
        assert torch.equal(final, Plain().loop(torch.sin, x, steps))


@pytest.mark.parametrize("schedule", ["revolve", "uniform"])
def test_checkpoints_on_the_way_to_a_gradient(schedule) -> None:
    x = torch.randn(4, requires_grad=True)
    final, checkpoints = remat.checkpointed_loop(torch.sin, x, 30, 5, schedule=schedule)
    assert len(checkpoints) == 5
    for position, state in checkpoints.items():
        assert torch.equal(state, Plain().loop(torch.sin, x, position))
    with pytest.raises(remat.UnsupportedError, match="checkpointed_scan"):
        checkpoints[min(checkpoints)].sum().backward()
    (expected,) = torch.autograd.grad(Plain().loop(torch.sin, x, 30).sum(), x)
    assert torch.equal(torch.autograd.grad(final.sum(), x)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@ALL
def test_autocast(schedule, dtype) -> None:
    """The same as without a cache of casts, which a loop cannot share between steps."""

    def program(run, x, linear):
        with torch.autocast("cpu", dtype, cache_enabled=False):
            y = run.loop(lambda s: torch.tanh(linear(s)), x, 9)
        return y.float().sin()

    same(
        program,
        lambda: (torch.randn(3, 8).requires_grad_(), nn.Linear(8, 8)),
        Remat(schedule=schedule),
    )


def test_autocast_with_a_cache_agrees_up_to_rounding() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 8), torch.randn(3, 8)

    def gradient(run):
        with torch.autocast("cpu", torch.bfloat16):
            y = run.loop(lambda s: torch.tanh(linear(s)), x, 9)
        return torch.autograd.grad(y.sum(), linear.weight)[0]

    torch.testing.assert_close(gradient(Remat()), gradient(Plain()), rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:Anomaly")
@ALL
def test_anomaly_mode(schedule) -> None:
    with torch.autograd.detect_anomaly():
        same(rnn, rnn_inputs, Remat(schedule=schedule))


# -- schedules, budgets, counts --------------------------------------------------------------------


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state):
        self.calls += 1
        return state.sin() * 1.01


def count(steps: int, slots: int | None, size: int = 4, **options: Any) -> int:
    step, x = Counting(), torch.ones(size, requires_grad=True)
    remat.checkpointed_loop(step, x, steps, slots, **options)[0].sum().backward()
    return step.calls


@pytest.mark.parametrize("steps", [1, 2, 7, 20, 61])
@pytest.mark.parametrize("slots", [0, 1, 2, 5, 100])
@pytest.mark.parametrize(
    ("schedule", "predict"),
    [
        ("revolve", lambda n, s: Revolve(n, s).evaluations),
        ("uniform", lambda n, s: Uniform(n, s).evaluations),
        ("all", lambda n, s: StoreAll(n).evaluations),
    ],
)
def test_steps_run_as_often_as_predicted(schedule, predict, steps, slots) -> None:
    assert count(steps, slots, schedule=schedule) == predict(steps, slots)


@pytest.mark.parametrize("steps", [1, 7, 61, 200])
@pytest.mark.parametrize("slots", [1, 5, 14])
def test_auto_runs_as_often_as_its_schedule_says(monkeypatch, steps, slots) -> None:
    chosen = note_schedules(monkeypatch)
    calls = count(steps, slots)
    assert [calls] == [schedule.evaluations for schedule in chosen]


@pytest.mark.parametrize("budget", ["30KB", "100KB", "1MB"])
def test_within_a_budget_steps_run_as_often_as_predicted(monkeypatch, budget) -> None:
    chosen = note_schedules(monkeypatch)
    calls = count(300, None, 100, memory_budget=budget)
    assert [calls] == [schedule.evaluations for schedule in chosen]


def test_a_larger_budget_means_less_work() -> None:
    calls = [count(200, None, 500, memory_budget=b) for b in ("80KB", "300KB", "20MB", 1.0)]
    assert calls[0] > calls[1] > calls[2] == calls[3] == 200


@pytest.mark.parametrize(
    ("budget", "schedule"),
    [
        *((budget, schedule) for budget in (10**6, "1MB", 1.0) for schedule in SCHEDULES),
        *((0.5, schedule) for schedule in ("auto", "revolve", "uniform")),
    ],
)
def test_a_budget_in_place_of_a_number(budget, schedule) -> None:
    same(partial(rnn, steps=30), rnn_inputs, Remat(None, memory_budget=budget, schedule=schedule))


@ALL
def test_a_budget_that_is_too_small_is_refused(schedule) -> None:
    with pytest.raises(remat.BudgetTooSmallError, match=r"needs|holds"):
        rnn(Remat(None, memory_budget=10, schedule=schedule), *rnn_inputs(), 30)


# -- several ways back, nesting --------------------------------------------------------------------


@ALL
def test_the_way_back_may_be_gone_twice(schedule) -> None:
    x, W, b = rnn_inputs()
    y = rnn(Remat(schedule=schedule), x, W, b)
    first = torch.autograd.grad(y.sum(), [x, W, b], retain_graph=True)
    second = torch.autograd.grad(y.sum(), [x, W, b], retain_graph=True)
    third = torch.autograd.grad(2 * y.sum(), [x, W, b])
    expected = torch.autograd.grad(rnn(Plain(), x, W, b).sum(), [x, W, b])
    assert all(map(torch.equal, first, expected))
    assert all(map(torch.equal, second, expected))
    assert all(map(torch.equal, third, [2 * g for g in expected]))


@ALL
def test_gradients_of_some_only(schedule) -> None:
    x, W, b = rnn_inputs()
    for some in ([x], [W], [b, x]):
        found = torch.autograd.grad(rnn(Remat(schedule=schedule), x, W, b).sum(), some)
        expected = torch.autograd.grad(rnn(Plain(), x, W, b).sum(), some)
        assert all(map(torch.equal, found, expected))
    assert x.grad is W.grad is b.grad is None


@ALL
def test_jacobians(schedule) -> None:
    x, W, b = rnn_inputs(torch.float64, rows=1)

    def jacobian(run):
        return torch.autograd.functional.jacobian(lambda x: rnn(run, x, W, b), x)

    assert torch.equal(jacobian(Remat(schedule=schedule)), jacobian(Plain()))


@ALL
@pytest.mark.parametrize("inner", SCHEDULES)
def test_a_loop_inside_a_loop(schedule, inner) -> None:
    """What closes over parameters, over the outer state and over what the outer step computes."""

    def program(run, x, W, b):
        inside = run if isinstance(run, Plain) else Remat(1, schedule=inner)

        def outer(s):
            scale = b.sin() * s.mean()
            new = inside.loop(lambda h: torch.tanh(h @ W * scale + s), s * 0.5, 5)
            return new + s

        return run.loop(outer, x, 6)

    close(program, Remat(schedule=schedule))


def close(program, run) -> None:
    """Where a parameter is used in several loops, sums are taken in another order."""
    given = rnn_inputs(torch.float64)
    expected = torch.autograd.grad(program(Plain(), *given).sum(), given)
    found = torch.autograd.grad(program(run, *given).sum(), given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@ALL
@pytest.mark.parametrize("scope", [False, True])
def test_a_loop_inside_of_regions_and_regions_inside_of_a_step(schedule, scope) -> None:
    def program(run, x, W, b):
        api = run_plainly if isinstance(run, Plain) else remat.checkpoint

        def step(s):
            return api(lambda s: torch.tanh(s @ W) + b, s) * 1.1

        def model(x):
            return run.loop(step, x.sin(), 6).cos()

        if not scope or isinstance(run, Plain):
            return api(model, x)
        with remat.CheckpointScope("around"):
            return model(x)

    same(program, rnn_inputs, Remat(schedule=schedule))


def run_plainly(fn, *args):
    return fn(*args)


@ALL
def test_torch_checkpoint_inside_of_a_step(schedule) -> None:
    def program(run, x, W, b):
        def inner(s):
            return F.dropout(torch.tanh(s @ W + b), 0.3)

        def step(s):
            return torch.utils.checkpoint.checkpoint(inner, s, use_reentrant=False)

        return run.loop(step, x, 6)

    same(program, rnn_inputs, Remat(schedule=schedule))


@ALL
def test_a_gradient_inside_a_step(schedule) -> None:
    """Descent: the step differentiates by its own state, and is differentiated."""

    def program(run, x):
        def step(s):
            s = s if s.requires_grad else s.requires_grad_()
            (g,) = torch.autograd.grad((s.cos() * s).sum(), s, create_graph=True)
            return s - 0.1 * g

        return run.loop(step, x * 1, 6)

    same(program, lambda: (torch.randn(4).requires_grad_(),), Remat(schedule=schedule))


@ALL
def test_two_loops_in_a_row(schedule) -> None:
    def program(run, x, W, b):
        y = rnn(run, x, W, b)
        return rnn(run, y * 2, W, b) + y

    close(program, Remat(schedule=schedule))


@ALL
@pytest.mark.parametrize("wrt", [0, 1])
def test_gradients_of_gradients_say_what_to_use(schedule, wrt) -> None:
    given = rnn_inputs()
    y = rnn(Remat(schedule=schedule), *given)
    (gradient,) = torch.autograd.grad(y.sum(), given[wrt], create_graph=True)
    with pytest.raises(remat.UnsupportedError, match=r"remat\.checkpoint"):
        gradient.square().sum().backward()


# -- bodies ----------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(schedule, cell) -> None:
    def program(run, xs, cell):
        start = torch.zeros(2, 3)
        if isinstance(cell, nn.LSTMCell):
            return run.scan(lambda s, x: (cell(x, s), s[0]), (start, start), xs)
        return run.scan(lambda s, x: (cell(x, s), s), start, xs)

    same(
        program,
        lambda: (torch.randn(9, 2, 4).requires_grad_(), cell(4, 3)),
        Remat(schedule=schedule),
    )


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.sin() * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g * x.cos() * w, 2 * g * x.sin()


@ALL
def test_a_custom_function(schedule) -> None:
    same(
        lambda run, x, w: run.loop(lambda s: Twice.apply(s, w), x, 7),
        lambda: (torch.randn(4).requires_grad_(), nn.Parameter(torch.randn(4))),
        Remat(schedule=schedule),
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # (the compiler asks for it)
@ALL
def test_a_compiled_step(schedule) -> None:
    torch._dynamo.reset()
    W = nn.Parameter(torch.randn(4, 4) * 0.5)
    compiled = torch.compile(lambda s: torch.tanh(s @ W) * 1.1, backend="eager")
    x = torch.randn(4, requires_grad=True)
    found = torch.autograd.grad(Remat(schedule=schedule).loop(compiled, x, 8).sum(), [x, W])
    expected = torch.autograd.grad(
        Plain().loop(lambda s: torch.tanh(s @ W) * 1.1, x, 8).sum(), [x, W]
    )
    assert all(map(torch.equal, found, expected))


# -- progress --------------------------------------------------------------------------------------


def test_the_progress_bar_shows_three_counts(capfd, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    x = torch.ones(3, requires_grad=True)
    final, _ = remat.checkpointed_loop(torch.sin, x, 30, 3, schedule="revolve", progress=True)
    final.sum().backward()
    shown = capfd.readouterr()
    assert shown.out == ""
    last = {
        name: [line for line in shown.err.splitlines() if name in line][-1]
        for name in ("forward", "recompute", "backward")
    }
    assert "30/30" in last["forward"]
    assert "30/30" in last["backward"]
    assert f"{Revolve(30, 3).evaluations - 30}/" in last["recompute"]


def test_a_progress_bar_of_a_while(capfd) -> None:
    w = nn.Parameter(torch.tensor(1.5))
    y, _ = remat.checkpointed_while(
        lambda s: s < 100, lambda s: s * w, torch.tensor(1.0), 3, progress=True
    )
    y.backward()
    assert "backward" in capfd.readouterr().err
