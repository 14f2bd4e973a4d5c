"""Lightning: a callback that checkpoints while a module is fitted."""

from __future__ import annotations

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import remat
from remat.integrations.lightning import RematCallback

from .test_accelerate import Block, Model
from .training import STEPS


class Module(pl.LightningModule):
    """Its training step does not call its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.losses = []
        self.fails = False

    def training_step(self, batch, _):
        loss = self.model(batch).square().mean()
        self.losses.append(loss.detach().clone())
        if self.fails:
            raise KeyError("the program fails")
        return loss

    def validation_step(self, batch, _):
        self.model(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LateModule(Module):
    """Makes its layers in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Model()


class Kept(Logger):
    """Keeps what is logged."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


def fit(module, *callbacks, logger=False, **options):
    torch.manual_seed(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=logger,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=2,
        num_sanity_val_steps=1,
        **options,
    )
    data = torch.utils.data.DataLoader(torch.linspace(-1, 1, STEPS * 16).view(-1, 4), 4)
    with remat.CheckpointProfiler() as profiler:
        trainer.fit(module, data, data)
    return [*module.losses, *module.state_dict().values()], profiler


@pytest.mark.parametrize("kind", [Module, LateModule])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}])
def test_trains_as_without_remat(kind, options) -> None:
    expected, none = fit(kind(), **options)
    module = kind()
    found, profiler = fit(module, RematCallback(), **options)
    assert (none.checkpoint_count(), profiler.checkpoint_count()) == (0, STEPS * 3)
    assert profiler.recompute_count() == STEPS * 3
    assert all(map(torch.equal, found, expected))
    assert remat.applied(module) == []  # it is as it was


def test_layers_are_chosen() -> None:
    _, profiler = fit(Module(), RematCallback(layers=Block, every=2))
    assert profiler.checkpoint_count() == STEPS * 2


def test_the_logger_gets_the_report() -> None:
    logger = Kept()
    callback = RematCallback()
    fit(Module(), callback, logger=logger)
    found = [(step, m) for step, m in logger.metrics if "remat/peak_bytes" in m]
    assert [step for step, _ in found] == [2, 4]
    for _, metrics in found:
        assert metrics["remat/regions"] == 3
        assert metrics["remat/recompute_seconds"] > 0
        assert metrics["remat/peak_bytes"] > 0
    assert "model.1" in callback.report()


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}])
def test_a_budget(options) -> None:
    expected, _ = fit(Module(), **options)
    callback, logger = RematCallback(memory_budget=0.7), Kept()
    found, _ = fit(Module(), callback, logger=logger, **options)
    assert all(map(torch.equal, found, expected))
    metrics = [m for _, m in logger.metrics if "remat/budget_bytes" in m]
    assert len(metrics) == 2
    for found in metrics:
        assert 0 < found["remat/peak_bytes"] <= found["remat/budget_bytes"]
        assert found["remat/recompute_seconds"] > 0
    assert "budget" in callback.report()


@pytest.mark.parametrize("make", [RematCallback, lambda: RematCallback(0.8)])
def test_after_an_error_nothing_is_left(make) -> None:
    module = Module()
    module.fails = True
    with pytest.raises(KeyError, match="the program fails"):
        fit(module, make())
    assert remat.applied(module) == []
    assert _get_current_dispatch_mode_stack() == []
    module.fails = False
    module.losses.clear()
    fit(module, make())


def test_a_module_without_blocks() -> None:
    module = Module()
    module.model = torch.nn.Linear(4, 1)
    with pytest.raises(remat.UnsupportedError, match="no repeated blocks"):
        fit(module, RematCallback())


def test_a_callback_takes_one_of_two() -> None:
    with pytest.raises(ValueError, match="not both"):
        RematCallback("8GB", layers=Block)


def test_a_budget_leaves_layers_that_are_checkpointed_already() -> None:
    module = Module()
    remat.apply(module, Block)
    fit(module, RematCallback("1MB"))
    assert len(remat.applied(module)) == 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_of_a_callback(duplicate) -> None:
    """Strategies that spawn processes pickle callbacks."""
    expected, _ = fit(Module())
    for callback in (RematCallback(), RematCallback(0.9)):
        found, _ = fit(Module(), duplicate(callback))
        assert all(map(torch.equal, found, expected))
