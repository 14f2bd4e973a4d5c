"""Code that torch.compile is tracing: handed over to what the compiler knows.

No module of torch is loaded here that the program has not loaded; the compiler traces through
both functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["compiled_segment", "is_compiling"]


def is_compiling() -> bool:
    """Say whether torch.compile (or torch.export) is tracing the code that calls this."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def compiled_segment(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool,
) -> Any:
    """Mark a segment in the graph: the compiler recomputes what torch's own checkpoint marks."""
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415  (only if torch is there)

    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
    )
