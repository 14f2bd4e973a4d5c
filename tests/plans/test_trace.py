"""Traces: their sums, the order of backward, checks, and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.plans import Kind, Op, Plan, Stage, Trace, Value, simulate
from remat.plans.check import check_trace

from .networks import NETWORKS, Builder, gpt, random_trace


def small() -> Trace:
    values = (
        Value(100, kind=Kind.PARAMETER, requires_grad=True),
        Value(10, kind=Kind.INPUT),
        Value(20, made_by=0, requires_grad=True, freed_after=1),
        Value(30, made_by=1, requires_grad=True, name="h"),
    )
    ops = (
        Op("mm", (1, 0), (2,), 2.0, "net.py:3", "net.lin", saves=(0, 1), backward_seconds=4.0),
        Op("exp", (2,), (3,), 1.0, saves=(3, 3), backward_seconds=1.0, workspace_bytes=5),
    )
    return Trace(ops, values)


def test_sums() -> None:
    trace = small()
    assert trace.saved == (0, 1, 3)
    assert trace.saved_bytes == 30  # what belongs to the caller does not count
    assert (trace.seconds, trace.backward_seconds) == (3.0, 5.0)
    assert repr(trace) == "Trace(2 ops, 4 values, 3 saved: 30 bytes)"


def test_peak_of_the_node_that_makes_a_parameters_gradient() -> None:
    # mm: value 3 outlives the pass, the gradients of 2 and of the parameter.
    assert small().plain_peak == 30 + 20 + 100


def test_signature_is_of_structure_and_bytes() -> None:
    trace = small()
    slower = replace(trace, ops=tuple(replace(op, seconds=9.0, place="?") for op in trace.ops))
    assert slower.signature == trace.signature
    larger = replace(trace, values=(*trace.values[:-1], replace(trace.values[-1], nbytes=31)))
    renamed = replace(trace, ops=(replace(trace.ops[0], name="bmm"), trace.ops[1]))
    keeps = replace(trace, ops=(trace.ops[0], replace(trace.ops[1], saves=(2,))))
    assert len({t.signature for t in (trace, larger, renamed, keeps)}) == 4


# -- the order of backward --


def test_backward_is_the_reverse_of_forward() -> None:
    trace = gpt(1)
    assert trace.backward_order == tuple(reversed(range(len(trace.ops))))


def test_ops_without_gradient_have_no_backward() -> None:
    b = Builder()
    x = b.op("linear", [b.parameter(4)], 4, seconds=1.0, saves="0")
    b.op("argmax", [x], 4, seconds=1.0)
    trace = b.trace()
    values = (*trace.values[:-1], replace(trace.values[-1], requires_grad=False))
    assert replace(trace, values=values).backward_order == (0,)


def branches() -> Trace:
    """0 -> 1 -> 2 and 3 -> 4, added by 5; only 0, 2, 3 and 4 save."""
    b = Builder()
    w = b.parameter(4)
    x = b.op("a", [w], 4, seconds=1.0, saves="=")
    x = b.op("view", [x], 4, seconds=1.0)
    x = b.op("c", [x], 4, seconds=1.0, saves="=")
    y = b.op("d", [w], 4, seconds=1.0, saves="=")
    y = b.op("e", [y], 4, seconds=1.0, saves="=")
    b.op("add", [x, y], 4, seconds=1.0)
    return b.trace()


def test_backward_in_the_order_that_was_recorded() -> None:
    trace = replace(branches(), used=(2, 0, 4, 3, 2))  # the last one: a second backward
    assert trace.backward_order == (5, 2, 1, 0, 4, 3)


def test_backward_that_was_recorded_in_part() -> None:
    assert replace(branches(), used=(4, 3)).backward_order == (5, 4, 3, 2, 1, 0)


@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_every_node_runs_once_and_after_its_readers(seed: int, dice: Any) -> None:
    """For all orders that can happen, of which some nodes are recorded."""
    trace = random_trace(seed, 12)
    waits = {
        op: {r for v in trace.ops[op].makes for r in range(12) if v in trace.ops[r].reads}
        for op in range(12)
    }
    order: list[int] = []
    while len(order) < 12:
        order.append(dice.choice([op for op in waits if op not in order and waits[op] <= {*order}]))
    recorded = tuple(op for op in order if trace.ops[op].saves)
    found = replace(trace, used=recorded).backward_order
    assert sorted(found) == list(range(12))
    assert tuple(op for op in found if op in recorded) == recorded
    assert all(waits[op] <= set(found[:place]) for place, op in enumerate(found))


# -- files --


@pytest.mark.parametrize("name", NETWORKS)
def test_files_hold_all(name: str, tmp_path: Path) -> None:
    trace = replace(NETWORKS[name](), used=(3, 1))
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace


def test_files_are_small(tmp_path: Path) -> None:
    trace = gpt(500)
    trace.save(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size < 150 * len(trace.ops)


def test_a_file_says_what_its_columns_are(tmp_path: Path) -> None:
    small().save(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    row = dict(zip(data["columns"]["ops"], data["ops"][0], strict=True))
    assert row["seconds"] == 2.0
    assert data["texts"][row["name"]] == "mm"
    value = dict(zip(data["columns"]["values"], data["values"][3], strict=True))
    assert data["texts"][value["name"]] == "h"


def broken(**changes: Any) -> str:
    data = {
        "format": "remat.trace",
        "version": 1,
        "texts": [""],
        "ops": [],
        "values": [],
        "used": [],
        "columns": {},
    } | changes
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Expecting property name"),
        ("[]", '"format" is not "remat.trace"'),
        ('{"format": "something"}', '"format" is not'),
        ('{"format": "remat.trace"}', "version"),
        (broken(version=2), "its version is 2; this remat reads 1"),
        (broken(ops=[[0, []]]), "not enough values"),
        (broken(ops=[[7, [], [], 1, 0, 0, [], 0, 0]]), "out of range"),
        (broken(ops=[[0, [3], [], 1, 0, 0, [], 0, 0]]), "reads value 3"),
        (broken(ops=[[0, [], [], "soon", 0, 0, [], 0, 0]]), "could not convert"),
        (broken(values=[[1, None, None, "odd", 0, None, 0]]), "odd"),
        (broken(used=[4]), "`used` names an op that is not there"),
        (broken(used=None), "not iterable"),
    ],
)
def test_bad_files(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace\.json does not hold a trace of remat") as caught:
        Trace.load(path)
    assert problem in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "nothing.json")


# -- checks --

INPUT = Value(1, kind=Kind.INPUT)


@pytest.mark.parametrize(
    ("ops", "values", "problem"),
    [
        ([], [Value(1)], "value 0 is computed, but no op makes it"),
        ([], [Value(-1, kind=Kind.INPUT)], "value 0 has -1 bytes"),
        ([Op("f", (), (0,), 1.0)], [Value(1, made_by=0, kind=Kind.INPUT)], "but an op makes it"),
        ([], [Value(1, made_by=3)], "there is no op 3"),
        ([Op("f", (), (0,), 1.0)], [Value(1, made_by=0, freed_after=7)], "freed after op 7"),
        ([Op("f", (), (0,), 1.0)], [Value(1, made_by=0, overwrites=9)], "overwrites 9"),
        ([Op("f", (), (0,), 1.0)], [Value(1, made_by=0, overwrites=0)], "overwrites value 0"),
        ([Op("f", (0,), (0,), 1.0)], [Value(1, made_by=0)], "reads value 0"),
        ([Op("f", (), (5,), 1.0)], [], "makes value 5"),
        ([Op("f", (), (0, 0), 1.0)], [INPUT], "makes value 0"),
        ([Op("f", (), (), 1.0)], [Value(1, made_by=0)], "names an op that does not make it"),
        ([Op("f", (), (), 1.0, saves=(0,))], [], "saves value 0"),
        ([Op("f", (), (), -1.0)], [], "takes -1.0 s"),
        ([Op("f", (), (), float("nan"))], [], "takes nan s"),
        ([Op("f", (), (), 1.0, backward_seconds=float("inf"))], [], "takes inf s"),
        ([Op("f", (), (), 1.0, workspace_bytes=-2)], [], "has -2 bytes of workspace"),
    ],
)
def test_traces_that_cannot_be(ops: list[Op], values: list[Value], problem: str) -> None:
    with pytest.raises(ValueError, match="inconsistent") as caught:
        check_trace(Trace(tuple(ops), tuple(values)))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (Plan(frozenset(), ()), "begins at op 0"),
        (Plan(frozenset(), (Stage(1),)), "begins at op 0"),
        (Plan(frozenset(), (Stage(0), Stage(0))), "not in order"),
        (Plan(frozenset(), (Stage(0), Stage(2))), "begins at op 2"),
        (Plan(frozenset({9})), "a value that is not there"),
        (Plan(frozenset(), (Stage(0, frozenset({-1})),)), "a value that is not there"),
    ],
)
def test_plans_that_cannot_be(plan: Plan, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        simulate(small(), plan)


# -- plans as data --


def test_a_plan_goes_through_json() -> None:
    plan = Plan(frozenset({3, 1}), (Stage(0), Stage(4, frozenset({2}))), 7, 0.5, 0.25, 8, 9, "s")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("data", [{}, {"stages": 3}, {"stages": [[0, []]], "keep": [1]}])
def test_what_is_not_a_plan(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not the JSON of a plan"):
        Plan.from_json(data)


def test_how_a_plan_prints() -> None:
    plan = Plan(frozenset({1, 2}), (Stage(0, frozenset({1})),), 2_500_000, 0.01234)
    assert repr(plan) == ("Plan(keeps 2 values, 1 stage, holds 1 on, peak 2.5 MB, 0.0123 s extra)")


def test_the_stage_of_an_op() -> None:
    plan = Plan(frozenset(), (Stage(0), Stage(3), Stage(5)))
    assert [plan.stage_of(op) for op in (0, 2, 3, 4, 5, 9)] == [0, 0, 1, 1, 2, 2]
