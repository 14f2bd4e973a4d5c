"""What remat raises.

    RematError
    ├── BudgetTooSmallError     no plan fits the bytes that were given
    ├── LoopTransformError      a Python loop cannot be rewritten
    ├── ModifiedInputError      a saved input was modified before backward (a RuntimeError, too)
    ├── RecomputeMismatchError  a re-run gave another result than the first run
    ├── StoreError              a checkpoint could not be written or read
    └── UnsupportedError        this cannot work here; the message says what can

and what it warns of, a `UserWarning`:

    RematWarning                checkpointing was asked for, but has no effect

The simulator of schedules adds `remat.schedules.IllegalMoveError` to them. Bad arguments are
`TypeError` or `ValueError` and name the argument and the value given.
"""

from __future__ import annotations

__all__ = [
    "BudgetTooSmallError",
    "LoopTransformError",
    "ModifiedInputError",
    "RecomputeMismatchError",
    "RematError",
    "RematWarning",
    "StoreError",
    "UnsupportedError",
]


class RematError(Exception):
    """Everything that remat itself raises, except for bad arguments."""


class BudgetTooSmallError(RematError):
    """No plan fits the bytes that were given; says how many are needed.

    `smallest` is that number, where it is known.
    """

    def __init__(self, message: str, *, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class LoopTransformError(RematError):
    """A Python loop cannot be rewritten so that it checkpoints itself."""


class ModifiedInputError(RematError, RuntimeError):
    """What a region needs to recompute was modified since; PyTorch raises a RuntimeError, too."""


class RecomputeMismatchError(RematError):
    """A re-run gave another result than the first run, so its gradient would be wrong."""


class StoreError(RematError):
    """A checkpoint could not be written, or did not come back as it was written."""


class UnsupportedError(RematError):
    """What was asked for cannot work here; the message says what to use instead."""


class RematWarning(UserWarning):
    """Checkpointing was asked for, but has no effect here; the message says why."""
