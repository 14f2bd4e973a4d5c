"""States of loops in stores: rounded, on disk, in both tiers; errors of stores are told."""

from __future__ import annotations

import errno
import gc
import os
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat import DiskStore, ReducedPrecisionStore, StoreError
from remat.schedules import Staged
from remat.stores.scratch_file import ScratchFile

from ....stores.oracles import open_files
from .oracles import Plain, Remat, note_schedules, same
from .test_run import rnn, rnn_inputs

FIXED = pytest.mark.parametrize("schedule", ["revolve", "uniform"])
STORING = pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])


def left(directory) -> list[str]:
    """The files in the directory, and those without a name that are open."""
    return os.listdir(directory) + open_files(directory)


# -- on disk ---------------------------------------------------------------------------------------


@STORING
@pytest.mark.parametrize("slots", [0, 1, 4])
@pytest.mark.parametrize("steps", [0, 1, 2, 40])
def test_gradients_by_way_of_the_disk(tmp_path, schedule, slots, steps) -> None:
    run = Remat(slots, schedule=schedule, store=DiskStore(tmp_path))
    same(partial(rnn, steps=steps), rnn_inputs, run)
    assert left(tmp_path) == []


@STORING
def test_all_kinds_of_states_by_way_of_the_disk(tmp_path, schedule) -> None:
    def program(run, x, linear):
        def step(s):
            h, k, flags = s["h"], s["k"], s["flags"]
            h = F.dropout(torch.tanh(linear(h.T).T), 0.2)
            return {"h": h.flip(0), "k": k + 1, "flags": ~flags, "same": h, "none": None, "w": 0.5}

        start = {
            "h": x,
            "k": 0,
            "flags": torch.tensor([True, False]),
            "same": x,
            "none": None,
            "w": 1.0,
        }
        return run.loop(step, start, 20)

    same(
        program,
        lambda: (torch.randn(4, 3).requires_grad_(), nn.Linear(4, 4)),
        Remat(3, schedule=schedule, store=DiskStore(tmp_path)),
    )


@STORING
def test_scans_and_buffers_by_way_of_the_disk(tmp_path, schedule) -> None:
    def program(run, x, xs, norm):
        return run.scan(lambda s, x: (norm(s).sin() * x, s.sum()), x, xs)

    def inputs():
        return (
            torch.randn(5, 3).requires_grad_(),
            torch.randn(20).requires_grad_(),
            nn.BatchNorm1d(3),
        )

    same(program, inputs, Remat(3, schedule=schedule, store=DiskStore(tmp_path)))


@pytest.mark.parametrize("store", ["disk", "tmp"])
def test_a_while_by_way_of_the_disk(tmp_path, store) -> None:
    def program(run, x, w):
        return run.until(lambda s: torch.rand(()) < 0.95, lambda s: F.dropout(s.sin() * w, 0.1), x)

    same(
        program,
        lambda: (torch.randn(8).requires_grad_(), nn.Parameter(torch.tensor(1.1))),
        Remat(3, store="disk" if store == "disk" else DiskStore(tmp_path)),
    )
    assert left(tmp_path) == []


def test_two_ways_back_by_way_of_the_disk(tmp_path) -> None:
    given = rnn_inputs()
    y = rnn(Remat(2, schedule="revolve", store=DiskStore(tmp_path)), *given)
    one = torch.autograd.grad(y.sum(), given, retain_graph=True)
    two = torch.autograd.grad(y.sum(), given)
    expected = torch.autograd.grad(rnn(Plain(), *given).sum(), given)
    assert all(map(torch.equal, one, expected))
    assert all(map(torch.equal, two, expected))
    assert left(tmp_path) == []


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state):
        self.calls += 1
        return state.sin() * 1.01


