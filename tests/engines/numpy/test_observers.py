"""What regions report to observers, against tracemalloc and against counting by hand."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import autograd
import numpy as np
import pytest

import remat
from remat.engines.numpy.tape import record
from remat.observers import observers

SIZE = 20_000  # floats in an array: far more than the bookkeeping of a tape
ARRAY = 8 * SIZE
X = np.linspace(0.1, 0.9, SIZE)
STEPS = 10
TAPE = 10_000 / ARRAY  # of Python objects, with integers that Python 3.14 keeps for reuse


def deep(op):
    def layer(x):
        for _ in range(STEPS):
            x = op(x)
        return x

    return layer


def scaled(x):
    return 0.9 * x


def squared(x):
    return x * x


def decayed(x):
    return np.exp(-x)


OPS = [np.sin, np.tanh, np.sqrt, decayed, scaled, squared]


def chain(run, op, count=3):
    def loss(x):
        for _ in range(count):
            x = run(deep(op), x)
        return np.sum(x)

    return loss


def directly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def profile(loss, x=X):
    gc.collect()
    with remat.CheckpointProfiler() as profiler:
        remat.grad(loss)(x)
    return profiler


def peaks(profiler):
    accounting = profiler._accounting
    return accounting.plain_peak / ARRAY, accounting.held_peak / ARRAY


def at_the_turn(loss, x=X) -> float:
    """Measure what is held when the way ahead ends, in arrays."""
    found = []

    def measured(x):
        base = tracemalloc.get_traced_memory()[0]
        value = loss(x)
        found.append(tracemalloc.get_traced_memory()[0] - base)
        return value

    tracemalloc.start()
    try:
        remat.grad(measured)(x)
    finally:
        tracemalloc.stop()
    return found[0] / ARRAY


# -- segments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_a_plain_pass_would_hold_what_a_plain_pass_holds(op) -> None:
    plain, _ = peaks(profile(chain(remat.checkpoint, op)))
    # (Of the tape, the operating system also sees a KB of Python for every op.)
    assert plain == pytest.approx(at_the_turn(chain(directly, op)), abs=0.4)


def test_a_segment_holds_its_input_and_its_tape_on_the_way_back() -> None:
    profiler = profile(chain(remat.checkpoint, np.sin))
    plain, held = peaks(profiler)
    # sin holds its argument: 30 arguments, the first of them the caller's.
    assert plain == pytest.approx(29, abs=0.5)
    # Two inputs that were made in the pass, and 9 arguments on the tape.
    assert held == pytest.approx(2 + 9, abs=0.3)
    assert profiler.memory_saved() == pytest.approx((29 - 11) * ARRAY, rel=0.02)


def test_bytes_per_region_are_what_a_plain_pass_keeps_and_what_is_kept() -> None:
    (totals,) = profile(chain(remat.checkpoint, np.sin)).regions
    assert totals.runs == 3
    assert totals.plain_bytes / ARRAY == pytest.approx(29, abs=0.5)
    assert totals.held_bytes / ARRAY == pytest.approx(2, abs=0.1)  # the inputs, the caller's aside


def test_bytes_of_a_loop_are_those_of_its_steps_and_of_its_checkpoints() -> None:
    def loss(x):
        return np.sum(remat.checkpointed_loop(np.sin, x * 1.0, 40, 5, schedule="revolve")[0])

    (totals,) = profile(loss).regions
    assert totals.plain_bytes / ARRAY == pytest.approx(41, abs=40 * TAPE)  # its tape, and the input
    assert totals.held_bytes / ARRAY == pytest.approx(7, abs=1)  # 5 states, and the input


@pytest.mark.parametrize("run", [remat.checkpoint, remat.adaptive_checkpoint(threshold="1GB")])
def test_nothing_is_held_when_the_gradient_is_there(run) -> None:
    profiler = profile(lambda x: np.sum(run(deep(np.sin), run(deep(np.sin), x))))
    assert profiler._accounting.curve[-1] == (0, 0)


def test_what_backward_has_used_is_reported_as_freed() -> None:
    held_at_the_end: list[int] = []

    @autograd.extend.primitive
    def probe(x):
        return x + 0.0

    def look(gradient):
        held_at_the_end.append(profiler._accounting.curve[-1][1])
        return gradient

    autograd.extend.defvjp(probe, lambda ans, x: look)

    def loss(x):
        with remat.CheckpointScope("marked"):
            x = probe(x)
            for _ in range(STEPS):
                x = remat.mark_checkpoint(np.sin(x)) ** 2
            return np.sum(x)

    with remat.CheckpointProfiler() as profiler:
        remat.grad(loss)(X)
    assert profiler._accounting.held_peak >= STEPS * ARRAY
    assert held_at_the_end == [pytest.approx(0, abs=2 * ARRAY)]


def test_memory_that_two_arrays_are_in_is_held_until_both_are_gone() -> None:
    def loss(x):
        with remat.CheckpointScope("views"):
            y = remat.mark_checkpoint(np.exp(x))
            remat.mark_checkpoint(y[::-1])  # gone at once
            return np.sum(np.sin(y))

    with remat.CheckpointProfiler() as profiler:
        remat.grad(loss)(X)
    assert profiler._accounting.held_peak == ARRAY


def test_counts_and_names() -> None:
    group = remat.CheckpointGroup("group")
    named = deep(np.sin)

    def loss(x):
        return np.sum(
            group.checkpoint_fn(named, remat.checkpoint(named, remat.checkpoint(np.sin, x)))
        )

    profiler = profile(loss)
    found = {
        totals.name: (totals.runs, totals.recomputed, totals.ops) for totals in profiler.regions
    }
    assert found == {"layer": (1, 1, 9), "sin": (1, 0, 0), "group": (1, 1, 9)}
    # (The slope of the first sin needs the input, which is the caller's.)
    assert (profiler.checkpoint_count(), profiler.recompute_count()) == (3, 2)
    assert profiler.recompute_seconds() > 0
    assert (group.calls, group.recompute_count()) == (1, 1)
    assert 0 < group.recompute_seconds() < profiler.recompute_seconds()


def test_without_differentiation_nothing_is_told() -> None:
    with remat.CheckpointProfiler() as profiler:
        remat.checkpoint(deep(np.sin), X)
        remat.checkpointed_loop(np.sin, X, 10)
    assert profiler.checkpoint_count() == 0


@pytest.mark.parametrize("op", OPS)
def test_a_profiler_changes_neither_runs_nor_gradients(op) -> None:
    runs = []

    def counted(x):
        runs.append(None)
        return deep(op)(x)

    def loss(x):
        return np.sum(remat.checkpoint(counted, remat.checkpoint(counted, x)) ** 2)

    expected = remat.grad(loss)(X)
    unwatched, runs = len(runs), []
    with remat.CheckpointProfiler():
        found = remat.grad(loss)(X)
    assert len(runs) == unwatched == 2
    np.testing.assert_array_equal(found, expected)


def test_randomness_is_replayed_with_a_profiler() -> None:
    def noisy(x):
        return x * np.random.normal(size=x.shape)

    def gradient():
        np.random.seed(0)
        return remat.grad(lambda x: np.sum(remat.checkpoint(noisy, x)))(X), np.random.random()

    (expected, drawn), _ = gradient(), None
    with remat.CheckpointProfiler():
        found, again = gradient()
    np.testing.assert_array_equal(found, expected)
    assert again == drawn


def test_every_way_back_is_counted() -> None:
    with remat.CheckpointProfiler() as profiler:
        recording = record(lambda x: [remat.checkpoint(deep(np.sin), x[0])], [X], [True])
        for _ in range(4):
            recording.go_back([X])
    assert profiler.checkpoint_count() == 1
    assert profiler.recompute_count() == 4


def test_what_was_told_is_taken_back_after_an_error() -> None:
    def fails(x):
        raise RuntimeError("on purpose")

    def loss(x):
        return np.sum(remat.checkpoint(fails, remat.checkpoint(deep(np.sin), x)))

    with remat.CheckpointProfiler() as profiler:
        with pytest.raises(RuntimeError, match="on purpose"):
            remat.grad(loss)(X)
        gc.collect()
        assert profiler._accounting.curve[-1] == (0, 0)
    assert not tracemalloc.is_tracing()


def test_what_goes_back_in_another_thread_is_reported_to_the_same_observers() -> None:
    """An observer of the first thread sees a way back that a second thread makes."""
    with remat.CheckpointProfiler() as profiler:
        recording = record(lambda x: [remat.checkpoint(deep(np.sin), x[0])], [X], [True])
        thread = threading.Thread(target=recording.go_back, args=([X],))
        thread.start()
        thread.join()
        assert profiler.recompute_count() == 1


# -- adaptive --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "ops"), [("1GB", 0), (0, 9), (3 * ARRAY, 9), (9.5, 0)])
def test_up_to_the_threshold_everything_is_held(threshold, ops) -> None:
    seen = []

    def counted(x):
        seen.append(None)
        return deep(np.sin)(x)

    limit = int(threshold * ARRAY) if isinstance(threshold, float) else threshold

    def loss(x):
        return np.sum(remat.adaptive_checkpoint(counted, x, threshold=limit) ** 2)

    with remat.CheckpointProfiler() as profiler:
        found = remat.grad(loss)(X)
    assert len(seen) == 1
    assert sum(region.ops for region in profiler.regions) == ops
    np.testing.assert_array_equal(found, remat.grad(lambda x: np.sum(deep(np.sin)(x) ** 2))(X))


@pytest.mark.parametrize("threshold", [0, "1GB"])
def test_adaptive_segments_tell_what_they_hold(threshold) -> None:
    run = remat.adaptive_checkpoint(threshold=threshold)
    profiler = profile(chain(run, np.sin))
    plain, held = peaks(profiler)
    assert plain == pytest.approx(29, abs=0.5)
    assert held == pytest.approx(11 if threshold == 0 else 29, abs=0.5)
    assert profiler.checkpoint_count() == 3
    assert profiler.recompute_count() == (3 if threshold == 0 else 0)
    assert profiler.memory_saved() >= 0


@pytest.mark.parametrize("threshold", [0, "1GB"])
def test_adaptive_segments_close_over_traced_arrays(threshold) -> None:
    def loss(run):
        def f(w, x):
            return np.sum(run(lambda y: np.tanh(y * w), x))

        return f

    found = remat.grad(loss(remat.adaptive_checkpoint(threshold=threshold)), wrt=(0, 1))(2.0, X)
    expected = remat.grad(loss(directly), wrt=(0, 1))(2.0, X)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("threshold", [0, "1GB"])
def test_adaptive_segments_may_work_in_place_and_return_trees(threshold) -> None:
    def fn(x, k):
        x *= 2.0
        x[0] += 1.0
        return {"x": x, "k": k + 1, "same": x, "flag": x > 1}

    def loss(run):
        def f(x):
            out = run(fn, x, 3)
            assert out["k"] == 4
            assert out["flag"].dtype == bool
            return np.sum(out["x"] * out["same"])

        return f

    run = remat.adaptive_checkpoint(threshold=threshold)
    x = np.array([1.0, 2.0])
    np.testing.assert_allclose(remat.grad(loss(run))(x), [12.0, 16.0])
    np.testing.assert_array_equal(x, [1.0, 2.0])


def test_a_kept_segment_can_be_gone_back_through_often() -> None:
    run = remat.adaptive_checkpoint(threshold="1GB")
    recordings = [
        record(lambda x, run=each: [run(deep(np.sin), x[0])], [X], [True])
        for each in (run, directly)
    ]
    for seed in np.eye(4):
        found, expected = (each.go_back([np.resize(seed, SIZE)])[0] for each in recordings)
        np.testing.assert_array_equal(found[0], expected[0])


def test_a_kept_segment_need_not_repeat_itself() -> None:
    count = [1.0]

    def counts(x):
        count[0] += 1.0
        return x * count[0]

    run = remat.adaptive_checkpoint(threshold="1GB")
    np.testing.assert_array_equal(
        remat.grad(lambda x: np.sum(run(counts, x)))(X), np.full(SIZE, 2.0)
    )
    np.testing.assert_array_equal(
        remat.grad(lambda x: np.sum(remat.checkpoint(counts, x)))(X), np.full(SIZE, 3.0)
    )


# -- regions inside regions ------------------------------------------------------------------------


def nested(run):
    def pair(x):
        return run(deep(np.sin), run(deep(np.sin), x))

    return lambda x: np.sum(run(pair, run(pair, x)))


def test_regions_inside_regions_are_counted_once() -> None:
    profiler = profile(nested(remat.checkpoint))
    plain, held = peaks(profiler)
    # (What an inner segment knows of its function, some 50 KB, is weighed with the outer tape.)
    assert plain == pytest.approx(at_the_turn(nested(directly)), abs=4 * 70_000 / ARRAY)
    # The input of the second pair, and of its second segment, its result, and a tape of 9.
    assert 1 + 1 + 9 - 0.5 < held < 1 + 1 + 1 + 9 + 1
    found = {totals.name: (totals.runs, totals.recomputed) for totals in profiler.regions}
    assert found == {"pair": (2, 2), "layer": (4, 4)}


def test_a_group_inside_a_segment_sees_its_own() -> None:
    group = remat.CheckpointGroup("inner")

    def pair(x):
        return group.checkpoint_fn(deep(np.sin), group.checkpoint_fn(deep(np.sin), x))

    def loss(x):
        return np.sum(remat.checkpoint(pair, x))

    assert profile(loss).recompute_count() == 3
    assert group.recompute_count() == 2
    assert group.calls == 2  # its code runs once
    # Two tapes of 9 and an array between them, against one tape and that array.
    assert group.memory_saved() == pytest.approx(9 * ARRAY, rel=0.1)
    assert observers() == ()


# -- loops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform", "all"])
@pytest.mark.parametrize("op", OPS)
def test_a_loop_tells_its_checkpoints_and_steps(schedule, op) -> None:
    runs = []

    def step(x):
        runs.append(None)
        return op(x)

    def loss(x):
        return np.sum(remat.checkpointed_loop(step, x, 50, 6, schedule=schedule)[0])

    profiler = profile(loss)
    plain, held = peaks(profiler)

    def in_plain_python(x):
        for _ in range(50):
            x = op(x)
        return np.sum(x)

    # The tape of a step by itself is some KB of Python heavier than its part of a long one.
    assert plain == pytest.approx(at_the_turn(in_plain_python), abs=1 + 50 * TAPE)
    if schedule == "all":
        assert held == pytest.approx(50, abs=50 * TAPE)
    else:
        assert 6 <= held <= 6 + 2 + 0.5
    (totals,) = profiler.regions
    assert totals.name == "checkpointed_loop"
    assert totals.ops == len(runs) - 50
    assert totals.recomputed == (len(runs) > 50)
    assert (profiler.recompute_seconds() > 0) == (len(runs) > 50)
    assert profiler._accounting.curve[-1] == (0, 0)


def test_a_scan_and_a_while_loop_tell_their_names_and_steps() -> None:
    def scan(x):
        final, ys = remat.checkpointed_scan(
            lambda s, t: (np.sin(s) * t, np.sum(s)), x, np.ones(20), 3
        )
        return np.sum(final) + np.sum(ys)

    def loop(x):
        return np.sum(
            remat.checkpointed_while(lambda s: np.max(s) > 1e-3, lambda s: s * s * 0.9, x, 3)[0]
        )

    for loss, name in ((scan, "checkpointed_scan"), (loop, "checkpointed_while")):
        profiler = profile(loss)
        (totals,) = profiler.regions
        assert totals.name == name
        assert totals.runs == 1
        assert totals.ops > 0
        assert profiler._accounting.plain_peak > 0
        assert profiler._accounting.curve[-1] == (0, 0)


@pytest.mark.parametrize("length", [0, 1])
def test_the_shortest_loops(length) -> None:
    profiler = profile(lambda x: np.sum(remat.checkpointed_loop(np.sin, x, length)[0]))
    assert profiler.checkpoint_count() == 1
    assert profiler.recompute_count() == 0
    profiler = profile(
        lambda x: np.sum(
            remat.checkpointed_while(lambda x: np.max(x) > 2 - length, scaled, x + length, 3)[0]
        )
    )
    assert profiler.checkpoint_count() == 1


def test_segments_inside_a_loop() -> None:
    def step(x):
        return remat.checkpoint(deep(np.sin), x)

    profiler = profile(lambda x: np.sum(remat.checkpointed_loop(step, x, 12, 3)[0]))

    def in_plain_python(x):
        for _ in range(12):
            x = deep(np.sin)(x)
        return np.sum(x)

    plain, held = peaks(profiler)
    assert plain == pytest.approx(at_the_turn(in_plain_python), rel=0.05)
    assert 3 + 9 < held < 3 + 9 + 4


def test_a_loop_inside_a_segment() -> None:
    def loops(x):
        return remat.checkpointed_loop(np.sin, x, 30, 3)[0]

    def loss(run):
        return lambda x: np.sum(run(loops, run(loops, x)))

    plain, held = peaks(profile(loss(remat.checkpoint)))
    assert plain == pytest.approx(60, abs=2 + 60 * TAPE)
    assert held < 12


def test_a_loop_shows_its_progress_with_a_profiler(capfd) -> None:
    with remat.CheckpointProfiler() as profiler:
        remat.grad(
            lambda x: np.sum(
                remat.checkpointed_loop(np.sin, x, 30, 3, schedule="revolve", progress=True)[0]
            )
        )(X)
    assert "30/30" in capfd.readouterr().err
    assert profiler.checkpoint_count() == 1


def test_a_long_loop_sends_few_events() -> None:
    def loss(x):
        return np.sum(remat.checkpointed_while(lambda x: x[0] < 3000, lambda x: x + 1, x, 5)[0])

    with remat.CheckpointProfiler() as profiler:
        vjp, _ = autograd.make_vjp(loss)(np.zeros(2))
        assert len(profiler._accounting._plain._counted) < 64 * np.log(3000)
        assert vjp is not None


def test_going_back_through_a_loop_again_is_told_as_running_all_of_it() -> None:
    def loop(x):
        return remat.checkpointed_loop(np.sin, x, 20, 3)[0]

    with remat.CheckpointProfiler() as profiler:
        autograd.jacobian(loop)(np.ones(2))
    (totals,) = profiler.regions
    assert totals.recomputed == 2
    with remat.CheckpointProfiler() as once:
        remat.grad(lambda x: np.sum(loop(x)))(np.ones(2))
    assert profiler._accounting.plain_peak < 1.5 * once._accounting.plain_peak


# -- no effect -------------------------------------------------------------------------------------


def test_a_segment_that_saves_nothing_is_warned_of_once() -> None:
    def of_constants(x):
        return np.sum(np.sin(x))

    def loss(x):
        return np.sum(x) * remat.checkpoint(of_constants, X)

    with pytest.warns(remat.RematWarning, match="of_constants has no effect") as caught:
        remat.grad(loss)(X)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    remat.grad(loss)(X)


def test_nested_segments_run_ahead_without_a_warning() -> None:
    remat.grad(nested(remat.checkpoint))(X)
    remat.grad(lambda x: np.sum(remat.checkpointed_loop(nested(remat.checkpoint), x, 5)[0]))(1.0)
