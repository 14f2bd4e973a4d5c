"""What a recording consists of: values, and the ops that made them.

Traced arrays are never written to (an in-place change makes a new one), so a value is simply what
an op gave. The links go one way only, from a value to its op and on to what that op has read, so
that everything is freed by reference counting as soon as it is not needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ....errors import RecomputeMismatchError
from .constants import decode

if TYPE_CHECKING:
    from .region import Region

__all__ = ["Op", "Value", "nbytes_of"]

_numbers = itertools.count()


@final
class Op:
    """A call of a primitive, with values in place of traced operands."""

    __slots__ = ("args", "function", "keywords", "mark", "name", "number", "reads")

    def __init__(
        self,
        name: str,
        function: Any,
        args: list[Any],
        keywords: dict[str, Any],
        reads: list[Value],
    ) -> None:
        self.number = next(_numbers)  # ops are run again in the order in which they ran
        self.name = name
        self.function = function
        self.args = args
        self.keywords = keywords
        self.reads = reads
        self.mark: Any = None  # of what it gave, if it is not known to give the same again

    def arguments(self, get: Callable[[Value], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments, with what `get` returns in place of values."""
        args = [get(arg) if type(arg) is Value else decode(arg) for arg in self.args]
        return args, decode(self.keywords) if self.keywords else {}

    def run(self, get: Callable[[Value], Any]) -> Any:
        args, keywords = self.arguments(get)
        return self.function(*args, **keywords)


@final
class Value:
    """What an op gave: held, or computed again.

    `held` are its bytes since the forward pass, `fresh` those that were computed again, as long as
    `waiting` derivative rules and regions inside are to use them.
    """

    __slots__ = (
        *("__weakref__", "base", "dtype", "fresh", "held", "is_marked", "must_recompute", "name"),
        *("nbytes", "number", "op", "provider", "region", "shape", "waiting"),
    )

    def __init__(self, op: Op | None, region: Region | None, array: Any) -> None:
        self.op = op  # None: it comes from outside, or its op is not run again
        self.region = region
        self.held: Any = None
        self.fresh: Any = None
        self.provider: Region | None = None  # that has computed it again
        self.waiting = 0
        self.must_recompute = False  # the program said so: no policy keeps it
        self.is_marked = False
        self.name = ""  # that the program gave it
        self.base: Value | None = None  # whose memory it is in, if it is a view
        self.number = -1  # in a trace
        self.shape = getattr(array, "shape", ())
        self.dtype = getattr(array, "dtype", None)
        self.nbytes = nbytes_of(array)

    def __del__(self) -> None:
        if self.held is not None and self.region is not None:
            self.region.frees(self.held)

    @property
    def array(self) -> Any:
        """Its bytes, if they are there."""
        return self.fresh if self.held is None else self.held

    def check(self, array: Any) -> None:
        """Raise if an op that was run again has given something else."""
        shape, dtype = getattr(array, "shape", ()), getattr(array, "dtype", None)
        assert self.op is not None
        if (shape, dtype) != (self.shape, self.dtype):
            raise RecomputeMismatchError(
                f"{self.op.name} gave {self.dtype} of shape {self.shape} in the forward pass and "
                f"{dtype} of shape {shape} when it was run again for backward: it reads something "
                "that has changed since; make it a function of its arguments"
            )


def nbytes_of(array: Any) -> int:
    if isinstance(array, list | tuple):
        return sum(map(nbytes_of, array))
    return int(array.nbytes) if isinstance(array, np.ndarray | np.generic) else 0
