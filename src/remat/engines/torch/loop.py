"""Loops over tensors: not here yet."""

from __future__ import annotations

from typing import Any, NoReturn

from ...errors import UnsupportedError

__all__ = ["run_loop", "run_while"]


def run_loop(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "this version of remat has no loops over tensors of torch yet; put runs of steps into "
        "remat.checkpoint(fn, state), or use NumPy arrays"
    )


run_while = run_loop
