"""Lifetimes: the evaluator agrees with the judge, and with plans over stages."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.plans import Kind, Plan, Stage, Trace, simulate
from remat.plans.facts import Facts
from remat.plans.lifetimes import Evaluator, Lifetimes, Outcome

from .networks import Builder, gpt, random_trace, resnet, unet


def shuffled(trace: Trace, dice: random.Random) -> Trace:
    order = [number for number, op in enumerate(trace.ops) if op.saves]
    dice.shuffle(order)
    return replace(trace, used=tuple(order))


def random_lifetimes(evaluator: Evaluator, dice: random.Random) -> Outcome:
    facts, part = evaluator.facts, dice.random()
    own = [v for v, external in enumerate(facts.is_external) if not external]
    used = [v for v in own if facts.users[v] or facts.readers[v]]
    keep = frozenset(v for v in used if v not in evaluator.always and dice.random() < part)
    held = [
        (value, evaluator.node_of(interval.start))
        for value, intervals in evaluator.evaluate(Lifetimes(keep)).intervals.items()
        for interval in intervals
        if interval.start >= 0
    ]
    drops = frozenset(drop for drop in held if dice.random() < 0.4)
    return evaluator.evaluate(Lifetimes(keep, drops))


def check(trace: Trace, evaluator: Evaluator, outcome: Outcome) -> None:
    done = simulate(trace, evaluator.plan(outcome))
    assert done.peak_bytes == outcome.peak_bytes
    assert done.extra_seconds == pytest.approx(outcome.seconds)


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 25), st.integers(1, 9), st.booleans())
def test_it_agrees_with_the_judge(seed: int, ops: int, reach: int, is_shuffled: bool) -> None:
    dice = random.Random(seed)
    trace = random_trace(seed, ops, reach=reach)
    trace = shuffled(trace, dice) if is_shuffled else trace
    evaluator = Evaluator(Facts(trace))
    for _ in range(4):
        check(trace, evaluator, random_lifetimes(evaluator, dice))


@pytest.mark.parametrize("make", [lambda: gpt(2), lambda: resnet(3), lambda: unet(3)])
def test_it_agrees_with_the_judge_on_networks(make) -> None:
    trace, dice = make(), random.Random(0)
    evaluator = Evaluator(Facts(trace))
    for _ in range(10):
        check(trace, evaluator, random_lifetimes(evaluator, dice))


def test_it_agrees_with_the_judge_on_a_recorded_network() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "traces" / "unet.json"
    trace, dice = Trace.load(path), random.Random(0)
    evaluator = Evaluator(Facts(trace))
    for _ in range(10):
        check(trace, evaluator, random_lifetimes(evaluator, dice))


def test_in_place_ops_write_over_what_is_recomputed() -> None:
    b, dice = Builder(), random.Random(0)
    x = b.input(10)
    for _ in range(6):
        h = b.op("conv", [x], 100, 7, seconds=3.0, saves="0")
        n = b.op("bn", [h], 100, seconds=1.0, saves="0")
        x = b.op("relu_", [n], 100, seconds=0.5, saves="=", overwrites=n)
    trace = b.trace()
    evaluator = Evaluator(Facts(trace))
    for _ in range(20):
        check(trace, evaluator, random_lifetimes(evaluator, dice))


def test_what_is_dropped_is_recomputed_for_each_use() -> None:
    """A value that two nodes need runs again once if it is held, and twice if it is dropped."""
    b = Builder()
    x = b.op("first", [b.input(10)], 100, seconds=5.0)
    y = b.op("second", [x], 100, seconds=1.0, saves="0")
    b.op("third", [y, x], 100, seconds=1.0, saves="1")
    trace = b.trace()
    evaluator = Evaluator(Facts(trace))
    assert evaluator.evaluate(Lifetimes(frozenset())).seconds == 5.0
    assert evaluator.evaluate(Lifetimes(frozenset(), frozenset({(x, 2)}))).seconds == 10.0
    assert evaluator.evaluate(Lifetimes(frozenset({x}))).seconds == 0.0


def test_what_cannot_be_computed_again_is_always_kept() -> None:
    b = Builder()
    x = b.op("draw", [b.input(10)], 100, seconds=1.0, kind=Kind.FIXED)
    x = b.op("mul", [x], 100, seconds=1.0, saves="0=")
    b.op("sum", [x], 8, seconds=1.0)
    trace = b.trace()
    evaluator = Evaluator(Facts(trace))
    outcome = evaluator.evaluate(Lifetimes(frozenset()))
    assert outcome.seconds == 1.0
    check(trace, evaluator, outcome)


def test_plans_over_stages_become_lifetimes() -> None:
    """Late replays take no more bytes and seconds than those of a stage."""
    trace = resnet(3)
    evaluator = Evaluator(Facts(trace))
    firsts = [n for n, op in enumerate(trace.ops) if op.name == "conv"]
    inputs = {v for first in firsts for v in trace.ops[first].reads if trace.values[v].made_by}
    for hold in (frozenset[int](), frozenset(range(len(trace.values)))):
        stages = tuple(Stage(first, hold) for first in firsts)
        done = simulate(trace, Plan(frozenset(inputs), stages))
        lifetimes = evaluator.lifetimes_of(Plan(frozenset(inputs), stages), done.recomputed)
        outcome = evaluator.evaluate(lifetimes)
        assert outcome.peak_bytes <= done.peak_bytes
        assert outcome.seconds <= done.extra_seconds
