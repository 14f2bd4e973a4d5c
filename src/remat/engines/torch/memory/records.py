"""What a recording consists of: contents of memory, the ops that wrote them, views of them.

A `Value` is what the bytes of one storage were between two writes. An op reads values and writes
new ones; in-place ops are nothing special: they write the next value of the same storage. Views
are nothing at all: a `View` says how a tensor lies over a value, and a value stands for the tensor
that was made with it.

The links go one way only, from a value to the op that wrote it and on to what that op read, so
that everything is freed by reference counting as soon as nobody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final
from weakref import ref

import torch
from torch import Tensor

from ..randomness import Draw
from ..schema import OpTraits
from .geometry import Geometry, geometry_of
from .tensors import version_of

if TYPE_CHECKING:
    from types import CodeType

__all__ = ["Held", "Holder", "Op", "Operand", "Origin", "Place", "Value", "View", "values_in"]

# Where an op was called: the code that ran, the instruction in it, and the innermost module.
Place = tuple["CodeType", int, "ref[torch.nn.Module] | None"]
Argument = tuple[Any, int]  # which argument of an op, and which tensor of it if it is a list


HolderRefs = tuple[Callable[[], "Holder | None"], ...]  # weak ones


class Origin(Enum):
    """Where the bytes of a value come from; `retention.protect` says how each is held."""

    PARAMETER = auto()  # a leaf that requires grad
    EXTERNAL = auto()  # made before the recording, or written to unseen: never computed
    COMPUTED = auto()  # by an op that can be run again
    UNINITIALIZED = auto()  # allocated, and not written to as far as we saw
    OPAQUE = auto()  # made by an op that is not run again


class Held:
    """The bytes of a value, as a tensor without history that lies as the one made with it."""

    __slots__ = (
        "checked_in",
        "checksums",
        "copies",
        "is_copy",
        "optimizer_steps",
        "storage",
        "tensor",
        "version",
    )

    def __init__(self, tensor: Tensor, *, is_copy: bool = False) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.is_copy = is_copy  # nobody else writes to these bytes
        self.storage: Any = None  # of a parameter, which may be given another one (p.data = …)
        self.optimizer_steps = 0  # of fused optimizers, which do not count their writes
        # What was read of memory that others may write to unseen, and the pass it was checked in.
        self.checksums: dict[Geometry, int] | None = None
        self.checked_in = -1
        # What was read of these bytes and has been overwritten since.
        self.copies: dict[Geometry, Tensor] = {}


class Holder(Protocol):
    """Somebody who may hold the tensor of a value: a saved tensor of autograd's."""

    operand: Operand
    tensor: Tensor | None

    def drop(self) -> None: ...

    def unchanged_tensor(self) -> Tensor | None: ...

    def borrow(self, tensor: Tensor) -> None: ...


