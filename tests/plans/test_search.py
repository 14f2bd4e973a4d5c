"""The planner: against brute force, a mixed-integer programme, peers, and its own promises."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remat.errors import BudgetTooSmallError
from remat.plans import Kind, Op, Plan, Trace, Value, frontier, plan_trace, simulate
from remat.plans.bounds import LowerBound
from remat.plans.chain import plan_chains
from remat.plans.curve import FrontierCurve, FrontierPoint
from remat.plans.facts import Facts
from remat.plans.layers import LayerChain, choose_cuts
from remat.plans.parts import find_parts
from remat.plans.planner import too_small
from remat.plans.search import Search, search_of

from .networks import NETWORKS, Builder, gpt, llama, mlp, random_trace, resnet, unet
from .oracle import StagedModel, brute_force
from .peers import PEERS

SMALL = {
    "gpt": lambda: gpt(3),
    "llama": lambda: llama(2),
    "resnet": lambda: resnet(4),
    "unet": lambda: unet(3),
    "mlp": lambda: mlp(20),
}
BUDGETS = (0.75, 0.5, 0.32, 0.2, 0.12)


@cache
def network(name: str) -> Trace:
    return NETWORKS[name]()


@cache
def small(name: str) -> Trace:
    return SMALL[name]()


def smallest_budget(trace: Trace) -> int:
    with pytest.raises(BudgetTooSmallError) as caught:
        plan_trace(trace, 0)
    return int(str(caught.value).split("at least ")[1].split()[0])


def check(trace: Trace, plan: Plan, budget: int) -> None:
    done = simulate(trace, plan)
    assert (plan.peak_bytes, plan.extra_seconds) == (done.peak_bytes, done.extra_seconds)
    assert plan.peak_bytes <= budget
    assert plan.lower_bound_seconds <= plan.extra_seconds


# -- as good as others --


@pytest.mark.parametrize(("seed", "ops"), [*((seed, 5) for seed in range(8)), (8, 6)])
def test_near_brute_force(seed: int, ops: int) -> None:
    """All keep sets and all stages of a few ops: the whole curve is as good, or nearly."""
    trace = random_trace(seed, ops)
    own = [v for v, value in enumerate(trace.values) if not value.kind.is_external][:7]
    for peak, seconds in brute_force(trace, own):
        plan = plan_trace(trace, peak)
        assert plan.extra_seconds <= seconds
        check(trace, plan, peak)


@pytest.mark.parametrize("part", [0.75, 0.5, 0.4])
@pytest.mark.parametrize(
    "name",
    [n if n in {"mlp", "gpt"} else pytest.param(n, marks=pytest.mark.slow) for n in SMALL],
)
def test_within_five_percent_of_the_optimum_of_the_staged_model(name: str, part: float) -> None:
    trace = small(name)
    budget = int(part * trace.plain_peak)
    found = StagedModel(trace, choose_cuts(Facts(trace))[:-1]).solve(budget)
    assert found is not None
    seconds, plan = found
    assert simulate(trace, plan).peak_bytes <= budget  # the model is a true one
    assert plan_trace(trace, budget).extra_seconds <= 1.05 * seconds + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_at_or_below_every_peer_at_equal_peak(name: str, peer: str) -> None:
    trace = network(name)
    done = simulate(trace, PEERS[peer](trace))
    plan = plan_trace(trace, done.peak_bytes)
    assert plan.extra_seconds <= done.extra_seconds + 1e-12
    check(trace, plan, done.peak_bytes)


@pytest.mark.parametrize("part", BUDGETS)
@pytest.mark.parametrize("name", ["gpt", "llama", "mlp"])
def test_near_the_bound_that_holds_for_all_plans(name: str, part: float) -> None:
    """Where blocks are small against the budget, little can be gained beyond what is found."""
    trace = network(name)
    plan = plan_trace(trace, part)
    whole = trace.seconds + trace.backward_seconds
    assert plan.extra_seconds - plan.lower_bound_seconds < 0.05 * whole


# -- its promises --


@pytest.mark.parametrize("name", NETWORKS)
def test_budgets_are_kept_and_more_never_takes_longer(name: str) -> None:
    trace = network(name)
    least, plain = smallest_budget(trace), trace.plain_peak
    before = None
    for step in range(16):
        budget = least + (plain - least) * step // 15
        plan = plan_trace(trace, budget)
        check(trace, plan, budget)
        assert before is None or plan.extra_seconds <= before * (1 + 1e-12)
        before = plan.extra_seconds
    assert before == 0.0
    assert smallest_budget(trace) <= least  # what was found since may need less


@settings(max_examples=20)
@given(st.integers(0, 10**9), st.integers(1, 7), st.integers(2, 6))
def test_promises_on_random_traces(seed: int, ops: int, reach: int) -> None:
    trace = random_trace(seed, ops, reach=reach)
    least, plain = smallest_budget(trace), trace.plain_peak
    before = None
    for budget in sorted({least, *range(least, plain + 1, max(1, (plain - least) // 15)), plain}):
        plan = plan_trace(trace, budget)
        check(trace, plan, budget)
        assert before is None or plan.extra_seconds <= before
        before = plan.extra_seconds
    assert before == 0.0


@settings(max_examples=10)
@given(st.integers(0, 10**9), st.randoms(use_true_random=False))
def test_promises_in_any_order_of_backward(seed: int, dice: object) -> None:
    trace = random_trace(seed, 6)
    used = [op for op in trace.backward_order if trace.ops[op].saves]
    dice.shuffle(used)  # type: ignore[attr-defined]
    trace = replace(trace, used=tuple(used))
    least = smallest_budget(trace)
    seconds = [plan_trace(trace, budget).extra_seconds for budget in range(least, least + 200, 20)]
    assert seconds == sorted(seconds, reverse=True)
    for budget in (least, (least + trace.plain_peak) // 2):
        check(trace, plan_trace(trace, budget), budget)


@pytest.mark.parametrize("name", SMALL)
def test_the_bound_holds(name: str) -> None:
    """No plan of a mixed-integer programme is below the bound."""
    trace = small(name)
    model = StagedModel(trace, choose_cuts(Facts(trace))[:-1])
    for part in (0.8, 0.5):
        budget = int(part * trace.plain_peak)
        found = model.solve(budget)
        assert found is not None
        assert 0 < LowerBound(Facts(trace)).seconds(budget) <= found[0]


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_holds_for_brute_force(seed: int) -> None:
    trace = random_trace(seed, 5)
    own = [v for v, value in enumerate(trace.values) if not value.kind.is_external][:7]
    bound = LowerBound(Facts(trace))
    for peak, seconds in brute_force(trace, own):
        assert bound.seconds(peak) <= seconds


def test_the_bound_where_nothing_fits() -> None:
    """All that backward uses and that can be computed again runs again."""
    trace = small("mlp")
    makers = {trace.values[v].made_by for v in trace.saved} - {None}
    least = sum(trace.ops[op].seconds for op in makers if op is not None)
    assert LowerBound(Facts(trace)).seconds(0) >= least * (1 - 1e-6)


def test_the_same_plan_every_time() -> None:
    code = (
        "from tests.plans.networks import resnet\n"
        "from remat.plans import plan_trace\n"
        "plan = plan_trace(resnet(2), 0.5)\n"
        "print(sorted(plan.keep), plan.stages, plan.extra_seconds)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout


def test_without_scipy_the_plan_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """SciPy makes the bound tighter, and nothing else."""
    trace = resnet(2)
    plan = plan_trace(trace, 0.5)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    search_of.cache_clear()
    other = plan_trace(trace, 0.5)
    assert other.lower_bound_seconds <= plan.lower_bound_seconds
    assert replace(other, lower_bound_seconds=0.0) == replace(plan, lower_bound_seconds=0.0)


# -- what it is given --


def test_budgets_as_people_write_them() -> None:
    trace = small("resnet")
    assert plan_trace(trace, "40MB") == plan_trace(trace, 40_000_000)
    half = plan_trace(trace, 0.5)
    assert half.memory_budget == trace.plain_peak // 2
    assert half.plain_peak_bytes == trace.plain_peak
    assert half.signature == trace.signature


def test_a_budget_that_is_large_enough_changes_nothing() -> None:
    trace = small("gpt")
    plan = plan_trace(trace, trace.plain_peak)
    done = simulate(trace, plan)
    assert done.recomputed == ((),) * len(plan.stages)
    assert plan.keep >= {v for v in trace.saved if not trace.values[v].kind.is_external}


def test_too_small_a_budget_says_what_is_needed() -> None:
    trace = small("mlp")
    least = smallest_budget(trace)
    with pytest.raises(
        BudgetTooSmallError, match=rf"at least {least} bytes .* got memory_budget=9"
    ):
        plan_trace(trace, 9)
    with pytest.raises(BudgetTooSmallError, match=r"got memory_budget=0.001 \(\d+ bytes\)"):
        plan_trace(trace, 0.001)


@pytest.mark.parametrize("budget", [None, -1, "much", 1.5, True])
def test_what_is_not_a_budget(budget: object) -> None:
    with pytest.raises((TypeError, ValueError), match="memory_budget"):
        plan_trace(small("mlp"), budget)  # type: ignore[arg-type]


def test_nothing_to_plan() -> None:
    assert plan_trace(Trace((), ()), 0).extra_seconds == 0.0
    values = (Value(8, kind=Kind.INPUT), Value(8, made_by=0))
    unsaved = Trace((Op("f", (0,), (1,), 1.0),), values)
    assert plan_trace(unsaved, 8).keep == frozenset()
    with pytest.raises(BudgetTooSmallError, match="at least 8 bytes"):
        plan_trace(unsaved, 7)


def test_an_inconsistent_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="inconsistent"):
        plan_trace(Trace((Op("f", (3,), (), 1.0),), ()), 10)


def test_values_that_cannot_be_computed_again_are_not() -> None:
    b = Builder()
    x = b.op("linear", [b.input(10)], 100, seconds=1.0, saves="0")
    for _ in range(6):
        x = b.op("draw", [x], 100, seconds=1.0, saves="=", kind=Kind.FIXED)
        x = b.op("mul", [x], 100, seconds=1.0, saves="0=")
    trace = b.trace()
    plan = plan_trace(trace, smallest_budget(trace))
    again = {op for ops in simulate(trace, plan).recomputed for op in ops}
    assert again
    assert all(trace.ops[op].name != "draw" for op in again)


def test_what_the_program_holds_anyway_is_kept() -> None:
    """An activation that the program returns costs nothing to keep."""
    b = Builder()
    x = b.input(10)
    for number in range(6):
        x = b.op("linear", [x], 100, seconds=1.0, saves="0=")
        if number % 2:
            b.outlives(x)
    trace = b.trace()
    plan = plan_trace(trace, smallest_budget(trace))
    returned = {v for v, value in enumerate(trace.values) if value.freed_after is None}
    again = {op for ops in simulate(trace, plan).recomputed for op in ops}
    assert not again & {trace.values[v].made_by for v in returned if trace.values[v].made_by}


def test_in_place_ops_and_idle_values() -> None:
    b = Builder()
    x = b.input(10)
    for _ in range(8):
        h = b.op("conv", [x], 100, 7, seconds=3.0, saves="0")
        n = b.op("bn", [h], 100, seconds=1.0, saves="0")
        x = b.op("relu_", [n], 100, seconds=0.5, saves="=", overwrites=n)
    trace = b.trace()
    lazy = [
        replace(v, freed_after=min(v.freed_after + 5, len(trace.ops) - 1))
        if v.freed_after is not None and number % 3 == 0
        else v
        for number, v in enumerate(trace.values)
    ]
    for values in (trace.values, tuple(lazy)):
        other = replace(trace, values=values)
        for budget in (smallest_budget(other), other.plain_peak // 2 + 200):
            check(other, plan_trace(other, budget), budget)


# -- the parts --


@pytest.mark.parametrize("with_parts", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_plans_over_layers_take_what_was_predicted(name: str, with_parts: bool) -> None:
    """Never more bytes or seconds than predicted, for any budget."""
    trace = network(name)
    facts = Facts(trace)
    chain = LayerChain(facts, choose_cuts(facts))
    parts = list(find_parts(facts, chain)) if with_parts else []
    budgets = [trace.plain_peak * n // 12 for n in range(1, 13)]
    plans = plan_chains(chain.layers, budgets, parts)
    assert len(plans) >= 3
    for plan in plans:
        done = simulate(trace, chain.plan_of(plan))
        assert done.peak_bytes <= plan.peak_bytes + chain.outliving_bytes
        assert done.extra_seconds <= plan.extra_seconds * (1 + 1e-9)


def bytes_across(trace: Trace, cut: int) -> int:
    needed = {v for op in trace.ops[cut:] for v in (*op.reads, *op.saves)}
    made = (trace.values[v] for v in needed if trace.values[v].made_by is not None)
    return sum(v.nbytes for v in made if v.made_by is not None and v.made_by < cut)


def test_cuts_are_where_little_crosses() -> None:
    trace = gpt(4)
    facts = Facts(trace)
    cuts = choose_cuts(facts)
    assert cuts[0] == 0
    assert cuts[-1] == len(trace.ops)
    crossing = [bytes_across(trace, cut) for cut in range(len(trace.ops))]
    low = sorted(crossing[1:])[8]
    blocks = [n for n, op in enumerate(trace.ops) if n > 1 and op.name == "ln"]
    assert set(blocks) <= set(cuts)
    assert all(crossing[block] <= low for block in blocks)


def test_many_cuts_become_fewer() -> None:
    facts = Facts(mlp(1000))
    cuts = choose_cuts(facts)
    assert len(cuts) <= 50
    assert cuts == sorted(set(cuts))


def test_a_large_trace() -> None:
    trace = gpt(200)
    for part in (0.5, 0.1, 0.03):
        budget = int(part * trace.plain_peak)
        check(trace, plan_trace(trace, budget), budget)
    whole = trace.seconds + trace.backward_seconds
    assert plan_trace(trace, 0.5).extra_seconds < 0.06 * whole


# -- the frontier --


@pytest.mark.parametrize("name", SMALL)
def test_the_frontier_falls(name: str) -> None:
    trace = small(name)
    curve = frontier(trace)
    peaks = [point.peak_bytes for point in curve.points]
    seconds = [point.extra_seconds for point in curve.points]
    assert peaks == sorted(set(peaks))
    assert seconds == sorted(set(seconds), reverse=True)
    # An error names what is enough whatever the seconds of ops; the curve may know a bit less.
    assert 0.98 * smallest_budget(trace) <= peaks[0] <= smallest_budget(trace)
    assert seconds[-1] == 0.0
    assert curve.plain_peak_bytes == trace.plain_peak
    assert curve.plain_seconds == trace.seconds + trace.backward_seconds
    for point in curve.points[::5]:
        check(trace, point.plan, point.peak_bytes)
        assert plan_trace(trace, point.peak_bytes).extra_seconds <= point.extra_seconds


def test_the_knee_is_a_good_bargain() -> None:
    curve = frontier(small("gpt"))
    first, knee = curve.points[0], curve.knee
    saved = (curve.plain_peak_bytes - knee.peak_bytes) / (curve.plain_peak_bytes - first.peak_bytes)
    assert saved > 0.5
    assert knee.extra_seconds < 0.3 * first.extra_seconds


def test_what_costs_nothing_is_saved_at_the_knee() -> None:
    """Times that differ a little from run to run do not move it above what is free."""
    plan = Plan(frozenset())
    steep = [(10, 0.9), (20, 0.3), (40, 0.1)]
    for free in ([], [(70, 0.004)], [(66, 0.012), (80, 0.001)]):
        points = [*steep, (64, 0.015), *free, (100, 0.0)]
        points = sorted(set(points), key=lambda p: p[0])
        curve = FrontierCurve(tuple(FrontierPoint(b, s, plan) for b, s in points), 100, 1.0)
        assert curve.knee.peak_bytes == 20


def test_the_knee_of_a_single_point() -> None:
    curve = frontier(Trace((Op("f", (), (), 1.0),), ()))
    assert [(point.peak_bytes, point.extra_seconds) for point in curve.points] == [(0, 0.0)]
    assert curve.knee is curve.points[0]


# -- the door --


def test_importing_remat_does_not_load_the_planner() -> None:
    check = (
        "import sys, remat, remat.plans\n"
        "sys.exit(any(name.startswith(('scipy', 'remat.plans.search')) for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_a_name_that_is_not_there() -> None:
    import remat.plans  # noqa: PLC0415

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        remat.plans.nothing  # noqa: B018


@given(st.integers(1, 10**7), st.sampled_from([0.8, 0.7, 0.55, 0.35]))
@example(63, 0.7)  # where the quotient is rounded down
def test_the_budget_that_is_named_has_a_share_that_is_enough(smallest: int, share: float) -> None:
    error = BudgetTooSmallError("this pass needs more, got less", smallest=smallest)
    needed = too_small(error, smallest / 10**6, smallest, share).smallest
    assert needed is not None
    assert int(needed * share) >= smallest > int((needed - 2) * share)


@pytest.mark.parametrize("make", [lambda: mlp(8), lambda: resnet(2)], ids=["mlp", "resnet"])
def test_the_smallest_budget_does_not_depend_on_measured_seconds(make) -> None:
    """An error names a budget, and the next pass has to find a plan for it with its own seconds."""
    trace = make()
    least = Search(trace)._surely_least
    for number in range(4):
        noise = random.Random(number)
        ops = [replace(op, seconds=op.seconds * noise.uniform(0.1, 10)) for op in trace.ops]
        other = Search(replace(trace, ops=tuple(ops)))
        assert other.plan(least).peak_bytes <= least
        with pytest.raises(BudgetTooSmallError) as caught:
            other.plan(least // 2)
        assert caught.value.smallest == least
