"""Eviction of values whatever stage needs them."""

from __future__ import annotations

import itertools

import pytest

from remat.plans import simulate
from remat.plans.closure import evictions
from remat.plans.facts import Facts
from remat.plans.segments import choose_cuts

from .networks import gpt, random_trace, unet

TRACES = {
    "gpt": lambda: gpt(2),
    "unet": lambda: unet(3),
    **{f"random {seed}": lambda seed=seed: random_trace(seed, 12) for seed in range(4)},
}


@pytest.mark.parametrize("name", TRACES)
def test_plans_keep_less_and_less(name) -> None:
    trace = TRACES[name]()
    facts = Facts(trace)
    for firsts in ([0], choose_cuts(facts)[:-1]):
        plans = list(evictions(facts, firsts))
        assert plans
        seconds = [simulate(trace, plan).extra_seconds for plan in plans]
        # (Not exactly: what comes with an op that runs again is kept here, and free for the judge.)
        assert all(more >= 0.9 * less for less, more in itertools.pairwise(seconds))
        for larger, smaller in itertools.pairwise(plans):
            assert larger.stages == smaller.stages
            assert smaller.keep < larger.keep
            assert len(larger.keep - smaller.keep) == 1