@final
class Value:
    """What the bytes of a storage were between two writes.

    `held` keeps those bytes. A value without it is computed again by `op`: as its output number
    `output`, or by writing to its argument `argument`.
    """

    # The usual is said once for all, so that a new value is made quickly.
    origin = Origin.COMPUTED
    op: Op | None = None
    output = 0
    argument: Argument | None = None
    held: Held | None = None
    holders: HolderRefs = ()  # saved tensors of it, which may have its bytes
    lends_to: HolderRefs = ()  # saved tensors of earlier regions that are these bytes
    aliases: tuple[ref[Value], ...] = ()  # other values that are held over the same storage
    note = 0  # that its storage carries as long as its bytes are these
    is_leaf = False  # of autograd's graph: there with and without checkpointing
    is_shared = False  # others may write to these bytes unseen, as through a NumPy array
    is_rewritten = False  # a buffer that regions write to again and again
    is_overwritten = False  # no tensor has these bytes any more; what was read of them is saved
    is_snapshot = False  # it may be written to unseen, so a copy is held
    must_recompute = False  # the program said so: no policy keeps it
    name = ""  # that the program gave it
    companion: Any = None  # tells a by-product when what its op was run for is gone
    # How the tensor that was made with it lay over these bytes, once there are views of it: it may
    # be put over them in another way (y.data = y.data.t()), and what is computed again must be as
    # it was. Before that only what a replay compares is known.
    geometry: Geometry | None = None
    size: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    reads: set[Geometry] | None = None  # what was read of an external one
    traced: tuple[int, int] | None = None  # the pass that is traced, and its number in there

    def __init__(self, tensor: Tensor, version: int, op: Op | None = None, output: int = 0) -> None:
        # The one that was made with it, as long as it lives.
        self.tensor: Callable[[], Tensor | None] = ref(tensor)
        self.version = version  # of the tensors over it, so that a write that we missed shows
        if op is not None:
            self.op = op
            self.output = output
            self.size = tensor.shape
            self.dtype = tensor.dtype

    @property
    def is_external(self) -> bool:
        return self.origin is Origin.EXTERNAL or self.origin is Origin.PARAMETER

    def current_tensor(self) -> Tensor | None:
        """Return the tensor that was made with these bytes, if it is there and has them still."""
        made = self.tensor()
        if made is None or self.is_overwritten or version_of(made) != self.version:
            return None
        return made

    def note_views(self) -> None:
        """Note that there are other tensors over these bytes: one may take the other's place."""
        if self.geometry is None:
            made = self.tensor()
            if made is not None:
                self.note_geometry(made)

    def note_geometry(self, tensor: Tensor) -> None:
        self.geometry = geometry = geometry_of(tensor)
        self.size, self.dtype = geometry.size, geometry.dtype

    def lies_like(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies over these bytes as the one that was made with them did."""
        geometry = self.geometry
        return (
            geometry is not None
            and tensor.shape == geometry.size
            and tensor.stride() == geometry.stride
            and (dtype := tensor.dtype) is geometry.dtype
            and tensor.storage_offset() == geometry.offset
            and not (dtype.is_complex and tensor.is_conj() != geometry.conj)
        )

    def add_alias(self, other: Value) -> None:
        """Note another value that is held over the same storage, for as long as somebody needs it.

        Both know of each other: a write goes to whichever is current.
        """
        known = (r for r in self.aliases if (value := r()) is not None and value is not other)
        self.aliases = (*known, ref(other))

    def family(self) -> list[Value]:
        """Return this value and its aliases, as far as somebody refers to them."""
        return [self, *(value for r in self.aliases if (value := r()) is not None)]

    def living_holders(self) -> Iterator[Holder]:
        for reference in self.holders:
            holder = reference()
            if holder is not None:
                yield holder


@final
class View:
    """Another tensor over a value, and how it lies there."""

    __slots__ = ("geometry", "value")

    def __init__(self, value: Value, tensor: Tensor) -> None:
        self.value = value
        self.geometry = geometry_of(tensor)


Operand = Value | View  # a tensor, as the recording knows it


class Op(NamedTuple):
    """A call of an operator, with operands in place of tensors."""

    number: int
    traits: OpTraits
    call: Any
    args: list[Any]
    reads: list[Value]  # that are among its arguments, one for each time
    keywords: dict[str, Any] | None
    drawn: Draw | None  # the random numbers that it drew
    place: Place

    def targets(self) -> list[Operand]:
        """Return all operands that this op writes to."""
        keywords = self.keywords or {}
        return list(
            _operands_in(
                keywords.get(key) if isinstance(key, str) else self.args[key]
                for key in self.traits.writes
                if isinstance(key, str) or key < len(self.args)
            )
        )

    def overwritten(self, argument: Argument) -> Value:
        """Return the value that this op overwrites through an argument."""
        key, number = argument
        target = self.keywords[key] if isinstance(key, str) else self.args[key]  # type: ignore[index]
        operand: Operand = target[number] if isinstance(target, list) else target
        return operand if type(operand) is Value else operand.value


def values_in(arguments: Iterable[Any]) -> Iterator[Value]:
    """Generate the values of the operands among some arguments."""
    for operand in _operands_in(arguments):
        yield operand if type(operand) is Value else operand.value


def _operands_in(arguments: Iterable[Any]) -> Iterator[Operand]:
    for argument in arguments:
        if isinstance(argument, Value | View):
            yield argument
        elif type(argument) is list:
            yield from _operands_in(argument)
