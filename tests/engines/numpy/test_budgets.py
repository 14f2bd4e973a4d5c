"""Gradients of NumPy functions within a memory budget: the same bits, within the budget."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import remat

from .oracles import same_bits
from .random_programs import IN_PLACE, OUT_OF_PLACE, SCALARS, VIEWS, compiled, draw, with_scopes

LARGE = np.linspace(0.1, 1.0, 131_072)  # 1 MB


def steps(x: Any, count: int = 6) -> Any:
    for _ in range(count):
        x = np.tanh(np.sin(x) * 1.1 + np.exp(-x * x))
    return np.sum(x)


PLAIN = remat.grad(steps)(LARGE)


@pytest.mark.parametrize("budget", ["16MB", 0.7, 12_000_000])
def test_the_bits_of_a_plain_gradient_within_the_budget(budget) -> None:
    gradient = remat.grad(steps, memory_budget=budget)
    assert same_bits(gradient(LARGE), PLAIN)
    plain_peak = remat.memory_report(steps, LARGE).peak_bytes
    limit = {"16MB": 16_000_000, 0.7: 0.7 * plain_peak}.get(budget, budget)
    for _ in range(2):
        tracemalloc.start()
        try:
            assert same_bits(gradient(LARGE), PLAIN)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= 1.1 * limit


def wave(now: Any, count: int = 12) -> Any:
    before = now
    for _ in range(count):
        inner = now[1:-1, 1:-1]
        bend = now[2:, 1:-1] + now[:-2, 1:-1] + now[1:-1, 2:] + now[1:-1, :-2] - 4.0 * inner
        after = 2.0 * now - before
        after[1:-1, 1:-1] += 0.2 * bend - 0.01 * np.sin(inner) * np.exp(-inner * inner)
        now, before = after, now
    return np.sum(now**2)


def edges(u: Any) -> Any:
    for _ in range(12):
        v = u * 1.01
        v[1:-1, 1:-1] += 0.1 * np.sin(v[2:, 1:-1] * v[:-2, 1:-1])
        v[0] = v[-2]
        v[-1] = v[1]
        u = v
    return np.sum(u**2)


def spectral(u: Any) -> Any:
    """With plain arrays that nothing but the recording holds."""
    waves = np.fft.fftfreq(len(u))[:, None] ** 2 + np.fft.fftfreq(len(u)) ** 2
    for _ in range(8):
        u = np.real(np.fft.ifft2(np.fft.fft2(u) * np.exp(-waves)))
        u = u + 0.1 * np.sin(u)
    return np.sum(u**2)


def heat(u: Any) -> Any:
    for _ in range(10):
        around = np.roll(u, 1, 0) + np.roll(u, -1, 0) + np.roll(u, 1, 1) + np.roll(u, -1, 1)
        u = u + 0.1 * (around - 4 * u) * np.exp(-u * u)
    return np.sum(u * u)


SQUARE = LARGE.reshape(512, 256)[:256] + np.linspace(0, 1, 256)[:, None]  # 0.5 MB


@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize("program", [wave, edges, spectral, heat])
def test_programs_keep_to_their_budget(program, share: float) -> None:
    plain_peak, expected = measured(remat.grad(program))
    gradient = remat.grad(program, memory_budget=int(share * plain_peak))
    gradient(SQUARE)  # it makes the plan, which is no part of a budget
    for _ in range(2):
        peak, found = measured(gradient)
        assert same_bits(found, expected)
        assert peak <= 1.1 * share * plain_peak


def measured(gradient: Any) -> tuple[int, Any]:
    tracemalloc.start()
    try:
        found = gradient(SQUARE)
        return tracemalloc.get_traced_memory()[1], found
    finally:
        tracemalloc.stop()


def test_a_budget_of_all_recomputes_nothing() -> None:
    manager = remat.CheckpointManager(memory_budget="1GB")
    for _ in range(2):
        with manager:
            assert same_bits(remat.grad(steps)(LARGE), PLAIN)
    record = manager.last_pass
    assert record.followed
    assert record.recomputed_ops == 0


def test_the_first_pass_keeps_to_the_budget_without_a_plan() -> None:
    plain = remat.grad(steps)(LARGE, 20)
    manager = remat.CheckpointManager(memory_budget="40MB")
    records = []
    for _ in range(2):
        with manager:
            assert same_bits(remat.grad(steps)(LARGE, 20), plain)
        records.append(manager.last_pass)
    first, later = records
    assert 0.3 * first.budget < first.measured_peak <= first.budget
    assert later.plan.peak_bytes > 0.9 * later.budget
    assert not first.followed
    assert later.followed


def test_where_planning_takes_more_than_the_budget_the_first_pass_is_as_the_others() -> None:
    small = LARGE[:8192]  # 64 KB
    manager = remat.CheckpointManager(memory_budget=0.5)
    plans = []
    for _ in range(2):
        with manager:
            remat.grad(steps)(small, 20)
        plans.append(manager.last_pass.plan)
    assert plans[0] == plans[1]


def test_a_budget_that_is_too_small_says_which_one_is_not() -> None:
    with pytest.raises(remat.BudgetTooSmallError, match="MB") as caught:
        remat.grad(steps, memory_budget="1MB")(LARGE)
    needed = caught.value.smallest
    assert same_bits(remat.grad(steps, memory_budget=needed)(LARGE), PLAIN)


def test_another_program_is_planned_anew() -> None:
    gradient = remat.value_and_grad(steps, memory_budget=0.6)
    for count in (4, 5, 4, 3):
        value, found = gradient(LARGE, count)
        expected = remat.value_and_grad(lambda x, n=count: steps(x, n))(LARGE)
        assert same_bits(value, expected[0])
        assert same_bits(found, expected[1])


def test_scopes_and_marks_are_obeyed_inside() -> None:
    def f(x: Any) -> Any:
        h = remat.mark_checkpoint(np.sin(x) * x)
        with remat.CheckpointScope("part"):
            h = np.tanh(h * np.exp(-h))
        return steps(h, 3)

    expected = remat.grad(f)(LARGE)
    gradient = remat.grad(f, memory_budget=0.7)
    for _ in range(3):
        assert same_bits(gradient(LARGE), expected)


@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_give_the_bits_of_plain_ones(seed: int) -> None:
    source = draw(seed, OUT_OF_PLACE + IN_PLACE + VIEWS + SCALARS)
    start = np.linspace(-0.7, 0.9, 6)
    try:
        plain = remat.value_and_grad(compiled(source))(start.copy())
    except remat.UnsupportedError:
        return
    program = compiled(with_scopes(seed, source) if seed % 2 else source)
    gradient = remat.value_and_grad(program, memory_budget=0.9)
    for _ in range(2):
        try:
            found = gradient(start.copy())
        except remat.BudgetTooSmallError as error:
            gradient = remat.value_and_grad(program, memory_budget=error.smallest)
            found = gradient(start.copy())
        assert all(map(same_bits, found, plain)), source


def test_a_report_tells_what_was_planned_and_measured() -> None:
    manager = remat.CheckpointManager(memory_budget=0.5)
    with manager:
        for _ in range(2):
            remat.grad(steps)(LARGE)
    record = manager.last_pass
    assert 0 < record.measured_peak <= 1.1 * record.budget
    assert record.recomputed_ops > 0
    assert "numpy.tanh" in manager.report()
    assert "test_budgets.py" in remat.memory_report(steps, LARGE).text()


def test_a_profiler_sees_what_a_budget_holds_and_recomputes() -> None:
    manager = remat.CheckpointManager(memory_budget=0.6)
    with manager:
        remat.grad(steps)(LARGE)
        with remat.CheckpointProfiler() as profiler:
            remat.grad(steps)(LARGE)
    record = manager.last_pass
    assert profiler.checkpoint_count() == 1
    assert profiler.regions[0].ops == record.recomputed_ops > 0
    assert profiler.recompute_seconds() == record.recompute_seconds
    assert profiler.regions[0].plain_bytes == record.trace.saved_bytes
    assert profiler.memory_saved() > 0


def test_a_frontier_goes_from_little_to_plain() -> None:
    curve = remat.frontier(steps, LARGE)
    assert curve.points[0].peak_bytes < 0.6 * curve.plain_peak_bytes
    assert curve.slowdown(curve.points[0]) > 1


def test_a_budget_around_a_part_of_a_gradient_is_refused() -> None:
    def f(x: Any) -> Any:
        with remat.CheckpointManager(memory_budget=0.5):
            return np.sum(np.sin(x))

    with pytest.raises(remat.UnsupportedError, match="outermost gradient"):
        remat.grad(f)(LARGE)
    assert same_bits(remat.grad(steps)(LARGE), PLAIN)


@pytest.mark.parametrize("budget", [0, -1, "much", True, 1.5])
def test_bad_budgets_are_refused(budget) -> None:
    with pytest.raises((TypeError, ValueError), match="memory_budget"):
        remat.grad(steps, memory_budget=budget)


_PROCESS = """
import gc, sys, numpy as np, remat
from {module} import steps, wave

