"""Dispatch modes of the program around a region: whether they only observe.

A region records the results of ops under the modes around it, but a replay runs without modes. So a
mode that changes the results of ops would be missing in the replay.
"""

from __future__ import annotations

from typing import Any

from .backend import OBSERVING_MODES, count_dispatch_modes, dispatch_mode_stack

__all__ = ["changing_mode", "why_it_counts"]


def changing_mode() -> Any:
    """Return an active dispatch mode that may change the results of ops, or None."""
    if not count_dispatch_modes():
        return None
    return next((m for m in dispatch_mode_stack() if not _only_observes(m)), None)


def _only_observes(mode: Any) -> bool:
    kind = type(mode)
    return (
        getattr(kind, "remat_looks_on", False)
        or kind.__module__ in OBSERVING_MODES
        or kind.is_infra_mode()  # fake and functional tensors, which have no memory
    )


def why_it_counts(mode: Any) -> str:
    name = f"{type(mode).__module__}.{type(mode).__qualname__}"
    return (
        f"the dispatch mode {name} is active around it and may change the results of ops, which a "
        "recomputation would miss. Enter it inside of the region, or, if it only observes, set "
        "remat_looks_on = True on its class"
    )