@pytest.mark.parametrize(("steps", "slots"), [(60, 0), (60, 2), (200, 3)])
def test_two_tiers_run_as_often_as_predicted(tmp_path, monkeypatch, steps, slots) -> None:
    chosen = note_schedules(monkeypatch)
    step, x = Counting(), torch.ones(50, requires_grad=True)
    y, _ = remat.checkpointed_loop(step, x, steps, slots, store=DiskStore(tmp_path))
    y.sum().backward()
    (schedule,) = chosen
    assert step.calls == schedule.evaluations


@pytest.fixture
def fast_disk(monkeypatch):
    """A disk that takes no time, as far as plans know."""
    monkeypatch.setattr(DiskStore, "measure", lambda *_: (1e-9, 1e-9))


@pytest.mark.parametrize("slots", [3, 7])
@pytest.mark.parametrize("steps", [30, 41])
def test_on_a_fast_disk_no_step_runs_more_than_twice(
    tmp_path, monkeypatch, fast_disk, steps, slots
) -> None:
    chosen = note_schedules(monkeypatch)
    step, x = Counting(), torch.randn(50, requires_grad=True)
    y, _ = remat.checkpointed_loop(step, x, steps, slots, store=DiskStore(tmp_path))
    y.square().sum().backward()
    (schedule,) = chosen
    assert isinstance(schedule, Staged)
    assert 1 < schedule.part == schedule.block <= slots
    assert step.calls == 2 * steps - schedule.block
    z = x.detach().requires_grad_()
    Plain().loop(Counting(), z, steps).square().sum().backward()
    assert torch.equal(x.grad, z.grad)
    assert left(tmp_path) == []


def test_tapes_between_states_on_disk(tmp_path, monkeypatch, fast_disk) -> None:
    """Buffers, random numbers, inputs and outputs, over runs of tapes that start on disk."""
    chosen = note_schedules(monkeypatch)

    def program(run, x, xs, norm, w):
        def step(s, x):
            h, k = s
            h = F.dropout(norm(h) * w, 0.2) + x
            return (h.sin_(), k + 1), h.sum()

        return run.scan(step, (x, torch.tensor(0)), xs)

    def inputs():
        return (
            torch.randn(5, 3).requires_grad_(),
            torch.randn(29).requires_grad_(),
            nn.BatchNorm1d(3),
            torch.randn(3).requires_grad_(),
        )

    same(program, inputs, Remat(12, store=DiskStore(tmp_path)))
    assert isinstance(chosen[-1], Staged)
    assert chosen[-1].block > 1
    assert left(tmp_path) == []


def test_states_are_on_disk_and_may_be_looked_at(tmp_path) -> None:
    x = torch.ones(50, requires_grad=True)
    y, checkpoints = remat.checkpointed_loop(
        torch.sin, x, 30, 5, schedule="uniform", store=DiskStore(tmp_path)
    )
    assert len(left(tmp_path)) == 1
    for position, state in checkpoints.items():
        assert torch.equal(state, Plain().loop(torch.sin, x, position))
    y.sum().backward()
    assert left(tmp_path) == []
    with pytest.raises(StoreError, match="no longer held"):
        checkpoints[min(checkpoints)]


def test_the_file_goes_when_the_backward_pass_never_comes(tmp_path) -> None:
    gc.disable()
    try:
        x = torch.ones(50, requires_grad=True)
        y = Remat(5, schedule="uniform", store=DiskStore(tmp_path)).loop(torch.sin, x, 30)
        assert len(left(tmp_path)) == 1
        del y
        assert left(tmp_path) == []
    finally:
        gc.enable()


@pytest.mark.parametrize("at", [8, 35])
def test_the_file_goes_when_a_step_fails(tmp_path, at) -> None:
    calls = []

    def step(s):
        calls.append(1)
        if len(calls) == at:
            raise ValueError("on purpose")
        return s.sin()

    x = torch.ones(50, requires_grad=True)
    with pytest.raises(ValueError, match="on purpose"):
        Remat(3, schedule="uniform", store=DiskStore(tmp_path)).loop(step, x, 30).sum().backward()
    assert left(tmp_path) == []


# -- failures --------------------------------------------------------------------------------------


