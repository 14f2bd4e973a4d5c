"""The judge, on passes that are small enough to be followed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remat.plans import Alive, Kind, Moment, Op, Plan, Simulation, Stage, Trace, Value, simulate
from remat.plans.attribution import by_module, by_place, repeated_modules
from remat.plans.simulate import simulate_plain

from .networks import Builder


def chain(count: int, *, has_gradients: bool = False) -> Trace:
    """Value i is what op i reads: 10 bytes, saved by it; op i takes 2 ** i seconds."""
    values = [Value(10, kind=Kind.INPUT)]
    for op in range(count):
        freed = None if op == count - 1 else op + 1
        values.append(Value(10, made_by=op, requires_grad=has_gradients, freed_after=freed))
    ops = [Op("f", (i,), (i + 1,), 2.0**i, saves=(i,)) for i in range(count)]
    return Trace(tuple(ops), tuple(values))


def plan(keep: set[int], *stages: int | Stage) -> Plan:
    made = [s if isinstance(s, Stage) else Stage(s) for s in stages]
    return Plan(frozenset(keep), tuple(made) or (Stage(0),))


def memory(done: Simulation) -> list[tuple[str, int, int]]:
    return [(moment.phase[0], moment.op, moment.nbytes) for moment in done.memory]


def test_plain_pass() -> None:
    done = simulate_plain(chain(3))
    assert memory(done) == [
        ("f", 0, 10),
        ("f", 1, 20),
        ("f", 2, 30),
        ("b", 2, 30),  # values 1 and 2, and the output, which outlives the pass
        ("b", 1, 20),
        ("b", 0, 10),
    ]
    assert (done.peak_bytes, done.extra_seconds, done.kept_bytes) == (30, 0.0, 30)
    assert done.peak == Moment("forward", 2, 30)
    assert done.alive == tuple(Alive("value", number, 10) for number in (1, 2, 3))
    assert done.recomputed == ((),)
    assert repr(done).startswith("Simulation(peak_bytes=30, extra_seconds=0.0, peak=Moment(")


def test_one_stage_recomputes_all_at_once() -> None:
    done = simulate(chain(4), plan(set()))
    assert memory(done) == [
        ("f", 0, 10),
        ("f", 1, 20),
        ("f", 2, 20),
        ("f", 3, 20),
        ("r", 0, 20),
        ("r", 1, 30),
        ("r", 2, 40),
        ("b", 3, 40),
        ("b", 2, 30),
        ("b", 1, 20),
        ("b", 0, 10),
    ]
    assert done.extra_seconds == 1 + 2 + 4
    assert done.recomputed == ((0, 1, 2),)


def test_stages_recompute_one_after_the_other() -> None:
    done = simulate(chain(4), plan({2}, 0, 2))
    assert done.recomputed == ((0,), (2,))
    assert memory(done)[4:] == [
        ("r", 2, 30),  # the output, values 2 and 3
        ("b", 3, 30),
        ("b", 2, 20),
        ("r", 0, 20),
        ("b", 1, 20),
        ("b", 0, 10),
    ]


def test_what_is_between_is_freed_in_the_replay() -> None:
    """Without value 2, the later stage runs op 0 and 1 only to come to its own values."""
    done = simulate(chain(4), plan(set(), 0, 2))
    assert done.recomputed == ((0,), (0, 1, 2))
    assert done.extra_seconds == 1 + (1 + 2 + 4)
    assert memory(done)[4:8] == [("r", 0, 20), ("r", 1, 30), ("r", 2, 30), ("b", 3, 30)]


def test_held_on_for_an_earlier_stage() -> None:
    done = simulate(chain(4), plan(set(), 0, Stage(2, frozenset({1}))))
    assert done.recomputed == ((), (0, 1, 2))
    assert memory(done)[4:] == [
        ("r", 0, 20),
        ("r", 1, 30),
        ("r", 2, 40),
        ("b", 3, 40),
        ("b", 2, 30),
        ("b", 1, 20),
        ("b", 0, 10),
    ]


def test_held_on_for_nothing_is_freed_after_the_replay() -> None:
    trace = chain(4)
    ops = (replace(trace.ops[0], saves=()), replace(trace.ops[1], saves=()), *trace.ops[2:])
    done = simulate(replace(trace, ops=ops), plan(set(), 0, Stage(2, frozenset({1}))))
    assert memory(done)[4:8] == [("r", 0, 20), ("r", 1, 30), ("r", 2, 40), ("b", 3, 30)]


def test_what_is_kept_for_nothing_is_not_kept() -> None:
    trace = chain(3)
    unsaved = replace(trace, ops=tuple(replace(op, saves=()) for op in trace.ops))
    assert simulate(unsaved, plan({1, 2})).memory == simulate(unsaved, plan(set())).memory
    assert simulate(trace, plan({0, 1, 2})).memory == simulate_plain(trace).memory


def test_kept_until_the_last_recomputation_that_reads_it() -> None:
    """Value 1 is used by no node of its own; it is kept for the replay, and freed after it."""
    trace = chain(4)
    ops = (trace.ops[0], replace(trace.ops[1], saves=()), *trace.ops[2:])
    done = simulate(replace(trace, ops=ops), plan({1}))
    assert memory(done)[4:] == [
        ("r", 1, 30),
        ("r", 2, 40),
        ("b", 3, 30),
        ("b", 2, 20),
        ("b", 0, 10),
    ]


def test_gradients_live_from_their_first_to_their_own_node() -> None:
    done = simulate_plain(chain(3, has_gradients=True))
    assert memory(done)[3:] == [
        ("b", 2, 30 + 20),  # of values 3 and 2
        ("b", 1, 20 + 20),
        ("b", 0, 10 + 10),
    ]
    assert done.peak == Moment("backward", 2, 50)
    assert Alive("gradient", 2, 10) in done.alive


def test_gradients_of_parameters_inputs_and_workspace() -> None:
    values = (
        Value(100, kind=Kind.PARAMETER, requires_grad=True),
        Value(7, kind=Kind.INPUT, requires_grad=True),
        Value(10, made_by=0, requires_grad=True, freed_after=1),
        Value(1, made_by=1, requires_grad=True),
    )
    ops = (Op("mm", (1, 0), (2,), 1.0), Op("sum", (2, 1), (3,), 1.0, workspace_bytes=50))
    done = simulate_plain(Trace(ops, values))
    assert memory(done)[2:] == [
        ("b", 1, 1 + 1 + 10 + 7 + 50),  # the output, gradients of 3, 2 and the input, workspace
        ("b", 0, 1 + 10 + 7 + 100),  # that of the input stays, that of the parameter is made
    ]


def test_the_gradient_of_what_two_ops_read_waits() -> None:
    b = Builder()
    x = b.op("a", [b.input(1)], 10, seconds=1.0)
    y = b.op("b", [x], 10, seconds=1.0)
    b.op("c", [x, y], 1, seconds=1.0)
    assert memory(simulate_plain(b.trace()))[3:] == [
        ("b", 2, 1 + 1 + 20),
        ("b", 1, 1 + 20),
        ("b", 0, 1 + 10),
    ]


def test_fixed_values_are_kept_if_they_are_needed() -> None:
    trace = chain(3)
    values = (*trace.values[:2], replace(trace.values[2], kind=Kind.FIXED), trace.values[3])
    done = simulate(replace(trace, values=values), plan(set()))
    assert done.recomputed == ((0,),)
    assert done.extra_seconds == 1


def test_fixed_values_that_nothing_needs_are_freed() -> None:
    trace = chain(3)
    values = (trace.values[0], replace(trace.values[1], kind=Kind.FIXED), *trace.values[2:])
    ops = (trace.ops[0], replace(trace.ops[1], saves=()), replace(trace.ops[2], saves=()))
    done = simulate(Trace(ops, values), plan(set()))
    assert done.kept_bytes == 10


def in_place(*, reads_before: bool = False) -> Trace:
    """Op 1 writes its result over what it reads."""
    values = (
        Value(10, kind=Kind.INPUT),
        Value(10, made_by=0, freed_after=1),
        Value(10, made_by=1, overwrites=1, freed_after=2),
        Value(10, made_by=2),
    )
    ops = (
        Op("f", (0,), (1,), 1.0),
        Op("f_", (1,), (2,), 1.0, saves=(1,) if reads_before else ()),
        Op("f", (2,), (3,), 1.0, saves=(2,)),
    )
    return Trace(ops, values)


def test_an_in_place_op_takes_over_memory() -> None:
    assert memory(simulate_plain(in_place()))[:3] == [("f", 0, 10), ("f", 1, 10), ("f", 2, 20)]
    done = simulate(in_place(), plan(set()))
    assert memory(done)[3:] == [("r", 0, 20), ("r", 1, 20), ("b", 2, 20)]


def test_what_an_in_place_op_overwrites_is_copied_if_it_is_kept() -> None:
    trace = in_place(reads_before=True)
    assert memory(simulate_plain(trace))[:3] == [("f", 0, 10), ("f", 1, 20), ("f", 2, 30)]
    done = simulate(trace, plan(set()))
    assert memory(done)[3:5] == [("r", 0, 20), ("r", 1, 30)]


def test_writing_to_the_callers_memory() -> None:
    values = (Value(10, kind=Kind.INPUT), Value(10, made_by=0, overwrites=0), Value(1, made_by=1))
    ops = (Op("add_", (0,), (1,), 1.0), Op("sum", (1,), (2,), 1.0, saves=(1,)))
    trace = Trace(ops, values)
    unsaved = replace(trace, ops=(ops[0], replace(ops[1], saves=())))
    assert simulate(unsaved, plan(set())).peak_bytes == 1
    assert simulate(trace, plan({1})).peak_bytes == 11  # as if it were copied


def test_an_op_with_two_results_makes_both_again() -> None:
    values = (
        Value(10, kind=Kind.INPUT),
        Value(10, made_by=0, freed_after=1),
        Value(30, made_by=0, freed_after=0),
        Value(1, made_by=1),
    )
    ops = (Op("f", (0,), (1, 2), 1.0), Op("g", (1,), (3,), 1.0, saves=(1,)))
    done = simulate(Trace(ops, values), plan(set()))
    assert memory(done)[2:] == [("r", 0, 41), ("b", 1, 11)]
    trace = Trace((replace(ops[0], saves=(2,)), ops[1]), values)
    kept = simulate(trace, plan({2}))
    assert memory(kept)[2:] == [("r", 0, 71), ("b", 1, 41), ("b", 0, 31)]


def test_what_outlives_the_pass_is_there_if_it_is_kept() -> None:
    trace = chain(3)
    values = tuple(replace(v, freed_after=None) for v in trace.values)
    kept = simulate(replace(trace, values=values), plan({1, 2}))
    assert (kept.peak_bytes, kept.extra_seconds) == (30, 0.0)
    twice = simulate(replace(trace, values=values), plan({1}))
    assert (twice.peak_bytes, twice.extra_seconds) == (40, 2.0)  # the program's, and ours


def test_stages_that_take_turns_share_what_is_there() -> None:
    """Nodes run in the order 3, 0, 2, 1: stage 0 is replayed while stage 1 is not done."""
    values = [Value(10, kind=Kind.INPUT), Value(10, made_by=0, freed_after=3)]
    values += [Value(10, made_by=i, freed_after=3) for i in (1, 2)] + [Value(1, made_by=3)]
    ops = (
        Op("a", (0,), (1,), 1.0, saves=(1,)),
        Op("b", (1,), (2,), 2.0, saves=(1,)),
        Op("c", (0,), (3,), 4.0, saves=(1,)),
        Op("d", (2, 3), (4,), 8.0, saves=(3,)),
    )
    trace = Trace(ops, tuple(values), used=(3, 0, 2, 1))
    done = simulate(trace, plan(set(), 0, 2))
    # Node 3 replays for stage 1: values 3 and 1. Node 0 finds value 1, there for node 2; node 1
    # comes after that, and stage 0 has to make it again.
    assert done.recomputed == ((0,), (0, 2))
    assert done.extra_seconds == 1 + (1 + 4)
    first = simulate(replace(trace, used=(0, 3, 2, 1)), plan(set(), 0, 2))
    # Node 0 replays for stage 0, so value 1 is there until node 1; stage 1 needs op 2 only.
    assert first.recomputed == ((0,), (2,))


def test_a_stage_takes_over_what_another_stage_has() -> None:
    """Value 1 is there for stage 1 up to node 2; stage 0 replays then, and needs it longer."""
    values = [Value(10, kind=Kind.INPUT)]
    values += [Value(10, made_by=i, freed_after=3) for i in (0, 1, 2)] + [Value(1, made_by=3)]
    ops = (
        Op("a", (0,), (1,), 1.0, saves=(1,)),
        Op("b", (0,), (2,), 2.0, saves=(2,)),
        Op("c", (1,), (3,), 4.0, saves=(1,)),
        Op("d", (2, 3), (4,), 8.0),
    )
    trace = Trace(ops, tuple(values), used=(2, 1, 0))
    done = simulate(replace(trace, used=(2, 1, 0)), plan(set(), 0, 2))
    assert done.recomputed == ((0, 1), (0,))
    turn = simulate(replace(trace, used=(1, 2, 0)), plan(set(), 0, 2))
    assert turn.recomputed == ((0, 1), ())  # stage 0 has made value 1, and node 2 finds it


def test_no_ops() -> None:
    done = simulate(Trace((), ()), plan(set()))
    assert (done.peak_bytes, done.extra_seconds, done.memory) == (0, 0.0, ())


# -- where memory goes --


def test_shares_of_modules_and_lines() -> None:
    b = Builder()
    x = b.op("linear", [b.input(5)], 10, seconds=1.0, saves="=", module="net.0")
    b.op("linear", [x], 4, seconds=1.0, module="net.1")
    trace = b.trace()
    ops = (trace.ops[0], replace(trace.ops[1], place="net.py:7", workspace_bytes=3))
    trace = replace(trace, ops=ops)
    shares = by_module(trace, simulate_plain(trace))
    assert [(s.name, s.nbytes, s.values, s.gradients, s.workspace) for s in shares] == [
        ("net.0", 20, 10, 10, 0),
        ("net.1", 11, 4, 4, 3),
    ]
    lines = by_place(trace, simulate_plain(trace))
    assert [(s.name, s.nbytes) for s in lines] == [("", 20), ("net.py:7", 11)]


def test_the_gradient_of_an_input_belongs_to_no_module() -> None:
    values = (
        Value(9, kind=Kind.INPUT, requires_grad=True),
        Value(1, made_by=0, requires_grad=True),
    )
    trace = Trace((Op("sum", (0,), (1,), 1.0, module="m"),), values)
    assert [(s.name, s.nbytes) for s in by_module(trace, simulate_plain(trace))] == [
        ("", 9),
        ("m", 2),
    ]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_alive_at_the_peak_adds_up(count: int) -> None:
    done = simulate(chain(count, has_gradients=True), plan(set()))
    assert sum(thing.nbytes for thing in done.alive) == done.peak_bytes


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a", "b"], ["a", "b"]),
        (["h.0", "h.1", "h.2"], ["h.* x 3"] * 3),
        (["0", "1"], ["* x 2"] * 2),
        (["h.0.e.0", "h.0.e.1", "h.1.e.0", "h.1.e.1"], ["h.*.e.* x 4"] * 4),
        (["h.0.a", "h.1.a", "h.1.b"], ["h.0.a", "h.1.a", "h.1.b"]),
        (["", "h.0", "h.1"], ["", "h.* x 2", "h.* x 2"]),
    ],
)
def test_modules_that_do_the_same_go_by_one_name(paths: list[str], names: list[str]) -> None:
    trace = Trace(tuple(Op("exp", (), (), 0.0, module=path) for path in paths), ())
    found = repeated_modules(trace)
    assert [str(found[path]) for path in paths] == names


def test_numbers_of_modules_beside_others_are_listed() -> None:
    ops = tuple(Op("exp" if i % 2 else "sin", (), (), 0.0, module=f"h.{i}") for i in range(9))
    found = repeated_modules(Trace(ops, ()))
    assert str(found["h.0"]) == "h.{0,2,4,..} x 5"
    assert str(found["h.1"]) == "h.{1,3,5,..} x 4"


def test_blocks_with_which_a_plan_does_something_else_have_their_own_name() -> None:
    values = tuple(Value(8, made_by=i) for i in range(4))
    ops = tuple(Op("exp", (), (i,), 0.0, module=f"h.{i}") for i in range(4))
    found = repeated_modules(Trace(ops, values), dropped={2})
    assert [str(found[f"h.{i}"]) for i in range(4)] == [
        *["h.{0-1,3} x 3"] * 2,
        "h.2",
        "h.{0-1,3} x 3",
    ]
