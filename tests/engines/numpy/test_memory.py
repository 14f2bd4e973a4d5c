"""What a loop holds, by tracemalloc."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

import remat

SIZE = 10_000  # floats in a state


def peak(function) -> int:
    function()  # imports, caches and tables of the first time are none of the loop's
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        function()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def step(x):
    return np.sin(x)


def gradient(steps: int, slots: int, schedule: str):
    def loss(x):
        return np.sum(remat.checkpointed_loop(step, x, steps, slots, schedule=schedule)[0])

    return lambda: remat.grad(loss)(np.ones(SIZE))


@pytest.mark.parametrize("schedule", ["auto", "revolve"])
def test_the_peak_stays_near_the_checkpoints(schedule) -> None:
    state = 8 * SIZE
    found = peak(gradient(400, 20, schedule))
    assert found < (20 + 12) * state
    assert found > 20 * state  # or the measurement would be blind


@pytest.mark.parametrize("schedule", ["auto", "revolve"])
def test_the_peak_does_not_grow_with_the_length(schedule) -> None:
    short, long = (peak(gradient(steps, 10, schedule)) for steps in (100, 400))
    assert long < 1.15 * short


def test_uniform_holds_a_segment_of_nothing() -> None:
    state = 8 * SIZE
    assert peak(gradient(200, 20, "uniform")) < (20 + 12) * state


def test_holding_everything_takes_what_it_takes() -> None:
    assert peak(gradient(100, 0, "all")) > 100 * 8 * SIZE


def test_a_plain_sweep_holds_its_checkpoints_only() -> None:
    state = 8 * SIZE
    found = peak(lambda: remat.checkpointed_loop(step, np.ones(SIZE), 400, 10))
    assert found < (10 + 5) * state


@pytest.mark.parametrize("budget", ["1MB", "3MB"])
def test_the_peak_keeps_to_the_budget(budget) -> None:
    limit = {"1MB": 1_000_000, "3MB": 3_000_000}[budget]

    def loss(x):
        return np.sum(remat.checkpointed_loop(step, x, 150, memory_budget=budget)[0])

    assert peak(lambda: remat.grad(loss)(np.ones(SIZE))) < 1.1 * limit


SMALL = 8  # floats: what Python needs for a checkpoint is more than its numbers
BUDGET = 400_000
PASS = 60_000  # what Python needs for a pass, whatever it holds


@pytest.mark.parametrize("leaves", [1, 4])
@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])
def test_small_states_keep_to_the_budget(schedule, leaves) -> None:
    def small_step(state):
        return tuple(np.sin(leaf) for leaf in state)

    def loss(x):
        state = tuple(x + i for i in range(leaves))
        options = {"memory_budget": BUDGET, "schedule": schedule}
        return np.sum(remat.checkpointed_loop(small_step, state, 500, **options)[0][0])

    assert peak(lambda: remat.grad(loss)(np.ones(SMALL))) < BUDGET + PASS


def test_a_while_loop_of_small_states_keeps_to_the_budget() -> None:
    def loss(x):
        state = remat.checkpointed_while(
            lambda s: s[1] < 500, lambda s: (np.sin(s[0]), s[1] + 1), (x, 0), memory_budget=BUDGET
        )[0]
        return np.sum(state[0])

    assert peak(lambda: remat.grad(loss)(np.ones(SMALL))) < BUDGET + PASS


_PROCESS = """
import numpy as np, remat
def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))
def gradient(steps):
    def loss(x):
        step = lambda s: np.sin(s) * 0.99 + 0.01
        options = dict(memory_budget=4_000_000, schedule="{schedule}")
        return np.sum(remat.checkpointed_loop(step, x, steps, **options)[0])
    remat.grad(loss)(np.ones(8))
gradient(50)  # imports
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark begins anew
before = status("VmRSS")
gradient(20_000)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])
def test_small_states_keep_to_the_budget_by_the_operating_system(schedule) -> None:
    code = _PROCESS.format(schedule=schedule)
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 1_000_000 < int(found.stdout) <= 4_000_000


def test_a_segment_holds_its_inputs_only() -> None:
    def deep(x):
        for _ in range(40):
            x = np.sin(x)
        return x

    def loss(run):
        def f(x):
            for _ in range(10):
                x = run(deep, x)
            return np.sum(x)

        return f

    x = np.ones(SIZE)
    plain = peak(lambda: remat.grad(loss(lambda f, x: f(x)))(x))
    checkpointed = peak(lambda: remat.grad(loss(remat.checkpoint))(x))
    assert checkpointed < plain / 4


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform", "all"])
def test_nothing_stays_after_the_gradient(schedule) -> None:
    run = gradient(50, 5, schedule)
    run()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            run()
        assert tracemalloc.get_traced_memory()[0] - before < 2 * 8 * SIZE
    finally:
        tracemalloc.stop()
