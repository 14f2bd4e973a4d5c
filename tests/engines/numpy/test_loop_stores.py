"""Loops on NumPy whose states rest in a store; the oracle is the same loop in memory."""

from __future__ import annotations

import numpy as np
import pytest

import remat
from remat.stores import DiskStore, MemoryStore, ReducedPrecisionStore

from ...stores.oracles import open_files

random = np.random.default_rng(0)
W = random.normal(size=(16, 16)) / 4
START = random.normal(size=(8, 16))


def loss(weight, *, steps=60, checkpoints=5, **options):
    final, _ = remat.checkpointed_loop(
        lambda s: np.tanh(s @ weight), START, steps, checkpoints, **options
    )
    return np.sum(final**2)


def plain(weight, steps=60):
    state = START
    for _ in range(steps):
        state = np.tanh(state @ weight)
    return np.sum(state**2)


EXPECTED = remat.grad(plain)(W)


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])
@pytest.mark.parametrize("store", ["memory", "disk", MemoryStore()])
def test_exact_stores_change_nothing(store, schedule) -> None:
    found = remat.grad(lambda w: loss(w, store=store, schedule=schedule))(W)
    assert np.array_equal(found, EXPECTED)


@pytest.mark.parametrize("steps", [60, 61])
def test_on_a_fast_disk_no_step_runs_more_than_twice(tmp_path, monkeypatch, steps) -> None:
    monkeypatch.setattr(DiskStore, "measure", lambda *_: (1e-9, 1e-9))
    calls = []

    def total(weight):
        def step(s):
            calls.append(None)
            return np.tanh(s @ weight)

        final, _ = remat.checkpointed_loop(step, START, steps, 30, store=DiskStore(tmp_path))
        return np.sum(final**2)

    found = remat.grad(total)(W)
    assert np.array_equal(found, remat.grad(lambda w: plain(w, steps))(W))
    assert steps < len(calls) < 2 * steps
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("schedule", ["auto", "revolve", "uniform"])
@pytest.mark.parametrize(("store", "error"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_rounded_states_give_gradients_nearby(store, error, schedule) -> None:
    with remat.CheckpointProfiler() as profiler:
        found = remat.grad(lambda w: loss(w, store=store, schedule=schedule))(W)
    distance = np.max(np.abs(found - EXPECTED)) / np.max(np.abs(EXPECTED))
    assert 0 < distance < error
    # States lie between -1 and 1, so rounding to nearest is off by half of the last place at most.
    assert 0 < profiler.rounding_error() <= {"bfloat16": 2**-9, "float16": 2**-12}[store]
    assert "rounded" in profiler.report()


def test_a_scan_from_rounded_states_is_not_compared() -> None:
    def total(xs):
        _, ys = remat.checkpointed_scan(
            lambda s, x: (np.tanh(s @ W + x), s.sum()), START, xs, 4, store="float16"
        )
        return np.sum(ys**2)

    xs = random.normal(size=(40, 16))
    assert remat.grad(total)(xs).shape == xs.shape


@pytest.mark.parametrize("store", ["disk", "bfloat16"])
def test_whiles_use_the_store(store) -> None:
    def total(x):
        final, _ = remat.checkpointed_while(
            lambda s: np.max(s) > 0.01, lambda s: np.sin(s) * 0.9, x, 4, store=store
        )
        return np.sum(final)

    found = remat.grad(total)(np.ones(3))
    assert found.shape == (3,)
    if store == "disk":
        state = np.ones(3)
        slope = np.ones(3)
        while np.max(state) > 0.01:
            slope, state = slope * np.cos(state) * 0.9, np.sin(state) * 0.9
        np.testing.assert_allclose(found, slope, rtol=1e-13)


def test_nothing_stays_on_disk(tmp_path) -> None:
    store = DiskStore(tmp_path)
    remat.grad(lambda w: loss(w, store=store))(W)
    assert open_files(tmp_path) == []

    def broken(w):
        calls = [0]

        def step(s):
            calls[0] += 1
            if calls[0] == 40:
                raise ZeroDivisionError("in the middle")
            return np.tanh(s @ w)

        return np.sum(remat.checkpointed_loop(step, START, 60, 2, store=store)[0])

    with pytest.raises(ZeroDivisionError):
        remat.grad(broken)(W)
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == []


def test_a_directory_that_is_not_there_is_an_error_that_names_it(tmp_path) -> None:
    with pytest.raises(remat.StoreError, match="nowhere"):
        remat.grad(lambda w: loss(w, store=DiskStore(tmp_path / "nowhere")))(W)


def test_checkpoints_in_a_store_are_fetched_when_looked_at() -> None:
    seen = {}

    def total(w):
        final, checkpoints = remat.checkpointed_loop(
            lambda s: np.tanh(s @ w), START, 30, 3, schedule="uniform", store="disk"
        )
        seen["positions"], seen["checkpoints"] = list(checkpoints), checkpoints
        seen["shape"] = checkpoints[seen["positions"][0]].shape
        with pytest.raises(KeyError):
            checkpoints[1000]
        return np.sum(final)

    remat.grad(total)(W)
    assert seen["positions"] == [7, 14, 22]
    assert seen["shape"] == START.shape
    assert len(seen["checkpoints"]) == 3
    assert "7, 14, 22" in repr(seen["checkpoints"])
    with pytest.raises(remat.StoreError, match="before step 7"):
        seen["checkpoints"][7]


def test_tapes_cannot_rest_in_a_store() -> None:
    with pytest.raises(ValueError, match="tapes"):
        loss(W, schedule="all", store=ReducedPrecisionStore())


def test_an_unknown_store_is_an_error_that_names_the_choices() -> None:
    with pytest.raises(ValueError, match="float16"):
        loss(W, store="tape")
