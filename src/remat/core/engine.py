"""What the core asks of an engine: the protocol of an adapter to a framework."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from .records import Geometry, Op, Operand, Value

__all__ = ["Engine", "Gathered", "GuardPool", "Memory", "NeededOp"]

Tensor = Any  # an array of the engine
NeededOp = tuple[Op, list[Value]]  # an op to replay, and the values that are needed of it


class Memory(NamedTuple):
    """The memory that a tensor is in: equal keys, same memory."""

    key: Hashable
    owner: Any  # which takes weak references, and lives as long as the memory
    nbytes: int


class GuardPool(Protocol):
    """Context managers that are reused: making one may take as long as a small op."""

    def take(self) -> AbstractContextManager[Any]: ...

    def give(self, guard: Any, /) -> None: ...


class Gathered(Protocol):
    """Inputs of a replay that are there for its time only, as parameters of FSDP."""

    def before(self, number: int) -> None:
        """Called before the op with this position in the replay."""

    def after(self, number: int) -> None: ...

    def release(self) -> None:
        """Release what an error has left."""


class Engine(Protocol):
    """Runs ops again, and tells what there is to know of tensors and of backward passes."""

    @property
    def replaying(self) -> GuardPool:
        """Guards under which ops are replayed: no recording, no derivatives, no modes."""

    # -- tensors -----------------------------------------------------------------------------------

    def version(self, tensor: Tensor, /) -> int:
        """Return a number that is another one after a write to the tensor."""

    def alias(self, tensor: Tensor, /) -> Tensor:
        """Return a tensor over the same memory, without its graph."""

    def view(self, tensor: Tensor, geometry: Geometry, /) -> Tensor:
        """Return a tensor with this geometry over the memory of another one."""

    def nbytes(self, tensor: Tensor, /) -> int:
        """Return the bytes of memory that a tensor keeps alive."""

    def stride(self, tensor: Tensor, /) -> tuple[int, ...] | None:
        """Return the strides of a tensor; None if it is contiguous, or they do not matter."""

    def memory(self, tensor: Tensor, /) -> Memory | None:
        """Return the memory that a tensor is in; None if it has none of its own to tell apart."""

    def await_release(
        self, value: Value, tensor: Tensor, callback: Callable[[Any], None], /
    ) -> object:
        """Call a function when the program frees a tensor; return what is to be kept until then.

        That the recording holds its data does not count.
        """

    def current_tensor(self, value: Value, /) -> Tensor | None:
        """Return the tensor that an op returned, if it is alive and unmodified."""

    def hold_made(self, value: Value, tensor: Tensor, /) -> None:
        """Hold a value that an op has just made."""

    def fetch(self, operand: Operand, /) -> Tensor:
        """Return a tensor whose value is held; raise `ModifiedInputError` if it was modified."""

    # -- replay ------------------------------------------------------------------------------------

    def run(
        self,
        op: Op,
        makes: list[Value],
        values: dict[Value, Tensor],
        uses: Mapping[Value, int],
        given: Mapping[Value, Tensor],
    ) -> None:
        """Run an op again; add what it makes to the values. What is `given` is not written to."""

    def decode(self, operand: Operand, values: Mapping[Value, Tensor], /) -> Tensor:
        """Return the tensor of an operand, for a derivative, from values or what is held."""

    def gather(self, ops: list[NeededOp], /) -> Gathered | None:
        """Return what gathers inputs of ops that are not there; None if all are."""

    # -- backward passes ---------------------------------------------------------------------------

    def current_pass(self) -> int:
        """Return the number of the backward pass that runs in this thread; -1 outside of any."""

    def at_end_of_pass(self, callback: Callable[[], None], /) -> None:
        """Call a function when the backward pass that runs ends."""

    def is_differentiating(self) -> bool:
        """Return whether what runs now becomes part of a graph: a double backward."""
