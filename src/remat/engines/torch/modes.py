"""Dispatch modes of the program around a region: whether they only look on.

A region records what ops give under the modes around it, but what is computed again passes all
modes by. A mode that changes what ops give would be missed there.
"""

from __future__ import annotations

from typing import Any

from .backend import count_dispatch_modes, dispatch_mode_stack

__all__ = ["changing_mode", "why_it_counts"]

# Modes that were read, and call every op as it is. Others of torch do not: its selective
# checkpointing gives what it has in store, and draws no random numbers for it.
_LOOK_ON = {
    "remat.engines.torch.loop.side_effects",
    "torch._subclasses.fake_utils",
    "torch._subclasses.schema_check_mode",
    "torch.cuda._sanitizer",
    "torch.distributed._tools.mem_tracker",
    "torch.distributed._tools.memory_tracker",
    "torch.distributed.tensor.debug._comm_mode",
    "torch.testing._internal.logging_tensor",
    "torch.utils.flop_counter",
}


def changing_mode() -> Any:
    """Return a mode of this thread that may change what ops give; None if there is none."""
    if not count_dispatch_modes():
        return None
    return next((m for m in dispatch_mode_stack() if not _looks_on(m)), None)


def _looks_on(mode: Any) -> bool:
    kind = type(mode)
    return (
        getattr(kind, "remat_looks_on", False)
        or kind.__module__ in _LOOK_ON
        or kind.is_infra_mode()  # fake and functional tensors, which are no memory for regions
    )


def why_it_counts(mode: Any) -> str:
    name = f"{type(mode).__module__}.{type(mode).__qualname__}"
    return (
        f"the dispatch mode {name} is on around it and may change what ops give, which would be "
        "missed when they are run again. Enter it inside of the region, or, if it only looks on, "
        "say so on its class: remat_looks_on = True"
    )
