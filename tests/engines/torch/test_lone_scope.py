"""A scope around a whole model costs time and saves nothing: it warns, and others do not."""

from __future__ import annotations

import uuid
import warnings

import pytest
import torch

import remat
from remat.engines.torch.recording.threads import recorder_of_this_thread

WIDTH = 64


class Model(torch.nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Tanh())
            for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def data(rows: int = 1024):
    return torch.randn(rows, WIDTH)


@pytest.fixture(autouse=True)
def _a_new_iteration() -> None:
    """Whatever ran before has had its backward pass."""
    recorder_of_this_thread().end_iteration()


@pytest.fixture
def name() -> str:
    return f"model {uuid.uuid4()}"  # a name is warned of once


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def loss_of(y):
    return torch.nn.functional.cross_entropy(y, y.detach().argmax(1))


def train(name: str, steps: int = 1, **options) -> None:
    model = Model()
    for _ in range(steps):
        with remat.CheckpointScope(name, **options):
            y = model(data())
        loss_of(y).backward()


def test_a_scope_around_a_whole_model_warns_once_with_the_remedy(name) -> None:
    with pytest.warns(remat.RematWarning) as caught:
        train(name, steps=3)
    assert len(caught) == 1
    message = str(caught[0].message)
    for words in (repr(name), "saves no memory", "MB", "for each block", "remat.checkpoint"):
        assert words in message
    assert caught[0].filename == __file__


def test_also_if_backward_runs_inside(name) -> None:
    model = Model()
    with pytest.warns(remat.RematWarning, match="saves no memory"), remat.CheckpointScope(name):
        loss_of(model(data())).backward()


def test_also_if_only_part_of_it_is_dropped(name) -> None:
    with pytest.warns(remat.RematWarning, match="saves no memory"):
        train(name, policy=remat.policies.save_matmuls)


def test_what_it_says_is_true(name) -> None:
    """The profiler sees no lower peak, and says so as well."""
    profiler = remat.CheckpointProfiler()
    with pytest.warns(remat.RematWarning, match="saves no memory"), profiler:
        train(name)
    plain = profiler._accounting.plain_peak
    assert profiler.memory_saved() <= 0.02 * plain
    assert "Checkpoint its parts instead" in profiler.report()


@pytest.mark.usefixtures("no_warning")
class TestNoWarning:
    def test_for_a_scope_for_each_block(self, name) -> None:
        model, y = Model(), data()
        for number, block in enumerate(model.blocks):
            with remat.CheckpointScope(f"{name} {number}"):
                y = block(y)
        loss_of(y).backward()

    def test_if_other_regions_come_before(self, name) -> None:
        model = Model()
        x = remat.checkpoint(Model(), data())
        with remat.CheckpointScope(name):
            y = model(x)
        loss_of(y).backward()

    def test_if_other_regions_come_after(self, name) -> None:
        model = Model()
        with remat.CheckpointScope(name):
            y = model(data())
        loss_of(remat.checkpoint(Model(), y)).backward()

    def test_if_much_is_computed_after(self, name) -> None:
        model = Model()
        with remat.CheckpointScope(name):
            y = model(data())
        loss_of(Model()(y)).backward()

    def test_if_it_is_entered_twice_before_backward(self, name) -> None:
        model, scope, losses = Model(), remat.CheckpointScope(name), []
        for _ in range(2):
            with scope:
                y = model(data())
            losses.append(loss_of(y))
        sum(losses).backward()

    def test_if_regions_are_inside(self, name) -> None:
        model, y = Model(), data()
        with remat.CheckpointScope(name):
            for block in model.blocks:
                y = remat.checkpoint(block, y)
        loss_of(y).backward()

    def test_if_it_only_accounts(self, name) -> None:
        model = Model()
        with remat.CheckpointScope(name, use_recomputation=False):
            y = remat.checkpoint(model(data()))
        loss_of(y).backward()

    def test_for_a_toy(self, name) -> None:
        model = Model()
        with remat.CheckpointScope(name):
            y = model(data(8))
        loss_of(y).backward()

    def test_without_backward(self, name) -> None:
        model = Model()
        with remat.CheckpointScope(name):
            model(data())
        with torch.no_grad(), remat.CheckpointScope(name):
            model(data())
