"""Regions of a program: checkpointed calls and scopes, and tensors singled out in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import UnsupportedError
from ...segments import SegmentOptions
from ...watching import warn_once, watchers
from .modes import changing_mode, why_it_counts
from .recorder import Recorder, recorder_of_this_thread
from .records import State
from .regions import Region
from .watch import Watch, name_of, nbytes_of

__all__ = [
    "checkpoint_tensor",
    "close_region",
    "is_marked",
    "mark",
    "open_region",
    "run_segment",
]


_get_mode = torch._C._get_dispatch_mode
_TRACING = torch._C._TorchDispatchModeKey.PROXY


def run_segment(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SegmentOptions,
) -> Any:
    """Call `function`, keep its inputs and forget what lies between."""
    region = open_region(options.name or function, options.preserve_rng_state, options.threshold)
    try:
        result = function(*args, **kwargs)
    except BaseException:
        close_region(region, None)
        raise
    close_region(region, function)
    return result


def open_region(
    name: Any,
    preserve_rng_state: bool = True,
    room: float | None = None,
    watch: Watch | None = None,
) -> Region | None:
    """Begin a region; None if all is to be as without it.

    That is if no gradient is recorded, so that there is nothing to forget, or if a mode around the
    region may change what ops give. Modes inside of a region that is open see the ops first.
    """
    recorder = recorder_of_this_thread()
    if not torch.is_grad_enabled() or (not recorder.opened and changing_mode() is not None):
        recorder.idle += 1
        return None
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "checkpointing does not work under the transforms of torch.func (grad, vjp, vmap, "
            "jvp), which allow no hooks on saved tensors; use torch.autograd.grad or .backward(), "
            "or call the function without checkpointing"
        )
    if _get_mode(_TRACING) is not None:
        raise UnsupportedError(
            "checkpointing does not work while make_fx traces: what is computed again would go "
            "into the graph as constants. Trace the function without it, or use torch.compile"
        )
    watching = watchers()
    # Its text, not the function: what that closes over may lead back to the region.
    text = name if type(name) is str else name_of(name) if watching else ""
    region = Region(text, preserve_rng_state, room)
    if watch is not None:
        region.watch = watch
    elif watching:
        region.watch = Watch(text, watching)
    recorder.open(region)
    return region


def close_region(region: Region | None, what: Any) -> None:
    """End a region. If it had no effect, warn, but only once of the same `what`; None: do not."""
    recorder = recorder_of_this_thread()
    if region is None:
        recorder.idle -= 1
        if what is not None:
            _warn(what, _why_not_at_all())
        return
    recorder.close(region)
    handles = region.all_handles
    if handles and (first := handles[0]()) is not None and first.state.held is None:
        return  # the usual case
    if what is not None and region.forgot_nothing():
        _warn(what, _why_nothing(region))


def _why_not_at_all() -> str:
    mode = changing_mode() if torch.is_grad_enabled() else None
    if mode is not None:
        return why_it_counts(mode)
    return "gradients are switched off here (torch.no_grad or inference mode)"


def _why_nothing(region: Region) -> str:
    if region.all_handles:
        return "all that it could forget is marked with mark_checkpoint, or cannot be recomputed"
    return (
        "nothing that it computes is needed for gradients: none of its inputs and parameters "
        "requires grad, or its ops need only what comes from outside"
    )


def _warn(what: Any, why: str) -> None:
    key = getattr(what, "__code__", None) or (what if isinstance(what, str) else type(what))
    warn_once((key, why), f"checkpointing {name_of(what)} saved nothing: {why}")


def checkpoint_tensor(tensor: Tensor, threshold: int | None) -> Tensor:
    """Do not hold this tensor, if it has more bytes than `threshold`."""
    recorder = recorder_of_this_thread()
    if not recorder.opened:
        if recorder.idle:
            return tensor
        raise UnsupportedError(
            "checkpoint(tensor) works inside of a scope or segment, which knows how the tensor was "
            "made; here there is none. Use `with remat.CheckpointScope(name):` around the code "
            "that makes it, or remat.checkpoint(fn, *inputs)"
        )
    if threshold is not None and nbytes_of(tensor) <= threshold:
        return tensor
    _marked.pop(tensor, None)
    state = _state_of(recorder, tensor)
    if state.op is not None:
        state.held = None
        for region in recorder.opened:
            region.drop(state)
    return tensor


def mark(tensor: Tensor) -> Tensor:
    """Hold this tensor; what follows is computed again from here."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"mark_checkpoint takes a tensor, got {type(tensor).__name__}")
    _marked[tensor] = True
    recorder = recorder_of_this_thread()
    if recorder.opened:
        recorder.hold(tensor)
    return tensor


def is_marked(tensor: Tensor) -> bool:
    return isinstance(tensor, Tensor) and tensor in _marked


_marked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _state_of(recorder: Recorder, tensor: Tensor) -> State:
    piece = recorder.piece(tensor)
    return piece if isinstance(piece, State) else piece.state
