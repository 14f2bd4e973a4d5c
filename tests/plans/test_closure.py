"""Eviction of values whatever stage needs them."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest

from remat.plans import Trace, plan_trace, simulate
from remat.plans.closure import evictions
from remat.plans.facts import Facts
from remat.plans.segments import choose_cuts, fewer_cuts

from .networks import gpt, random_trace, unet
from .oracle import StagedModel

TRACES = {
    "gpt": lambda: gpt(2),
    "unet": lambda: unet(3),
    **{f"random {seed}": lambda seed=seed: random_trace(seed, 12) for seed in range(4)},
}


@cache
def recorded_unet() -> Trace:
    return Trace.load(Path(__file__).parents[2] / "benchmarks" / "traces" / "unet.json")


@pytest.mark.parametrize("name", TRACES)
def test_plans_keep_less_and_less(name) -> None:
    trace = TRACES[name]()
    facts = Facts(trace)
    for most in (1, 4, facts.count):
        firsts = fewer_cuts(facts, choose_cuts(facts), most)[:-1]
        plans = list(evictions(facts, firsts))
        assert plans
        seconds = [simulate(trace, plan).extra_seconds for plan in plans]
        # (Not exactly: what comes with an op that runs again is kept here, and free for the judge.)
        assert all(more >= 0.9 * less for less, more in itertools.pairwise(seconds))
        for larger, smaller in itertools.pairwise(plans):
            assert larger.stages == smaller.stages
            assert smaller.keep < larger.keep
            assert len(larger.keep - smaller.keep) == 1


def test_fewer_cuts_are_low_and_spread() -> None:
    facts = Facts(unet(3))
    cuts = choose_cuts(facts)
    assert fewer_cuts(facts, cuts, len(cuts)) == cuts
    few = fewer_cuts(facts, cuts, 3)
    assert few[0] == cuts[0]
    assert few[-1] == cuts[-1]
    assert len(few) == 5
    assert set(few) <= set(cuts)
    assert fewer_cuts(facts, [0, facts.count], 3) == [0, facts.count]


@pytest.mark.parametrize("part", [0.5, 0.4, 0.32])
def test_a_recorded_unet_comes_near_the_optimum_of_the_staged_model(part) -> None:
    """Its skips cross all cuts."""
    trace = recorded_unet()
    budget = int(part * trace.plain_peak)
    found = StagedModel(trace, choose_cuts(Facts(trace))[:-1]).solve(budget)
    assert found is not None
    whole = trace.seconds + trace.backward_seconds
    assert plan_trace(trace, budget).extra_seconds <= found[0] + 0.05 * whole
