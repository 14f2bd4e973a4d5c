"""Lightning: a callback that checkpoints a `LightningModule` while it is fitted."""

from __future__ import annotations

from typing import Any

import remat

from . import MissingPackageError, require
from .calling import StepMeter

try:
    require("lightning", "2.0")
    from lightning.pytorch import Callback
except MissingPackageError:
    try:
        require("pytorch_lightning", "2.0")
    except MissingPackageError as error:
        raise MissingPackageError(str(error).replace("pytorch_lightning", "lightning")) from error
    from pytorch_lightning import Callback

__all__ = ["RematCallback"]


class RematCallback(Callback):
    """Checkpoints a model while it is fitted, and writes what that took to the logger.

    With `memory_budget` every training batch, forward and backward, keeps to a budget: a plan
    chooses what is recomputed (`remat.CheckpointManager`). Otherwise layers are checkpointed, as
    `remat.apply` does. When fitting ends, or fails, the model is as it was before.

    Logged are `remat/peak_bytes`, `remat/saved_bytes` and `remat/recompute_seconds`, with a budget
    also `remat/budget_bytes` and otherwise `remat/regions`: of the last pass under a budget, or of
    the first step after each time that the trainer logs.

    Args:
        memory_budget: As for `remat.CheckpointManager`.
        layers: As for `remat.apply`; paths begin at the `LightningModule`.
        policy: As for `remat.apply`.
        every: As for `remat.apply`.
    """

    def __init__(
        self,
        memory_budget: int | float | str | None = None,
        *,
        layers: Any = None,
        policy: Any = None,
        every: int = 1,
    ) -> None:
        if memory_budget is not None and not (layers is None and policy is None and every == 1):
            raise ValueError("give memory_budget, or layers, policy and every, not both")
        self.memory_budget = memory_budget
        self._options = {"layers": layers, "policy": policy, "every": every}
        self._meter = StepMeter()
        self._manager: Any = None
        self._is_inside = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put checkpointing into the model; it is complete by now (`configure_model` has run)."""
        if self.memory_budget is None:
            remat.apply(pl_module, **self._options)
        else:
            self._manager = remat.CheckpointManager(memory_budget=self.memory_budget)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin a pass."""
        if self._manager is not None:
            self._manager.__enter__()
            self._is_inside = True
        else:
            self._meter.begin()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a pass, and log what it took, if it is time for that."""
        self._leave(None)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def _log(self, trainer: Any) -> None:
        manager = self._manager
        numbers = self._meter.read() if manager is None else StepMeter.numbers_of(manager.last_pass)
        for logger in trainer.loggers if numbers else ():
            logger.log_metrics(numbers, step=trainer.global_step)

    def report(self) -> str:
        """Return a table of the last step that was measured."""
        return self._meter.report() if self._manager is None else str(self._manager.report())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Take checkpointing out of the model."""
        self._undo(pl_module, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave nothing switched on."""
        self._undo(pl_module, exception)

    def _undo(self, pl_module: Any, error: BaseException | None) -> None:
        self._leave(error)
        if self._manager is None:
            remat.remove(pl_module)

    def _leave(self, error: BaseException | None) -> None:
        self._meter.end()
        if self._is_inside:
            self._is_inside = False
            self._manager.__exit__(type(error) if error else None, error, None)