def status(name):
    # (Not ru_maxrss: a process inherits that of the one that started it.)
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

program, x = {program}
remat.grad(steps, memory_budget=0.8)(np.ones(10_000))  # imports
gradient = remat.grad(program, memory_budget={budget})
for _ in range(3):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark begins anew
    before = status("VmRSS")
    gradient(x)
    print(status("VmHWM") - before)
assert "scipy" not in sys.modules  # which takes memory of its own
"""


STEPS = "lambda x: steps(x, 12), np.linspace(0.1, 1, 1 << 20)"
WAVE = "lambda x: wave(x, 20), np.linspace(0.1, 1, 1 << 18).reshape(512, 512)"
LONG_WAVE = "lambda x: wave(x, 50), np.linspace(0.1, 1, 1 << 17).reshape(256, 512)"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    # A plain gradient takes 400 MB, 170 MB and 210 MB. For the last one planning takes 10 MB.
    ("program", "budget"),
    [(STEPS, 150_000_000), (STEPS, 250_000_000), (WAVE, 90_000_000), (LONG_WAVE, 60_000_000)],
)
def test_the_operating_system_sees_no_more_than_the_budget(program: str, budget: int) -> None:
    code = _PROCESS.format(module=__name__, program=program, budget=budget)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed arrays are given back
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    peaks = [1024 * int(line) for line in found.stdout.split()]
    assert 0.5 * budget < max(peaks) <= 1.1 * budget


def test_a_function_without_ops_has_a_report() -> None:
    assert "a pass without ops" in remat.memory_report(lambda x: x, LARGE).text()
    manager = remat.CheckpointManager(memory_budget="1MB")
    with manager:
        remat.grad(lambda x: x)(LARGE)
    assert "a pass without ops" in manager.report()


def test_a_frontier_leaves_the_random_state_as_it_was() -> None:
    def noisy(x: Any) -> Any:
        return np.sum(np.sin(x * np.random.random(x.shape)))

    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    remat.frontier(noisy, LARGE)
    assert np.random.random() == expected


def test_a_budget_may_be_an_integer_of_numpy() -> None:
    assert same_bits(remat.grad(steps, memory_budget=np.int64(12_000_000))(LARGE), PLAIN)


def test_budgets_of_threads_are_their_own() -> None:
    """The same gradient in two threads, entered and left in another order."""
    inside, left = threading.Barrier(2), threading.Event()

    def f(x: Any) -> Any:
        inside.wait(600)
        if threading.current_thread() is not first:
            left.wait(600)
        return np.sum(np.sin(np.cos(x)))

    gradient, errors = remat.grad(f, memory_budget="100MB"), []

    def run(manager: remat.CheckpointManager | None) -> None:
        try:
            with manager or nullcontext():
                gradient(LARGE)
                left.set()
                if manager is None:
                    remat.grad(steps)(LARGE)
                else:
                    with pytest.raises(remat.BudgetTooSmallError):
                        remat.grad(steps)(LARGE)
        except BaseException as error:
            errors.append(error)

    first = threading.Thread(target=run, args=(remat.CheckpointManager(memory_budget=1000),))
    second = threading.Thread(target=run, args=(None,))
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join()
    assert not errors


def test_validation_inside_of_a_manager_and_a_budget_that_is_given_later() -> None:
    def f(x: np.ndarray) -> np.ndarray:
        for _ in range(6):
            x = np.tanh(np.sin(x) * 1.1)
        return np.sum(x)

    def fails(x: np.ndarray) -> np.ndarray:
        f(x)
        raise KeyError("mine")

    x = np.linspace(0.0, 1.0, 10_000)
    expected = remat.grad(f)(x)
    manager = remat.CheckpointManager()
    manager.max_memory_mb = 0.5
    with manager:
        for megabytes in (0.5, 0.7):
            manager.max_memory_mb = megabytes
            for _ in range(3):
                np.testing.assert_array_equal(remat.grad(f)(x), expected)
                f(x[:100])
                with pytest.raises(KeyError):
                    remat.grad(fails)(x)
            assert manager.last_pass.budget == megabytes * 1e6
            assert manager.last_pass.followed
            assert [len(b.planned) for b in manager._budgets if b.planned] == [1]


def test_every_pass_keeps_to_the_budget() -> None:
    """The fourth as well as the first, and all after that."""
    x = np.random.default_rng(0).normal(size=(400, 400))  # 1.28 MB
    budget = 14_000_000

    def program(x: Any) -> Any:
        for _ in range(10):
            x = x + 0.1 * np.tanh(x * x) * np.exp(-x * x)
        return np.sum(x * x)

    gradient = remat.grad(program, memory_budget=budget)
    expected = remat.grad(program)(x)
    peaks = []
    for _ in range(14):
        tracemalloc.start()
        try:
            np.testing.assert_array_equal(gradient(x), expected)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    # The first two plan, which takes memory of its own; all else is Python's objects.
    assert max(peaks[2:]) <= 1.05 * budget
    assert max(peaks) <= budget + 6_000_000
