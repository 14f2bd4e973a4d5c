"""Policies of torch's selective checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, noop_context_fn

from ...core.retention import CallPolicy
from ...errors import UnsupportedError
from ...observers import warn_once
from ...plans.policy import Decision, Policy, SaveNothing, as_policy
from ...segments import ContextPolicy
from ...sizes import shown
from ..compiling import is_selective_policy
from .backend import HigherOrderOperator, OpOverload, OpOverloadPacket

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
            warn_once(answer, f"{answer} is not supported yet; the tensor is kept in memory")
            return Decision.KEEP
        raise TypeError(
            f"a policy for selective checkpointing must return a CheckpointPolicy or a bool, got "
            f"{answer!r} for {func}"
        )


@dataclass(frozen=True)
class _SaveListed:
    """Keeps the outputs of some overloads."""

    ops: tuple[Any, ...]

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in self.ops else CheckpointPolicy.PREFER_RECOMPUTE


def torch_policy(policy: Any) -> Policy | None:
    """Convert what users pass as `policy`: a policy, a function, a list of ops, or None.

    A function that takes `*args` is a policy of torch's selective checkpointing.
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
    """Return the policy inside the `context_fn` of torch's `checkpoint`; None if there is none."""
    if context_fn is noop_context_fn:
        return None
    contexts: tuple[AbstractContextManager[Any], ...] = tuple(context_fn())
    policy = getattr(contexts[0], "policy_fn", None)
    if policy is not None:
        return policy
    if all(isinstance(context, nullcontext) for context in contexts):
        return None
    raise UnsupportedError(
        f"context_fn={context_fn!r} returns contexts for the forward pass and the recomputation; "
        "remat runs no Python code again, so the second one is of no use. "
        "Policies of create_selective_checkpoint_contexts work; enter other contexts inside of fn"
    )


def _check_overloads(ops: Any) -> None:
    for op in ops:
        if not isinstance(op, (OpOverload, HigherOrderOperator)):
            remedy = f"; write {op}.default" if isinstance(op, OpOverloadPacket) else ""
            if isinstance(op, str):
                remedy = f"; write policies.save_ops({op!r})"
            raise TypeError(
                f"a list of ops as policy must contain overloads, got {shown(op)}{remedy}"
            )
