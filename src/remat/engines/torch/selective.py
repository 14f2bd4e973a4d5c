"""Policies of torch's selective checkpointing, accepted as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, noop_context_fn

from ...errors import UnsupportedError
from ...observers import warn_once
from ...plans.policy import Decision, Policy, SaveNothing, as_policy
from ...segments import ContextPolicy
from ..compiling import is_selective_policy
from .retention import CallPolicy

__all__ = ["policy_of_contexts", "torch_policy"]

_KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class SelectivePolicy(CallPolicy):
    """Asks a policy function `(ctx, op, *args, **kwargs) -> CheckpointPolicy`."""

    function: Callable[..., Any]

    def decide(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Decision:
        context = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        answer = self.function(context, func, *args, **kwargs)
        if isinstance(answer, bool):
            return Decision.KEEP if answer else Decision.RECOMPUTE
        if answer in _KEEP:
            return Decision.KEEP
        if answer in _RECOMPUTE:
            return Decision.RECOMPUTE
        if isinstance(answer, CheckpointPolicy):
            warn_once(answer, f"{answer} is not supported yet; what it is about is kept in memory")
            return Decision.KEEP
        raise TypeError(
            f"a policy for selective checkpointing returns a CheckpointPolicy or a bool, got "
            f"{answer!r} for {func}"
        )


@dataclass(frozen=True)
class _SaveListed:
    """Keeps the outputs of some overloads."""

    ops: tuple[Any, ...]

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in self.ops else CheckpointPolicy.PREFER_RECOMPUTE


def torch_policy(policy: Any) -> Policy | None:
    """Return a policy from all that users may give: ours, functions, lists of ops; None for none.

    A function that takes `*args` is one of torch's selective checkpointing.
    """
    if isinstance(policy, ContextPolicy):
        policy = policy_of_contexts(policy.context_fn)
    if policy is None or isinstance(policy, SaveNothing):
        return None
    if isinstance(policy, list | tuple):
        _check_overloads(policy)
        return SelectivePolicy(_SaveListed(tuple(policy)))
    if is_selective_policy(policy):
        return SelectivePolicy(policy)
    return as_policy(policy)


def policy_of_contexts(context_fn: Callable[[], Any]) -> Any:
    """Return the policy in what torch's `checkpoint` takes as `context_fn`; None for no policy."""
    if context_fn is noop_context_fn:
        return None
    contexts: tuple[AbstractContextManager[Any], ...] = tuple(context_fn())
    policy = getattr(contexts[0], "policy_fn", None)
    if policy is not None:
        return policy
    if all(isinstance(context, nullcontext) for context in contexts):
        return None
    raise UnsupportedError(
        f"context_fn={context_fn!r} gives contexts for the forward pass and the recomputation; "
        "remat runs no Python code again, so it has no use for the second one. Policies of "
        "create_selective_checkpoint_contexts are understood; enter other contexts inside of fn"
    )


def _check_overloads(ops: Any) -> None:
    for op in ops:
        if not isinstance(op, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
            remedy = f"; write {op}.default" if isinstance(op, torch._ops.OpOverloadPacket) else ""
            raise TypeError(f"a list of ops as policy holds overloads, got {op!r}{remedy}")
