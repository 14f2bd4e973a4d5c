"""One search for the same program with other sizes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from remat.plans import Trace, simulate
from remat.plans.search import Search
from remat.plans.similar import Searches

from .networks import mlp, resnet


class Counting:
    """A planner that counts its searches."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []

    def __call__(self, trace: Trace) -> Search:
        self.traces.append(trace)
        return Search(trace)


def scaled(trace: Trace, factor: float) -> Trace:
    """The same program with so much more of all, parameters aside."""
    values = [
        v if v.made_by is None else replace(v, nbytes=int(v.nbytes * factor)) for v in trace.values
    ]
    ops = [replace(op, seconds=op.seconds * factor) for op in trace.ops]
    return replace(trace, ops=tuple(ops), values=tuple(values))


def test_other_sizes_take_their_plan_from_the_search_that_exists() -> None:
    planner, trace = Counting(), mlp(20)
    searches = Searches(planner)
    searches(trace).plan(0.5)
    budget = trace.plain_peak // 2
    for number in range(60):
        other = scaled(trace, 0.7 + number / 100)
        plan = searches(other).plan(budget)
        done = simulate(other, plan)
        assert done.peak_bytes == plan.peak_bytes <= budget
        assert plan.extra_seconds == done.extra_seconds
        assert plan.signature == other.signature
    assert len(planner.traces) <= 4
    assert len(searches._kept) == 1


def test_plans_of_similar_traces_cost_hardly_more_than_their_own() -> None:
    trace = mlp(20)
    searches = Searches(Search)
    searches(trace).plan(0.5)
    other = scaled(trace, 1.3)
    own = Search(other).plan(0.5)
    plan = searches(other).plan(0.5)
    whole = other.seconds + other.backward_seconds
    assert plan.extra_seconds <= own.extra_seconds + 0.04 * whole


def test_a_program_that_does_not_scale_is_searched() -> None:
    """What was small is large: no plan of the first one fits."""
    planner, trace = Counting(), mlp(12)
    searches = Searches(planner)
    searches(trace).plan(0.5)
    odd = [
        v if v.made_by is None or n % 3 else replace(v, nbytes=v.nbytes * 40)
        for n, v in enumerate(trace.values)
    ]
    other = replace(trace, values=tuple(odd))
    least = Search(other).smallest_budget
    assert searches(other).plan(least).peak_bytes <= least
    assert planner.traces == [trace, other]


def test_ever_new_sizes_do_not_search_because_of_the_margin(monkeypatch) -> None:
    monkeypatch.setattr("remat.plans.similar._MARGIN", -1.0)  # all cost too much
    planner, trace = Counting(), mlp(8)
    searches = Searches(planner)
    for number in range(20):
        searches(scaled(trace, 1 + number / 50)).plan(0.8)
    assert len(planner.traces) == 4


def test_a_trace_that_was_timed_again_is_searched_again() -> None:
    planner, trace = Counting(), mlp(8)
    searches = Searches(planner)
    searches(trace).plan(0.8)
    searches(trace).plan(0.9)
    assert len(planner.traces) == 1
    again = replace(trace, ops=tuple(replace(op, seconds=op.seconds * 2) for op in trace.ops))
    searches(again).plan(0.8)
    assert planner.traces == [trace, again]


def test_the_searches_that_are_held_are_few() -> None:
    planner = Counting()
    searches = Searches(planner)
    for layers in range(2, 8):
        searches(mlp(layers)).plan(0.9)
    assert len(searches._kept) == 4
    searches(mlp(7)).plan(0.8)
    assert len(planner.traces) == 6
    searches(resnet(1)).plan(0.9)
    assert len(searches._kept) == 4


@pytest.mark.parametrize("budget", [0.5, "40MB"])
def test_budgets_as_people_write_them(budget: float | str) -> None:
    trace = mlp(20)
    searches = Searches(Search)
    searches(trace).plan(budget)
    other = scaled(trace, 1.1)
    plan = searches(other).plan(budget)
    assert plan.memory_budget == (int(0.5 * other.plain_peak) if budget == 0.5 else 40_000_000)


def test_seconds_that_change_a_plan_by_little_cost_no_search() -> None:
    """Each op is measured up to a few percent otherwise from pass to pass."""
    planner, trace = Counting(), mlp(20)
    searches = Searches(planner)
    searches(trace).plan(0.5)
    for number in range(10):
        noise = random.Random(number)
        ops = [replace(op, seconds=op.seconds * noise.uniform(0.95, 1.05)) for op in trace.ops]
        other = replace(trace, ops=tuple(ops))
        plan = searches(other).plan(0.5)
        assert plan.extra_seconds == simulate(other, plan).extra_seconds
        whole = other.seconds + other.backward_seconds
        assert plan.extra_seconds <= Search(other).plan(0.5).extra_seconds + 0.05 * whole
    assert planner.traces == [trace]
