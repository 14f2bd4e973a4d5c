"""The data types of a recording: values, the ops that computed them, views.

A `Value` is the content of one piece of memory between two writes. An op reads values and makes new
ones. An in-place op makes the next value of the same memory. A view makes no value: a `View` is a
value with another geometry. A value by itself stands for the tensor that the op returned.

References go in one direction: from a value to the op that made it, and from an op to the values
that it read. So reference counting frees everything that is no longer needed.

An engine whose arrays are never written to, as those that NumPy's traces, leaves what is about
writes at its defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, final
from weakref import ref

__all__ = [
    "Geometry",
    "Held",
    "Holder",
    "Made",
    "Op",
    "OpTraits",
    "Operand",
    "Origin",
    "Value",
    "View",
    "memory_of",
    "no_tensor",
    "value_of",
    "values_in",
]

Tensor = Any  # an array of the engine
Argument = tuple[Any, int]  # position or name of an argument, index of the tensor in a list
HolderRefs = tuple[Callable[[], "Holder | None"], ...]  # weak ones


class Geometry(NamedTuple):
    """Shape, strides, offset, dtype and flags of a tensor: everything but its data."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: Any  # an int, or a symbol of the compiler
    dtype: Any
    conj: bool
    neg: bool


class Origin(Enum):
    """Where the data of a value comes from."""

    PARAMETER = auto()  # a leaf that requires grad
    EXTERNAL = auto()  # made before the recording, or written outside of it: never recomputed
    COMPUTED = auto()  # by an op that can be replayed
    UNINITIALIZED = auto()  # allocated; no write was recorded
    OPAQUE = auto()  # made by an op that is not replayed

    def __init__(self, _: int) -> None:
        # An attribute, because it is read several times for every op.
        self.is_external = self.name in ("PARAMETER", "EXTERNAL")


class Held:
    """The data of a value: a detached tensor with the geometry of the op's output."""

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

    def __init__(self, tensor: Tensor, version: int, *, is_copy: bool = False) -> None:
        self.tensor = tensor
        self.version = version
        self.is_copy = is_copy  # the program has no access to it
        self.storage: Any = None  # of a parameter; `p.data = …` replaces it
        self.optimizer_steps = 0  # of fused optimizers, whose writes are not counted
        # Checksums of what was read of shared memory, and the pass that last compared them.
        self.checksums: dict[Geometry, int] | None = None
        self.checked_in = -1
        # Copies of parts that were read and then overwritten.
        self.copies: dict[Geometry, Tensor] = {}


class Holder(Protocol):
    """An object that may hold the tensor of a value: a saved tensor."""

    operand: Operand
    tensor: Tensor | None

    def refer_to(self, operand: Operand) -> None: ...

    def drop(self) -> None: ...

    def unchanged_tensor(self) -> Tensor | None: ...

    def borrow(self, tensor: Tensor) -> None: ...


class OpTraits(Protocol):
    """What the core has to know of an operator."""

    @property
    def func(self) -> Any: ...

    @property
    def writes(self) -> tuple[int | str, ...]:
        """The arguments that it writes to: positions, or names of keywords."""

    @property
    def may_write(self) -> bool:
        """Whether it writes to an argument, known or not."""


@final
class Value:
    """The content of a piece of memory between two writes.

    `held` keeps the data. A value without it is recomputed by `op`: as its output number `output`,
    or by its write to `argument`.
    """

    # Defaults are class attributes, so that a new value is cheap.
    origin = Origin.COMPUTED
    op: Op | None = None
    output = 0
    argument: Argument | None = None
    held: Held | None = None
    holders: HolderRefs = ()  # saved tensors of this value, which may hold its data
    lends_to: HolderRefs = ()  # saved tensors of earlier regions with the same data
    aliases: tuple[ref[Value], ...] = ()  # other values held over the same memory
    note = 0  # number that its storage carries while it has this content
    is_leaf = False  # a leaf of the graph: held with and without checkpointing
    is_shared = False  # memory shared with another library, such as a NumPy array
    is_rewritten = False  # a buffer that regions write to repeatedly
    # The computed value over whose memory an external one was found, as the parts of `unsafe_split`
    # are, which have version counters of their own.
    part_of: Callable[[], Value | None] | None = None
    base: Value | None = None  # whose memory it is in, if views are replayed like other ops
    is_overwritten = False  # no tensor has this content any more; what was read is saved
    is_snapshot = False  # a copy is held, because writes to it may not be counted
    must_recompute = False  # by `checkpoint(tensor)`: no policy keeps it
    name = ""  # given with `remat.name`
    dies_with: Any = None  # weak reference that drops a by-product with its main output
    # The geometry of the tensor that the op returned, noted once there are views: `y.data =
    # y.data.t()` may change the tensor, and a replay must return the original. Before that, only
    # size and dtype are known, which a replay compares.
    geometry: Geometry | None = None
    size: tuple[int, ...] = ()
    dtype: Any = None
    reads: set[Geometry] | None = None  # what was read of an external value
    traced: tuple[tuple[int, int], ...] = ()  # by tracer, its number: the latest first

    def __init__(
        self,
        tensor: Callable[[], Tensor | None],
        version: int,
        op: Op | None = None,
        output: int = 0,
    ) -> None:
        # A weak reference to the tensor that the op returned.
        self.tensor = tensor
        self.version = version  # detects writes that were not recorded
        if op is not None:
            self.op = op
            self.output = output

    def add_alias(self, other: Value) -> None:
        """Add another value that is held over the same memory, by a weak reference."""
        known = (r for r in self.aliases if (value := r()) is not None and value is not other)
        self.aliases = (*known, ref(other))

    def with_aliases(self) -> list[Value]:
        """Return this value and its aliases that are alive."""
        return [self, *(value for r in self.aliases if (value := r()) is not None)]

    def living_holders(self) -> Iterator[Holder]:
        for reference in self.holders:
            holder = reference()
            if holder is not None:
                yield holder


@final
class View:
    """A tensor over a value with another geometry."""

    __slots__ = ("geometry", "value")

    def __init__(self, value: Value, geometry: Geometry) -> None:
        self.value = value
        self.geometry = geometry


Operand = Value | View  # a tensor in the recording
Made = list[tuple[Value, Tensor]]  # what an op has made


class Op(NamedTuple):
    """A call of an operator, with operands in place of tensors."""

    number: int
    traits: Any  # `OpTraits`, and what else its engine knows of it
    call: Any
    args: list[Any]
    reads: list[Value]  # the values among its arguments, with repetitions
    keywords: dict[str, Any] | None
    drawn: Any  # how to draw its random numbers again
    location: Any  # where it was called, as the engine notes it

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
        return value_of(operand)


def value_of(operand: Operand) -> Value:
    return operand if type(operand) is Value else operand.value


def memory_of(value: Value) -> Value:
    """Return the value whose memory a value is in: itself, or what it is a view of."""
    while value.base is not None:
        value = value.base
    return value


def values_in(arguments: Iterable[Any]) -> Iterator[Value]:
    """Yield the values of the operands among some arguments."""
    for operand in _operands_in(arguments):
        yield operand if type(operand) is Value else operand.value


def _operands_in(arguments: Iterable[Any]) -> Iterator[Operand]:
    for argument in arguments:
        if isinstance(argument, Value | View):
            yield argument
        elif type(argument) is list:
            yield from _operands_in(argument)


def no_tensor() -> None:
    """Replace a weak reference to a tensor that is freed or must not be used."""
