"""Adds checkpointing to a model in place, without editing its code, and removes it again."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, TypeVar

from ..engines.locate import ModuleFunctions, engine_of_module
from ..schedules.check import options_by_name, whole_number
from ..segments import SegmentOptions
from .budgets import auto_checkpoint
from .segments import check_option, check_policy, run_segment
from .wrapped import refuse_module_class

__all__ = ["applied", "apply", "remove"]

M = TypeVar("M")
_log = logging.getLogger("remat")


@options_by_name
def apply(
    model: M,
    layers: Any = None,
    *,
    policy: Any = None,
    every: int = 1,
    memory_budget: int | float | str | None = None,
    preserve_rng_state: bool = True,
    verbose: bool = False,
) -> M:
    """Checkpoint layers of a model in place, without editing its code. Return the model.

    Each chosen layer is a checkpointed region from now on, as if its calls were written as
    `remat.checkpoint(layer, ...)`. The model is the same object, with the same classes, hooks,
    `state_dict` keys and `named_modules`; copies and pickles of it are checkpointed, too.
    `remat.remove(model)` undoes it. A layer that is chosen again gets the new options, one that
    `every` leaves out is not checkpointed any more, and all others stay as they are.

    Args:
        model: An `nn.Module`.
        layers: Which modules: a class, the name of one, a path pattern such as "model.layers.*"
            (a `*` stands for one name), a function that is given a module and says whether, or a
            list of these. None finds the repeated blocks: modules of one class, more than one, in
            the outermost `ModuleList` or `Sequential` that has such; if the blocks of a list are
            stages of unlike shapes, the repeated blocks inside of them.
        policy: What is kept inside of a layer, see `remat.policies`; by default nothing.
        every: Checkpoint only every n-th of the layers that have the same parent: 1 is all.
        memory_budget: Have a plan choose what is recomputed instead: what `auto_checkpoint` does.
        preserve_rng_state: Draw random numbers in backward as they were drawn before (the default),
            or keep what was drawn.
        verbose: Print what was chosen. It is logged as well: logger "remat", level INFO.

    Raises:
        UnsupportedError: There is no repeated block, or the forward of a layer was wrapped by
            another tool since it was checkpointed.
        ValueError: A class, name, pattern or predicate fits nothing; nothing is changed then.

    >>> import torch, remat
    >>> blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)]
    >>> model = remat.apply(torch.nn.Sequential(*blocks, torch.nn.Linear(8, 1)), verbose=True)
    remat: checkpoints 4 Sequential (*)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> remat.applied(remat.remove(model))
    []
    """
    engine = _engine(model)
    if memory_budget is not None:
        return _apply_budget(model, memory_budget, layers, policy, every, verbose=verbose)
    every = whole_number(every, "every", least=1)
    check_option("preserve_rng_state", preserve_rng_state)
    check_option("verbose", verbose)
    check_policy(policy)
    chosen, skipped = engine.choose_layers(model, layers, every)
    engine.apply_to(chosen, _Runs(preserve_rng_state, policy), skipped)
    _say(f"checkpoints {engine.describe_layers(chosen)}", verbose=verbose)
    return model


def remove(model: M) -> M:
    """Undo `apply` and `auto_checkpoint` on a model and all modules in it. Return the model.

    >>> import torch, remat
    >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2)])
    >>> remat.remove(remat.apply(model)) is model
    True
    """
    _engine(model).remove_from(model)
    return model


def applied(model: Any) -> list[str]:
    """Return the paths of the modules that `apply` has checkpointed, in the order of the model.

    >>> import torch, remat
    >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(4, 1, 8) for _ in range(3)])
    >>> remat.applied(remat.apply(model, every=2))
    ['0', '2']
    """
    return _engine(model).applied_to(model)


def _engine(model: Any) -> ModuleFunctions:
    refuse_module_class(model, "model")
    return engine_of_module(model)


def _apply_budget(
    model: M, memory_budget: Any, layers: Any, policy: Any, every: Any, *, verbose: bool
) -> M:
    given = {"layers": layers, "policy": policy, "every": None if every == 1 else every}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"give memory_budget or {name}, not both: with a budget a plan chooses what is "
                f"recomputed; got memory_budget={memory_budget!r}, {name}={value!r}"
            )
    auto_checkpoint(model, memory_budget)
    _say(f"keeps {type(model).__name__} within {memory_budget}", verbose=verbose)
    return model


def _say(what: str, *, verbose: bool) -> None:
    _log.info("remat: %s", what)
    if verbose:
        print(f"remat: {what}")


@dataclass(frozen=True, slots=True)
class _Runs:
    """Makes what runs the layer at a path."""

    preserve_rng_state: bool
    policy: Any

    def __call__(self, path: str) -> _LayerRunner:
        options = SegmentOptions(self.preserve_rng_state, name=path or "model", policy=self.policy)
        return _LayerRunner(options)


@dataclass(frozen=True, slots=True)
class _LayerRunner:
    """Runs the forward pass of a layer as a region."""

    options: SegmentOptions

    def __call__(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_segment(forward, args, kwargs, self.options)
