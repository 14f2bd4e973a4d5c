"""Objects that are no pytrees, and arrays of NumPy, in what steps on tensors get and return."""

from __future__ import annotations

import argparse
import collections
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import remat

MAKERS = {
    "SimpleNamespace": lambda h: SimpleNamespace(h=h),
    "argparse": lambda h: argparse.Namespace(h=h),
    "closure": lambda h: lambda: h,
    "UserDict": lambda h: collections.UserDict(h=h),
    "generator": lambda h: (h for _ in range(1)),
}


def content(value: Any) -> Any:
    if isinstance(value, collections.UserDict):
        return value["h"]
    if not callable(value) and hasattr(value, "__next__"):
        return next(value)
    return value() if callable(value) else value.h


def source() -> torch.Tensor:
    return torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("schedule", ["revolve", "all"])
def test_tensors_in_an_object_of_the_state_are_refused(schedule: Any, make: Any) -> None:
    def step(state: Any) -> Any:
        return state[0], make(torch.sin(content(state[1])))

    x = source()
    with pytest.raises(remat.UnsupportedError, match="no pytree"):
        remat.checkpointed_loop(step, (x, make(x)), 4, 1, schedule=schedule)


@pytest.mark.parametrize("make", list(MAKERS.values())[:-1], ids=list(MAKERS)[:-1])
@pytest.mark.parametrize("schedule", ["revolve", "all"])
def test_an_object_may_pass_through(schedule: Any, make: Any) -> None:
    x = source()
    start = torch.ones(2, dtype=torch.float64), make(x)
    final, _ = remat.checkpointed_loop(
        lambda s: (s[0] * content(s[1]), s[1]), start, 3, 1, schedule=schedule
    )
    final[0].sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)


def test_an_object_as_output_of_a_scan_is_refused() -> None:
    with pytest.raises(remat.UnsupportedError, match="SimpleNamespace"):
        remat.checkpointed_scan(lambda s, _: (s, SimpleNamespace(h=s)), source(), torch.arange(3.0))


def test_an_object_as_result_of_a_differentiated_function_is_refused() -> None:
    with pytest.raises(remat.UnsupportedError, match="SimpleNamespace"):
        remat.grad(lambda x: (x.sum(), SimpleNamespace(h=x.sin().sum())))(source())


def test_a_counter_in_an_object_of_the_state_is_found_where_states_are_zero() -> None:
    def step(state: Any) -> Any:
        state[1].calls += 1
        return state[0] * state[1].calls, state[1]

    x = source()
    start = x - x.detach(), SimpleNamespace(calls=0)
    final, _ = remat.checkpointed_loop(step, start, 5, 1, schedule="revolve")
    with pytest.raises(remat.RecomputeMismatchError, match="calls"):
        final[0].sum().backward()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("schedule", ["revolve", "uniform", "all"])
def test_a_state_may_hold_arrays_of_numpy(schedule: Any, in_place: bool) -> None:
    counts = np.arange(2.0)

    def step(state: Any) -> Any:
        x, numbers, scalar = state
        if in_place:
            numbers += 1
        else:
            numbers = numbers + 1
        return x * float(numbers[0]), numbers, {"a": scalar["a"] + np.float32(1)}

    x = source()
    start = x - x.detach(), counts, {"a": np.float32(2)}
    final, _ = remat.checkpointed_loop(step, start, 5, 1, schedule=schedule)
    final[0].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [120.0, 120.0]
    assert counts.tolist() == [0.0, 1.0]


def test_a_scan_over_nothing_returns_empty_outputs() -> None:
    norm = torch.nn.BatchNorm1d(2)
    state = torch.get_rng_state()

    def step(s: Any, x: Any) -> Any:
        return norm(s) + torch.rand(3, 2), (s * x, {"sum": x.sum().long()})

    start = torch.ones(3, 2, requires_grad=True)
    final, (ys, sums) = remat.checkpointed_scan(step, start, torch.zeros(0, 2))
    final.sum().backward()
    assert ys.shape == (0, 3, 2)
    assert (sums["sum"].shape, sums["sum"].dtype) == ((0,), torch.int64)
    assert start.grad is not None
    assert start.grad.tolist() == [[1.0, 1.0]] * 3
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(state, torch.get_rng_state())