@STORING
def test_a_directory_that_does_not_exist(tmp_path, schedule) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        rnn(Remat(2, schedule=schedule, store=DiskStore(tmp_path / "nowhere")), *rnn_inputs())


@STORING
def test_a_disk_that_is_full(tmp_path, monkeypatch, schedule) -> None:
    def write(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ScratchFile, "write_some", write)
    x = torch.ones(50, requires_grad=True)
    with pytest.raises(StoreError, match="disk is full"):
        Remat(3, schedule=schedule, store=DiskStore(tmp_path)).loop(
            torch.sin, x, 30
        ).sum().backward()
    assert x.grad is None
    monkeypatch.undo()
    assert left(tmp_path) == []


@FIXED
def test_a_file_that_was_damaged(tmp_path, schedule) -> None:
    x = torch.ones(5000, requires_grad=True)
    y, checkpoints = remat.checkpointed_loop(
        torch.sin, x, 60, 5, schedule=schedule, store=DiskStore(tmp_path)
    )
    list(checkpoints.values())  # until all of them are written
    (path,) = open_files(tmp_path)
    with path.open("r+b") as file:
        for start in range(1000, path.stat().st_size, x.nbytes):
            file.seek(start)
            file.write(b"\xff" * 64)
    with pytest.raises(StoreError):
        y.sum().backward()
    assert x.grad is None


# -- rounded ---------------------------------------------------------------------------------------


@STORING
@pytest.mark.parametrize(("store", "error"), [("bfloat16", 0.04), ("float16", 0.005)])
def test_rounded_states_give_gradients_that_are_close(schedule, store, error) -> None:
    torch.manual_seed(0)
    given = rnn_inputs(rows=20)
    found = torch.autograd.grad(
        rnn(Remat(3, schedule=schedule, store=store), *given, 40).sum(), given
    )
    expected = torch.autograd.grad(rnn(Plain(), *given, 40).sum(), given)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= error * other.norm()
    if schedule != "auto":
        assert not torch.equal(found[1], expected[1])


@FIXED
def test_rounded_states_take_half_the_bytes(schedule, monkeypatch) -> None:
    sizes = []
    put = remat.stores.reduced.ReducedPrecisionCheckpoints.put

    def watched(self, key, leaves):
        put(self, key, leaves)
        sizes.append((self.nbytes, len(list(self))))

    monkeypatch.setattr(remat.stores.reduced.ReducedPrecisionCheckpoints, "put", watched)
    x = torch.ones(500, requires_grad=True)
    store = ReducedPrecisionStore()
    Remat(5, schedule=schedule, store=store).loop(torch.sin, x, 50).sum().backward()
    assert all(nbytes == count * x.nbytes // 2 for nbytes, count in sizes)
    assert max(count for _, count in sizes) == 5


@STORING
def test_a_value_that_float16_cannot_hold(schedule) -> None:
    x = torch.full((4,), 1e4, requires_grad=True)
    with pytest.raises(StoreError, match="float16"):
        Remat(3, schedule=schedule, store="float16").loop(lambda s: s * 1.5, x, 60).sum().backward()
    assert x.grad is None


def test_random_numbers_and_buffers_with_rounded_states() -> None:
    torch.manual_seed(0)
    norm, x = nn.BatchNorm1d(4), torch.randn(6, 4, requires_grad=True)

    def run(api):
        norm.reset_running_stats()
        torch.manual_seed(1)
        y = api.loop(lambda s: F.dropout(norm(s).sin(), 0.2), x, 20)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), norm.running_mean.clone(), torch.rand(1), gradient

    found = run(Remat(3, schedule="revolve", store="bfloat16"))
    expected = run(Plain())
    assert all(map(torch.equal, found[:3], expected[:3]))


def test_all_holds_no_states() -> None:
    with pytest.raises(ValueError, match='schedule="all"'):
        Remat(store="disk", schedule="all").loop(torch.sin, torch.ones(3, requires_grad=True), 3)
