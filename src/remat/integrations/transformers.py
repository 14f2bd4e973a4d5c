"""Hugging Face Transformers: `enable(model)`, and a callback for its `Trainer`."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, TypeVar

from torch import nn

import remat

from ..errors import RematWarning, UnsupportedError
from . import require
from .calling import CheckpointFunction, StepMeter

require("transformers", "5.0")
from transformers import PreTrainedModel, TrainerCallback  # noqa: E402

__all__ = ["RematCallback", "disable", "enable"]

M = TypeVar("M", bound=nn.Module)
_ENTRANCES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def enable(model: M, *, policy: Any = None, every: int = 1, preserve_rng_state: bool = True) -> M:
    """Checkpoint the layers of a model with remat. Return the model.

    Transformers itself says which layers; they call remat instead of torch's checkpoint. The
    model's own `activation_checkpointing_enable`, which `TrainingArguments(
    activation_checkpointing=True)` and PEFT's `prepare_model_for_kbit_training` call, would put
    torch's in its place: from now on it warns and leaves remat's. `disable(model)` undoes both.

    Args:
        model: A `PreTrainedModel`, or a model with one inside (PEFT).
        policy: What is kept inside of a layer, see `remat.policies`.
        every: Checkpoint every n-th layer only.
        preserve_rng_state: As for `remat.checkpoint`.
    """
    inner = pretrained_model_in(model)
    if not inner.supports_gradient_checkpointing:
        raise UnsupportedError(
            f"{type(inner).__name__} has no checkpointed layers of its own; use remat.apply(model)"
        )
    _set_function(inner, CheckpointFunction(policy, preserve_rng_state), every)
    for name in _ENTRANCES:
        inner.__dict__[name] = _KeepsRemat(name)
    return model


def disable(model: M) -> M:
    """Undo `enable`: no layer is checkpointed. Return the model."""
    inner = pretrained_model_in(model)
    for name in _ENTRANCES:
        if isinstance(inner.__dict__.get(name), _KeepsRemat):
            del inner.__dict__[name]
    inner._set_gradient_checkpointing(enable=False)
    return model


def pretrained_model_in(model: nn.Module) -> Any:
    """Return the model of Transformers that a model is, or has inside."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(
        f"model must have a transformers.PreTrainedModel inside, got {type(model).__name__}; for "
        "other models use remat.apply(model)"
    )


def _set_function(model: Any, function: CheckpointFunction, every: int) -> None:
    accepted = inspect.signature(model._set_gradient_checkpointing).parameters
    options = {"enable": True, "gradient_checkpointing_func": function}
    if every != 1:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of at least 1, got {every!r}")
        options["every_n_layers"] = every
    missing = [name for name in options if name not in accepted]
    if missing:
        raise UnsupportedError(
            f"{type(model).__name__}._set_gradient_checkpointing takes no {', '.join(missing)}; "
            "use a newer version of transformers, or remat.apply(model, every=...)"
        )
    model._set_gradient_checkpointing(**options)


class _KeepsRemat:
    """Stands in front of what would replace remat's checkpointing by torch's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            f"{self.name}() would replace remat's checkpointing by torch's; it was left as it is. "
            "Take activation_checkpointing (gradient_checkpointing) out of TrainingArguments and "
            "pass use_gradient_checkpointing=False to PEFT, or call "
            "remat.integrations.transformers.disable(model) first",
            RematWarning,
            stacklevel=2,
        )


class _Found:
    """How a model was checkpointed when it was found."""

    _names = ("gradient_checkpointing", "_gradient_checkpointing_func", *_ENTRANCES)

    def __init__(self, model: nn.Module) -> None:
        self._config = pretrained_model_in(model).config
        self._use_cache = getattr(self._config, "use_cache", None)
        self._model = model
        self._forward = model.__dict__.get("forward")
        self._modules = [
            (module, {name: module.__dict__[name] for name in self._names if name in vars(module)})
            for module in model.modules()
        ]

    def switch_off(self) -> None:
        """Leave all to a plan: no layer is checkpointed by Transformers, and no cache is made."""
        for module, _ in self._modules:
            if getattr(module, "gradient_checkpointing", False):
                module.__dict__["gradient_checkpointing"] = False
        # It would hold keys and values of all layers until the end of the pass.
        if self._use_cache:
            self._config.use_cache = False

    def restore(self) -> None:
        """Make it so again."""
        for module, values in self._modules:
            for name in self._names:
                module.__dict__.pop(name, None)
            module.__dict__.update(values)
        if self._use_cache:
            self._config.use_cache = True
        if self._forward is None:
            remat.auto_checkpoint(self._model, None)
        else:
            self._model.__dict__["forward"] = self._forward


class RematCallback(TrainerCallback):
    """Checkpoints the model of a `Trainer` while it trains; logs peak memory and recompute time.

    With `memory_budget` a plan chooses what is recomputed, as `remat.auto_checkpoint` does;
    otherwise all layers are checkpointed, as `enable` does. When training ends the model is as it
    was before. Logged are `remat/peak_bytes`, `remat/saved_bytes` and `remat/recompute_seconds`,
    with a budget also `remat/budget_bytes` and otherwise `remat/regions`: of the last pass under a
    budget, or of the first step after each time that the trainer logs.

    Transformers tells no callback that training has failed: `undo()` does then what the end of
    training would have done, and so does the next call of `train()`.

    Args:
        memory_budget: As for `remat.auto_checkpoint`.
        policy: As for `enable`.
        every: As for `enable`.
    """

    def __init__(
        self,
        memory_budget: int | float | str | None = None,
        *,
        policy: Any = None,
        every: int = 1,
    ) -> None:
        if memory_budget is not None and (policy is not None or every != 1):
            raise ValueError("give memory_budget, or policy and every, not both")
        self.memory_budget = memory_budget
        self.policy = policy
        self.every = every
        self._meter = StepMeter()
        self._found: _Found | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put checkpointing into the model."""
        self.undo()  # what a training that has failed has left
        model = kwargs["model"]
        if args.activation_checkpointing:
            warnings.warn(
                "TrainingArguments(activation_checkpointing=True) asks for torch's checkpointing; "
                "RematCallback puts remat's in its place. Take it out of the arguments",
                RematWarning,
                stacklevel=2,
            )
        found = _Found(model)
        if self.memory_budget is None:
            enable(model, policy=self.policy, every=self.every)
        else:
            remat.apply(model, memory_budget=self.memory_budget)
            found.switch_off()
        self._found = found

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take it out again."""
        self.undo()

    def undo(self) -> None:
        """Leave the model as it was before it was trained, and measure no longer."""
        self._meter.end()
        if self._found is not None:
            self._found.restore()
            self._found = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure a step from time to time."""
        if self.memory_budget is None:
            self._meter.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the measurement."""
        self._meter.end()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add what was measured to the log."""
        numbers = self._meter.read()
        if self.memory_budget is not None:
            budget = getattr(kwargs["model"].forward, "budget", None)
            numbers = StepMeter.numbers_of(getattr(budget, "last", None))
        if "loss" in (kwargs.get("logs") or {}):
            kwargs["logs"].update(numbers)
            state.log_history[-1].update(numbers)
