"""Code that torch.compile is tracing: handed over to what the compiler knows.

No module of torch is loaded here that the program has not loaded; the compiler traces through
these functions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..plans.policy import Candidate, Decision, SaveNothing, as_policy, refuse_makers
from ..segments import ContextPolicy, SegmentOptions

__all__ = ["compiled_segment", "is_compiling", "is_selective_policy", "uncompiled"]


def is_compiling() -> bool:
    """Say whether torch.compile (or torch.export) is tracing the code that calls this."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have the compiler break its graph at a function that it cannot trace, and go on after it.

    With `fullgraph=True` the compiler raises instead.
    """

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not is_compiling():
            return function(*args, **kwargs)
        import torch  # noqa: PLC0415  (it is there)

        result: Result = torch.compiler.disable(function)(*args, **kwargs)
        return result

    return call


def compiled_segment(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SegmentOptions,
) -> Any:
    """Mark a segment in the graph: the compiler recomputes what torch's own checkpoint marks.

    torch.export cannot export such a mark, and has no use for it.
    """
    import torch  # noqa: PLC0415  (it is there)
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415

    if torch.compiler.is_exporting():
        return function(*args, **kwargs)

    policy = options.policy
    if policy is None or isinstance(policy, SaveNothing):
        return checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=options.preserve_rng_state,
            **kwargs,
        )
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=options.preserve_rng_state,
        context_fn=_contexts(policy),
        **kwargs,
    )


def _contexts(policy: Any) -> Callable[[], Any]:
    """Return a policy as what torch's `checkpoint` takes."""
    from torch.utils.checkpoint import (  # noqa: PLC0415
        create_selective_checkpoint_contexts,
    )

    if isinstance(policy, ContextPolicy):
        return policy.context_fn
    if not is_selective_policy(policy):
        policy = functools.partial(_ask, policy)
    return functools.partial(create_selective_checkpoint_contexts, policy)


def is_selective_policy(policy: Any) -> bool:
    """Return whether a policy is one of torch's: a list of ops, or a function that takes *args."""
    if isinstance(policy, list | tuple):
        return True
    refuse_makers(policy)
    code = getattr(getattr(policy, "__func__", policy), "__code__", None)
    return code is not None and bool(code.co_flags & _TAKES_ARGS)


_TAKES_ARGS = 0x04  # inspect.CO_VARARGS


def _ask(policy: Any, context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Ask a policy of ours about an op in a graph, as torch's selective checkpointing does."""
    out = context.op_output
    shapes = tuple(tuple(value.shape) for value in (out, *args) if hasattr(value, "shape"))
    nbytes = out.numel() * out.element_size() if hasattr(out, "numel") else 0
    candidate = Candidate(str(op), shapes, nbytes, is_saved=True)
    return as_policy(policy)(candidate) is Decision.KEEP
