"""Loops hold their checkpoints and nothing per step; without a backward pass all is freed."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat

from .oracles import SCHEDULES, Remat

ALL = pytest.mark.parametrize("schedule", SCHEDULES)
# (The first mode of all has torch import its compiler, which keeps frames until gc comes.)
Remat().loop(torch.sin, torch.ones(3, requires_grad=True), 3)


@pytest.fixture(autouse=True)
def without_the_garbage_collector():
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


class Kept:
    """Weak references to the memory of tensors."""

    def __init__(self) -> None:
        self.references: list[weakref.ref] = []
        self.most = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        self.references = [reference for reference in self.references if reference() is not None]
        self.references.append(weakref.ref(tensor.untyped_storage()))
        self.most = max(self.most, len(self.references))
        return tensor

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.references)


class Model(nn.Module):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
        self.kept = kept

    def forward(self, x):
        return self.kept(self.kept(self.layers(x)).tanh())


def a_leaf(kept):
    w = nn.Parameter(torch.randn(4))
    return lambda s: kept((s * w).sin())


def a_part_of_a_graph(kept):
    v = nn.Parameter(torch.randn(4)).exp()
    return lambda s: kept((s * v).sin())


def in_place(kept):
    def step(s):
        s *= 0.9
        return kept(s.sin())

    return step


STEPS = [a_leaf, a_part_of_a_graph, in_place, Model]


@ALL
@pytest.mark.parametrize("make", STEPS)
def test_a_loop_whose_backward_pass_never_comes(make, schedule) -> None:
    kept = Kept()
    step, x = make(kept), torch.randn(3, 4, requires_grad=True)
    y, checkpoints = remat.checkpointed_loop(step, x, 30, 3, schedule=schedule)
    assert kept.alive() > 0
    del y, checkpoints
    assert kept.alive() == 0


@ALL
@pytest.mark.parametrize("make", STEPS)
def test_after_a_backward_pass_nothing_stays(make, schedule) -> None:
    kept = Kept()
    step, x = make(kept), torch.randn(3, 4, requires_grad=True)
    y = Remat(3, schedule=schedule).loop(step, x, 30)
    y.sum().backward()
    assert kept.alive() <= 1  # the final state
    del y
    assert kept.alive() == 0


@pytest.mark.parametrize("make", STEPS)
def test_whiles_and_scans_are_freed_as_well(make) -> None:
    kept = Kept()
    step, x = make(kept), torch.randn(3, 4, requires_grad=True)
    count = iter(range(100))
    y = Remat(3).until(lambda s: next(count) < 30, step, x)
    z, zs = Remat(3).scan(lambda s, x: (step(s) * x, s), x, torch.ones(30))
    assert kept.alive() > 0
    del y, z, zs
    assert kept.alive() == 0


@ALL
def test_after_an_error_nothing_stays(schedule) -> None:
    kept, x = Kept(), torch.randn(3, 4, requires_grad=True)

    def step(s):
        h, k = s
        if k == 7:
            raise ValueError("on purpose")
        return kept(h.sin()), k + 1

    with pytest.raises(ValueError, match="on purpose"):
        Remat(3, schedule=schedule).loop(step, (x, 0), 30)
    assert kept.alive() == 0


@pytest.mark.parametrize("make", STEPS)
@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])
def test_only_so_many_states_are_there_at_a_time(make, schedule) -> None:
    torch.manual_seed(0)  # (A state that dies out would not show that the step repeats itself.)
    kept = Kept()
    step, x = make(kept), torch.randn(3, 4, requires_grad=True)
    Remat(6, schedule=schedule).loop(step, x, 120).sum().backward()
    assert 6 <= kept.most <= 6 + 8


def plain_body(w):
    return lambda s: torch.tanh(s * w)


def tree_body(w):
    def step(s):
        return {"h": F.dropout(s["h"] * w, 0.1), "k": s["k"] + 1}

    return step


def measure(body, state, steps: int) -> list[int]:
    """Count all objects, and all tensors, at the end of the way ahead and after the way back."""
    w = nn.Parameter(torch.ones(4))
    y = Remat(5, schedule="revolve").loop(body(w), state, steps)
    ahead = len(gc.get_objects()), sum(isinstance(o, Tensor) for o in gc.get_objects())
    loss = (y["h"] if isinstance(y, dict) else y).sum()
    loss.backward()
    back = len(gc.get_objects()), sum(isinstance(o, Tensor) for o in gc.get_objects())
    return [*ahead, *back]


@pytest.mark.parametrize("body", [plain_body, tree_body])
def test_nothing_per_step_stays_behind(body) -> None:
    state = torch.ones(4) if body is plain_body else {"h": torch.ones(4), "k": 0}
    measure(body, state, 50)  # what is made once
    short, long = measure(body, state, 200), measure(body, state, 2000)
    for one, other in zip(short, long, strict=True):
        assert abs(one - other) < 60


def test_no_tensor_per_step_on_the_way() -> None:
    counts: dict[int, int] = {}
    x = torch.ones(4, requires_grad=True)

    def step(steps, s):
        h, k = s
        if k % 50 == 0:
            found = sum(isinstance(o, Tensor) for o in gc.get_objects())
            counts[steps] = max(counts.get(steps, 0), found)
        return h.sin(), k + 1

    for steps in (200, 2000):
        h, _ = Remat(5, schedule="revolve").loop(partial(step, steps), (x, 0), steps)
        h.sum().backward()
    assert abs(counts[200] - counts[2000]) < 10


def test_many_steps() -> None:
    """(A million of them take minutes: too long for here.)"""
    w = nn.Parameter(torch.tensor(1.0 - 1e-6))
    y, _ = remat.checkpointed_loop(lambda s: s * w, torch.tensor(1.0), 5_000, 100)
    y.backward()
    assert w.grad.item() == pytest.approx(5_000 * y.item(), rel=1e-2)


# -- telling ---------------------------------------------------------------------------------------


@ALL
def test_a_profiler_is_told_of_steps_that_run_again(schedule) -> None:
    calls = []
    x = torch.ones(1000, requires_grad=True)

    def step(s):
        calls.append(1)
        return torch.tanh(s).exp().sin()

    with remat.CheckpointProfiler() as profiler:
        y, _ = remat.checkpointed_loop(step, x, 100, 5, schedule=schedule)
        y.sum().backward()
        del y
    assert profiler.checkpoint_count() == 1
    (region,) = profiler.regions
    assert region.name == "checkpointed_loop"
    assert region.ops == len(calls) - 100
    plain = 100 * 3 * x.nbytes
    if schedule == "all":
        assert profiler.memory_saved() <= 0.1 * plain
    else:
        assert 0.7 * plain < profiler.memory_saved() < plain
        assert profiler.recompute_count() > 0
        assert profiler.recompute_seconds() > 0


def test_a_profiler_and_a_while() -> None:
    x = torch.ones(1000, requires_grad=True)
    with remat.CheckpointProfiler() as profiler:
        y, _ = remat.checkpointed_while(
            lambda s: s[1] < 50, lambda s: (s[0].tanh().exp().sin(), s[1] + 1), (x, 0), 5
        )
        y[0].sum().backward()
        del y
    assert 0.5 * 150 * x.nbytes < profiler.memory_saved() < 150 * x.nbytes


def test_under_a_profiler_gradients_are_the_same() -> None:
    w = nn.Parameter(torch.ones(4))
    norm = nn.BatchNorm1d(4)
    x = torch.randn(3, 4)

    def gradient():
        norm.reset_running_stats()
        torch.manual_seed(0)
        y = Remat().loop(lambda s: F.dropout(norm(s) * w), x, 9)
        return *torch.autograd.grad(y.sum(), w), norm.running_mean.clone()

    expected = gradient()
    with remat.CheckpointProfiler():
        assert all(map(torch.equal, gradient(), expected))


def test_whoever_has_the_checkpoints_does_not_hold_them() -> None:
    kept = Kept()
    w = nn.Parameter(torch.linspace(0.5, 1.5, 4))
    final, checkpoints = remat.checkpointed_loop(
        lambda s: kept((s * w).sin()), torch.ones(3, 4), 60, 6, schedule="revolve"
    )
    positions = list(checkpoints)
    assert len(positions) == len(checkpoints) == 6
    assert checkpoints[positions[0]].shape == (3, 4)
    final.sum().backward()
    del final
    assert kept.alive() == 0
    assert list(checkpoints) == positions
    with pytest.raises(remat.StoreError, match=f"before step {positions[0]}"):
        checkpoints[positions[0]]
