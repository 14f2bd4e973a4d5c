"""Plans for passes through layers: never slower than the best plan over whole layers."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.errors import BudgetTooSmallError
from remat.plans import Kind, Op, Trace, Value, simulate
from remat.plans.chain import ChainLayer, plan_chain, smallest_chain
from remat.plans.facts import Facts
from remat.plans.layers import LayerChain
from remat.plans.search import Search

from .test_chain import all_plans, judge


def a_pass(seed: int, layers: int, most_ops: int) -> tuple[Trace, list[int], list[ChainLayer]]:
    """Return a pass through unlike layers; and the layers, summed up by hand.

    Every op saves what it reads, and a result is freed as soon as it was read. The program holds
    the last one: it is not in the sum.
    """
    dice = random.Random(seed)
    values, ops, ends, chain = [Value(50, kind=Kind.INPUT)], [], [], []
    for _ in range(layers):
        first = len(ops)
        for _ in range(dice.randrange(1, most_ops + 1)):
            n = len(ops)
            size, seconds = dice.randrange(1, 100), float(dice.randrange(1, 20))
            values.append(Value(size, made_by=n, freed_after=n + 1, requires_grad=True))
            ops.append(Op("f", (n,), (n + 1,), seconds, saves=(n,)))
        ends.append(len(ops))
        chain.append(by_hand(values, ops, first, is_last=len(ends) == layers))
    values[-1] = dataclasses.replace(values[-1], freed_after=None)
    return Trace(tuple(ops), tuple(values)), ends, chain


def by_hand(values: list[Value], ops: list[Op], first: int, *, is_last: bool) -> ChainLayer:
    sizes = [value.nbytes for value in values[first:]]
    sizes[0] = 0 if first == 0 else sizes[0]  # the caller's
    gradients = [a + b for a, b in pairwise(sizes)]
    own = [*sizes[1:-1], 0 if is_last else sizes[-1]]
    live = [own[0], *(a + b for a, b in pairwise(own))]
    return ChainLayer(
        seconds=sum(op.seconds for op in ops[first:]),
        output_bytes=sizes[-1],
        tape_bytes=sum(own),
        input_gradient_bytes=sizes[0],
        forward_workspace_bytes=max(live) - own[-1],
        backward_workspace_bytes=max(0, max(gradients) - sizes[0] - sizes[-1]),
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most_ops", [1, 4])
def test_layers_are_measured_as_by_hand(seed: int, most_ops: int) -> None:
    trace, ends, chain = a_pass(seed, 7, most_ops)
    assert LayerChain(Facts(trace), ends).layers == chain


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most_ops", [1, 3])
def test_never_slower_than_the_best_of_all_plans_over_layers(seed: int, most_ops: int) -> None:
    trace, ends, chain = a_pass(seed, 7, most_ops)
    result = trace.values[-1].nbytes
    judged = [judge(chain, steps) for steps in all_plans(0, 7)]
    judged = [(peak + result, seconds) for peak, seconds in judged]
    recomputed, search = 0.0, Search(trace, ends)
    for budget in sorted({peak for peak, _ in judged})[::5]:
        best = min(seconds for peak, seconds in judged if peak <= budget)
        plan = search.plan(budget)
        simulated = simulate(trace, plan)
        assert simulated.peak_bytes == plan.peak_bytes <= budget
        assert simulated.extra_seconds == plan.extra_seconds <= best
        recomputed = max(recomputed, plan.extra_seconds)
    assert recomputed > 0


@settings(max_examples=30)  # plans take their time
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4), st.floats(0, 1))
def test_within_the_budget_or_an_error_with_one_that_works(seed, layers, most_ops, part) -> None:
    trace, ends, chain = a_pass(seed, layers, most_ops)
    budget = int(trace.plain_peak * part)
    search = Search(trace, ends)
    with pytest.raises(BudgetTooSmallError) as caught:
        search.plan(0)
    smallest = caught.value.smallest
    assert str(smallest) in str(caught.value)
    budget = max(smallest, budget)
    plan = search.plan(budget)
    assert simulate(trace, plan).peak_bytes == plan.peak_bytes <= budget
    free = budget - trace.values[-1].nbytes
    if smallest_chain(chain).peak_bytes <= free:
        assert plan.extra_seconds <= plan_chain(chain, free).extra_seconds


@given(st.integers(0, 10**6), st.integers(2, 7))
def test_a_plan_over_layers_recomputes_what_it_says(seed, layers) -> None:
    """Op by op it is never more than by whole layers: what is there is not made again."""
    trace, ends, _ = a_pass(seed, layers, 1)
    chain = LayerChain(Facts(trace), ends)
    for steps in list(all_plans(0, layers))[:: max(1, 3 ** (layers - 4))]:
        found = dataclasses.replace(smallest_chain(chain.layers), steps=steps)
        simulated = simulate(trace, chain.plan_of(found))
        assert simulated.extra_seconds <= judge(chain.layers, steps)[1]


def test_layers_that_write_to_their_input_belong_to_the_layer_before() -> None:
    values = (
        Value(8, kind=Kind.INPUT),
        Value(8, made_by=0, requires_grad=True, freed_after=1),
        Value(8, made_by=1, overwrites=1, requires_grad=True, freed_after=2),
        Value(8, made_by=2, requires_grad=True),
    )
    ops = tuple(Op(name, (n,), (n + 1,), 1.0) for n, name in enumerate(["sin", "relu_", "cos"]))
    assert LayerChain(Facts(Trace(ops, values)), [1, 2, 3]).cuts == [0, 2, 3]


def test_layers_without_ops_are_no_layers() -> None:
    trace, ends, chain = a_pass(1, 4, 2)
    assert LayerChain(Facts(trace), [0, *ends, ends[-1]]).layers == chain
    assert LayerChain(Facts(Trace((), ())), [0, 0]).layers == []


def test_a_buffer_that_is_updated_is_no_result() -> None:
    values = (
        Value(8, kind=Kind.INPUT),
        Value(4, kind=Kind.INPUT),
        Value(8, made_by=0, requires_grad=True, freed_after=2),
        Value(4, made_by=1, overwrites=1),
        Value(8, made_by=2, requires_grad=True),
    )
    ops = (
        Op("sin", (0,), (2,), 1.0, saves=(0,)),
        Op("add_", (1,), (3,), 1.0),
        Op("sin", (2,), (4,), 1.0, saves=(2,)),
    )
    assert [
        layer.output_bytes for layer in LayerChain(Facts(Trace(ops, values)), [2, 3]).layers
    ] == [8, 8]
