"""Regions of a program: checkpointed calls, and tensors that are marked, named or dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.accounting import Accounting, name_of
from ...core.records import Value
from ...core.region import RegionObserver
from ...core.retention import Retention, drop
from ...errors import UnsupportedError
from ...observers import observers, warn_once
from ...plans.policy import Policy
from ...segments import SegmentOptions
from ...sizes import shown
from .adapter import TORCH
from .backend import are_functorch_transforms_active, is_traced_by_make_fx, never_compiled
from .memory.tensors import nbytes_of
from .modes import changing_mode, why_it_counts
from .op_facts import FACTS
from .recording.recorder import Recorder
from .recording.threads import recorder_of_this_thread
from .region import TorchRegion
from .selective import torch_policy

__all__ = [
    "checkpoint_tensor",
    "close_region",
    "is_marked",
    "mark",
    "name_tensor",
    "open_region",
    "refuse_transforms",
    "run_segment",
]


def run_segment(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SegmentOptions,
) -> Any:
    """Call `function`, keep its inputs and drop its activations."""
    recorder = recorder_of_this_thread()
    depth, idle = len(recorder.opened), recorder.idle
    try:
        region = open_region(
            options.name or function,
            preserve_rng_state=options.preserve_rng_state,
            policy=None if options.policy is None else torch_policy(options.policy),
            limit=options.threshold,
        )
        result = function(*args, **kwargs)
        close_region(region, function)
        return result
    except BaseException:
        recorder.unwind(depth, idle)
        raise


def open_region(
    name: Any,
    *,
    preserve_rng_state: bool = True,
    policy: Policy | None = None,
    limit: int | None = None,
    observer: RegionObserver | None = None,
) -> TorchRegion | None:
    """Begin a region. Return None if it has no effect.

    That is the case if grad mode is off, or if a dispatch mode around the region may change the
    results of ops. Modes inside an open region run before the recorder, so they are no problem.
    """
    recorder = recorder_of_this_thread()
    if not torch.is_grad_enabled() or (not recorder.opened and changing_mode() is not None):
        recorder.idle += 1
        return None
    refuse_transforms()
    attending = observers()
    # The name, not the function: its closure may refer to the region.
    text = name if type(name) is str else name_of(name) if attending else ""
    retention = None if policy is None and limit is None else Retention(policy, limit, TORCH)
    region = TorchRegion(text, preserve_rng_state=preserve_rng_state, retention=retention)
    if observer is not None:
        region.attend(observer)
    elif attending:
        region.attend(Accounting(text, attending, TORCH, FACTS))
    recorder.open(region)
    return region


def refuse_transforms() -> None:
    if are_functorch_transforms_active():
        raise UnsupportedError(
            "checkpointing does not work under the transforms of torch.func (grad, vjp, vmap, "
            "jvp), which disable saved-tensor hooks; use torch.autograd.grad or .backward(), "
            "or call the function without checkpointing"
        )
    if is_traced_by_make_fx():
        raise UnsupportedError(
            "checkpointing does not work while make_fx traces: recomputed tensors would become "
            "constants of the graph. Trace the function without it, or use torch.compile"
        )
    if is_capturing():
        raise UnsupportedError(
            "checkpointing does not work while a CUDA graph is captured: the state of random "
            "generators cannot be read there, and what is held would be overwritten by the next "
            "replay of the graph. Capture the function without it, or use torch.compile("
            'mode="reduce-overhead")'
        )


def is_capturing() -> bool:
    """Return whether ops go into a CUDA graph instead of being run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def close_region(region: TorchRegion | None, what: Any) -> None:
    """End a region. Warn once for each `what` if it had no effect; None disables the warning."""
    recorder = recorder_of_this_thread()
    if region is None:
        recorder.idle -= 1
        mode = changing_mode() if torch.is_grad_enabled() else None
        if what is not None and mode is not None:
            _warn(what, why_it_counts(mode))
        return
    recorder.close(region)
    saved = region.saved
    if region.retention is None and saved:
        first = saved[0]()
        if first is not None and first.value.held is None:
            return  # the common case
    if what is not None and region.has_kept_everything() and not _is_evaluated(what):
        _warn(what, _why_no_effect(region))
    elif what is not None and region.retention is not None and region.retention.has_kept_none:
        policy = region.retention.policy
        warn_once(
            (_key_of(what), repr(policy)),
            f"the policy {policy!r} kept nothing of {name_of(what)}: no op or tensor matched, so "
            "everything is recomputed, as without a policy",
        )


def _why_no_effect(region: TorchRegion) -> str:
    if region.saved:
        return "every activation is marked with mark_checkpoint or cannot be recomputed"
    return (
        "autograd saves none of its activations: none of its inputs and parameters requires grad, "
        "or its ops need only tensors from outside"
    )


def _is_evaluated(what: Any) -> bool:
    """Return whether `what` is a module, or a method of one, in eval mode."""
    module = getattr(what, "__self__", what)
    return isinstance(module, torch.nn.Module) and not module.training


def _warn(what: Any, why: str) -> None:
    warn_once((_key_of(what), why), f"checkpointing {name_of(what)} saved nothing: {why}")


def _key_of(what: Any) -> Any:
    return getattr(what, "__code__", None) or (what if isinstance(what, str) else type(what))


def checkpoint_tensor(tensor: Tensor, threshold: int | None) -> Tensor:
    """Drop this tensor, if it has more bytes than `threshold`; it is recomputed in backward."""
    recorder = recorder_of_this_thread()
    if not recorder.opened:
        if recorder.idle:
            return tensor
        raise UnsupportedError(
            "checkpoint(tensor) works inside of a scope or segment, which has recorded how the "
            "tensor was computed; none is open here. Use `with remat.CheckpointScope(name):` "
            "around the code that computes it, or remat.checkpoint(fn, *inputs)"
        )
    if threshold is not None and nbytes_of(tensor) <= threshold:
        return tensor
    _marked.pop(tensor, None)
    value = _value_of(recorder, tensor)
    if value.op is not None:
        value.must_recompute = True
        drop(value)
    return tensor


def mark(tensor: Tensor) -> Tensor:
    """Keep this tensor; what follows is recomputed from it."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"mark_checkpoint must be given a tensor, got {shown(tensor)}")
    _marked[tensor] = True
    recorder = recorder_of_this_thread()
    if recorder.opened:
        recorder.mark(tensor)
    return tensor


def is_marked(tensor: Tensor) -> bool:
    return isinstance(tensor, Tensor) and tensor in _marked


def name_tensor(tensor: Tensor, name: str) -> Tensor:
    """Give a tensor a name for policies and reports."""
    recorder = recorder_of_this_thread()
    if recorder.opened:
        recorder.name(tensor, name)
    return tensor


_marked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


# The compiler tries to compile functions that are called from code that it could not compile.
for _function in (open_region, close_region, checkpoint_tensor, mark, name_tensor):
    never_compiled(_function)


def _value_of(recorder: Recorder, tensor: Tensor) -> Value:
    operand = recorder.table.operand(tensor)
    return operand if isinstance(operand, Value) else operand.value
