"""What steps and conditions may and may not do, on both engines."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import remat

from .both import both


@both
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("start", "step", "words"),
    [
        ([1.0, 2.0], lambda h, x: 0.5 * h + x, r"of shape \(2,\)"),
        ([1.0, 2.0, 3.0], lambda h, x: 0.5 * h + x, r"of shape \(3,\)"),
        ([1.0, 2.0], lambda h, x: {"state": h, "output": x}, "dict of length 2"),
        ([1.0, 2.0], lambda h, x: (h, x, x), "tuple of length 3"),
        ([1.0, 2.0], lambda h, x: None, "NoneType"),
    ],
)
def test_a_scan_step_that_returns_no_pair(on, start, step, words, traced) -> None:
    def run(h):
        return on.sum(remat.checkpointed_scan(step, h, on.array([[1.0], [2.0], [3.0]]))[0])

    call = partial(on.value_and_grad, run, start) if traced else partial(run, on.array(start))
    with pytest.raises(TypeError, match=rf"{words}; return \(state, output\)"):
        call()


@both
def test_a_scan_step_that_forgets_its_output_with_a_pair_as_state(on) -> None:
    with pytest.raises(TypeError, match=r"return \(state, output\)"):
        remat.checkpointed_scan(
            lambda h, x: (h[0] + x, h[1]), (on.array([1.0]), on.array([2.0])), on.array([[1.0]])
        )


@both
@pytest.mark.parametrize("pair", [tuple, list])
def test_a_scan_step_may_return_any_pair(on, pair) -> None:
    final, ys = remat.checkpointed_scan(
        lambda h, x: pair([h + x, h * x]), on.array(0.0), on.array([1.0, 2.0, 3.0])
    )
    assert float(final) == 6.0
    assert ys.tolist() == [0.0, 2.0, 9.0]


# -- the condition of a while loop -----------------------------------------------------------------


class Calls:
    """A condition that counts how often it is asked, and says yes five times."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, state: Any) -> bool:
        self.asked += 1
        return self.asked <= 5


@both
@pytest.mark.parametrize("is_profiled", [False, True])
@pytest.mark.parametrize("options", [{"num_checkpoints": 2}, {"memory_budget": "1MB"}])
def test_a_condition_is_asked_once_before_each_step_and_once_at_the_end(
    on, options, is_profiled
) -> None:
    condition = Calls()

    def run(x):
        return on.sum(remat.checkpointed_while(condition, lambda x: 2 * x, x, **options)[0])

    with remat.CheckpointProfiler() if is_profiled else nullcontext():
        assert on.value_and_grad(run, [1.0]) == (32.0, [32.0])
    assert condition.asked == 6


@both
@pytest.mark.parametrize("options", [{"num_checkpoints": 2}, {"memory_budget": "1MB"}])
def test_a_condition_that_never_says_yes_is_asked_once(on, options) -> None:
    condition = Calls()
    condition.asked = 5

    def run(x):
        return on.sum(remat.checkpointed_while(condition, lambda x: 2 * x, x, **options)[0])

    assert on.value_and_grad(run, [3.0]) == (3.0, [1.0])
    assert condition.asked == 6


def test_a_second_backward_pass_does_not_ask_how_long_the_loop_was() -> None:
    condition = Calls()
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    final, _ = remat.checkpointed_while(condition, lambda x: 2 * x, x, memory_budget="1MB")
    for _ in range(2):
        (gradient,) = torch.autograd.grad(final.sum(), x, retain_graph=True)
        assert gradient.tolist() == [32.0]
    assert condition.asked == 6


@both
@pytest.mark.parametrize("options", [{"num_checkpoints": 1}, {"memory_budget": "1MB"}])
def test_a_condition_and_a_step_that_draw_from_one_source(on, options) -> None:
    """What the condition draws before step 0 comes before what step 0 draws."""
    start = [1.0, 2.0]

    def condition(x):
        return np.random.rand() < 0.9

    def step(x):
        return x * np.random.randn()

    np.random.seed(0)
    factor = 1.0
    while condition(None):
        factor = step(factor)
    np.random.seed(0)

    def run(x):
        return on.sum(remat.checkpointed_while(condition, step, x, **options)[0])

    _, gradient = on.value_and_grad(run, start)
    np.testing.assert_allclose(gradient, [factor, factor], rtol=1e-12)


# -- checkpoints on disk ---------------------------------------------------------------------------


@both
@pytest.mark.parametrize("is_scan", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 9, 40])
@pytest.mark.parametrize("disk", [1e-9, 1e-3, 1.0])  # seconds for a checkpoint
def test_no_step_is_run_to_weigh_the_disk(on, steps, is_scan, disk, monkeypatch, tmp_path) -> None:
    """In the forward pass each step runs once: its effects are those of the plain loop."""
    monkeypatch.setattr(remat.DiskStore, "measure", lambda *_: (disk, disk))
    seen = []

    def step(h, x=0.0):
        seen.append(float(on.sum(on.plain(h))))
        return (h + 1.0, h) if is_scan else h + 1.0

    store = remat.DiskStore(tmp_path)
    calls = []

    def run(h):
        if is_scan:
            final, ys = remat.checkpointed_scan(step, h, on.array([0.0] * steps), 4, store=store)
            assert on.plain(ys).ravel().tolist() == [float(i) for i in range(steps)]
        else:
            final, _ = remat.checkpointed_loop(step, h, steps, 4, store=store)
        calls.extend(seen)
        return on.sum(final)

    value, gradient = on.value_and_grad(run, [0.0])
    assert calls == [float(i) for i in range(steps)]
    assert (value, gradient) == (float(steps), [1.0])


@both
def test_a_step_that_counts_is_right_if_no_step_runs_twice(on) -> None:
    calls = [0]

    def step(x):
        calls[0] += 1
        return x * calls[0]

    def run(x):
        return on.sum(remat.checkpointed_loop(step, x, 4, 100, store="disk")[0])

    assert on.value_and_grad(run, [1.0] * 500) == (12000.0, [24.0] * 500)
    assert calls == [4]


# -- writes to what a loop returned ----------------------------------------------------------------


@both
@pytest.mark.parametrize("which", ["loop", "while", "outputs"])
def test_whole_numbers_that_the_caller_writes_to(on, which) -> None:
    """They are compared when steps are run again, and are the caller's nevertheless."""

    def run(x):
        counts = on.whole([0, 0])
        if which == "loop":
            step = lambda s: (s[0] * 2, s[1] + 1)  # noqa: E731
            y, counts = remat.checkpointed_loop(step, (x, counts), 5, 1)[0]
        elif which == "while":
            step = lambda s: (s[0] * 2, s[1] + 1)  # noqa: E731
            y, counts = remat.checkpointed_while(lambda s: int(s[1][0]) < 5, step, (x, counts), 1)[
                0
            ]
        else:
            y, counts = remat.checkpointed_scan(
                lambda s, i: (s * 2, on.whole([1, 1])), x, on.array([0.0] * 5), 1
            )
        counts += 1
        return on.sum(y)

    assert on.value_and_grad(run, [1.0]) == (32.0, [32.0])
