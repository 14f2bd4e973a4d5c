"""What a recording consists of: contents of memory, the ops that wrote them, views of them.

A `State` is what the bytes of one storage were between two writes. An op reads states and writes
new ones; in-place ops are nothing special: they write the next state of the same storage. Views
are nothing at all: a `View` says at which offset, with which shape and strides a tensor lies over
a state, and a state stands for the tensor that was made with it.

The links go one way only, from a state to the op that wrote it and on to what that op read, so
that everything is freed by reference counting as soon as nobody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .guards import Guards
from .kinds import Kind, is_ordinary
from .places import Place

__all__ = [
    "Geometry",
    "Op",
    "Piece",
    "State",
    "View",
    "alias",
    "count_together",
    "counting_writes",
    "fresh_copy",
    "minding_conjugates",
    "over",
    "parts_of",
    "states_in",
    "version_of",
]


@final
class State:
    """What the bytes of a storage were between two writes.

    `held` is a tensor over those bytes if somebody keeps them: because they come from outside of
    the recording, because they cannot be computed again, or because a plan says so. Otherwise
    `op` can compute them: as its output number `output`, or by writing to its argument `argument`.
    """

    # What is usual is said once for all, so that a new state is made quickly.
    held: Tensor | None = None
    held_version = 0
    held_storage: Any = None  # of a leaf, which may be given another one (p.data = …)
    siblings: tuple[ref[State], ...] = ()  # other tensors that are held over the same bytes
    note = 0  # that its storage carries as long as its bytes are these
    heirs: tuple[ref[Any], ...] = ()  # handles of earlier regions that these bytes are for, too
    argument: tuple[Any, int] | None = None
    blank = False  # nothing that we saw has been written to it
    fragile = False  # a buffer that is written to again and again: copy it when it is read
    leaf = False  # a parameter or an input: there in any case
    outside = False  # the bytes belong to somebody else: never drop them
    shared = False  # others may write to these bytes unseen, as through a NumPy array
    copied = False  # small, and perhaps written to unseen: a copy is held
    sums: dict[Geometry, int] | None = None  # of what was read of shared memory that is held
    summed_in = -1  # the backward pass in which they were compared
    viewed = False  # there are views of it, and how the tensor lay that was made with it is noted
    read = False  # an op or autograd refers to it
    op: Op | None = None
    output = 0
    # How the tensor that was made with it lay over these bytes: it may be put over them in another
    # way (y.data = y.data.t()), and what is computed again must be as it was.
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int | torch.SymInt = 0
    dtype: torch.dtype | None = None
    conj = False

    def __init__(self, tensor: Tensor, version: int, op: Op | None = None, output: int = 0) -> None:
        # The one that was made with it, as long as it lives.
        self.tensor: Callable[[], Tensor | None] = ref(tensor)
        self.version = version  # of the tensors over it, so that a write that we missed shows
        if op is not None:
            self.op = op
            self.output = output
            self.size = tensor.shape
            self.dtype = tensor.dtype

    def has_views(self) -> None:
        """Note that there are other tensors over these bytes: one may take the other's place."""
        if not self.viewed:
            self.viewed = True
            made: Any = self.tensor()
            if isinstance(made, Tensor):
                self.note_geometry(made)

    def note_geometry(self, tensor: Tensor) -> None:
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = dtype = tensor.dtype
        self.conj = dtype.is_complex and tensor.is_conj()

    def copy_geometry(self, other: State) -> None:
        self.size, self.stride, self.offset = other.size, other.stride, other.offset
        self.dtype, self.conj = other.dtype, other.conj

    def lies_like(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies over these bytes as the one that was made with them did."""
        return (
            tensor.shape == self.size
            and tensor.stride() == self.stride
            and (dtype := tensor.dtype) is self.dtype
            and tensor.storage_offset() == self.offset
            and not (dtype.is_complex and tensor.is_conj() != self.conj)
        )

    def hold(self, tensor: Tensor) -> None:
        """Keep these bytes by a tensor without history, of the geometry of the one made with it."""
        self.held = tensor
        self.held_version = version_of(tensor)

    def hold_a_copy(self) -> None:
        """Keep these bytes in memory of their own: somebody is about to write there."""
        assert self.held is not None
        self.hold(fresh_copy(self.held))
        self.held_storage = self.sums = None

    def add(self, sibling: State) -> None:
        """Note another tensor that is held over the same bytes, for as long as somebody does."""
        self.siblings = (*(s for s in self.siblings if s() is not None), ref(sibling))

    def family(self) -> list[State]:
        """Return this state and its siblings, as far as somebody refers to them."""
        return [self, *(s for reference in self.siblings if (s := reference()) is not None)]


class Geometry(NamedTuple):
    """How a tensor lies over its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype
    conj: bool
    neg: bool


@final
class View:
    """Another tensor over a state, and how it lies there."""

    __slots__ = ("geometry", "state")

    def __init__(self, state: State, tensor: Tensor) -> None:
        self.state = state
        self.geometry = _once(
            Geometry(
                tensor.size(),
                tensor.stride(),
                tensor.storage_offset(),
                tensor.dtype,
                tensor.is_conj(),
                tensor.is_neg(),
            )
        )


Piece = State | View  # a tensor, as the recording knows it


def over(piece: Piece, base: Tensor) -> Tensor:
    """Return a piece of the state whose bytes `base` has. To be called below autograd."""
    if type(piece) is State:
        return base
    size, stride, offset, dtype, conj, neg = piece.geometry
    if dtype is base.dtype and not (conj or neg or base.is_conj() or base.is_neg()):
        return base.as_strided(size, stride, offset)
    view = torch.empty(0, dtype=dtype, device=base.device).set_(
        base.untyped_storage(), offset, size, stride
    )
    if conj:
        view = torch.ops.aten._conj.default(view)
    return torch.ops.aten._neg_view.default(view) if neg else view


def _once(geometry: Geometry) -> Geometry:
    """Return one object for all that are equal: the layers of a network look alike."""
    try:
        known = _alike.setdefault(geometry, geometry)
    except TypeError:  # symbolic sizes
        return geometry
    if len(_alike) > _MANY:
        _alike.clear()
    return known


_alike: dict[Geometry, Geometry] = {}
_MANY = 4096


class Op(NamedTuple):
    """A call of an operator, with pieces in place of tensors."""

    number: int
    kind: Kind
    args: list[Any]
    reads: list[State]  # that are among its arguments, one for each time
    keywords: dict[str, Any] | None
    random: tuple[torch.Generator, Tensor] | None  # what it drew from, and its state before
    place: Place  # where it was called

    def overwrites(self) -> list[State]:
        """Return all states that this op overwrites."""
        keywords = self.keywords or {}
        return list(
            states_in(
                keywords.get(key) if isinstance(key, str) else self.args[key]
                for key in self.kind.writes
                if isinstance(key, str) or key < len(self.args)
            )
        )

    def overwritten(self, argument: tuple[Any, int]) -> State:
        """Return the state that this op overwrites through an argument."""
        key, number = argument
        target = self.keywords[key] if isinstance(key, str) else self.args[key]  # type: ignore[index]
        piece: Piece = target[number] if isinstance(target, list) else target
        return piece if type(piece) is State else piece.state


def states_in(values: Iterable[Any]) -> Iterator[State]:
    """Generate the states that pieces among some arguments are of."""
    for value in values:
        if isinstance(value, State | View):
            yield value if isinstance(value, State) else value.state
        elif type(value) is list:
            yield from states_in(value)


def counting_writes() -> AbstractContextManager[None]:
    """Switch on, below autograd, the layer that counts writes and shares the counters of views."""
    guard: AbstractContextManager[None] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return guard


@contextmanager
def minding_conjugates() -> Iterator[None]:
    """Switch on again, inside of a mode, what lets kernels work on conjugate views.

    PyTorch switches it off there, and kernels that make such views themselves go wrong.
    """
    guard, keys = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
    with guard(keys.Conjugate, False), guard(keys.Negative, False):
        yield


def alias(tensor: Tensor) -> Tensor:
    """Return the same bytes and version counter without the history, unseen by any mode."""
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        # An op is being dispatched, perhaps, below the layer that shares the counter.
        off, on = _without_modes.take(), _with_counters.take()
        try:
            with off, on:
                if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
                    return tensor.detach()
                with torch._C.DisableTorchFunctionSubclass():  # and without what its class adds
                    return tensor.detach()
        finally:
            _without_modes.give(off)
            _with_counters.give(on)
    with _disable_current_modes():
        return tensor.detach()


_without_modes = Guards(torch._C._DisableTorchDispatch)
_with_counters = Guards(counting_writes)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse one or a wrapper consists of, unseen by any mode."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return [getattr(tensor, name) for name in flatten()[0]]
    names = _PARTS.get(tensor.layout, ())
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        return [getattr(tensor, name)() for name in names]


_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: (*_BY_ROW, "values"),
    torch.sparse_bsr: (*_BY_ROW, "values"),
    torch.sparse_csc: (*_BY_COLUMN, "values"),
    torch.sparse_bsc: (*_BY_COLUMN, "values"),
}


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; tensors of inference mode do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def count_together(tensor: Tensor, other: Tensor) -> bool:
    """Return whether a write to a tensor is counted for another one, too."""
    if tensor.is_inference():
        return False
    before, seen = tensor._version, version_of(other)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (before + 1,))
    try:
        return version_of(other) != seen
    finally:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (before,))


def fresh_copy(tensor: Tensor) -> Tensor:
    """Return a tensor that lies over a copy of the whole storage as `tensor` lies over its own."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # or the copy would not count its writes
            return fresh_copy(tensor)
    if not is_ordinary(tensor):
        with _disable_current_modes():
            return tensor.detach().clone()
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        storage = tensor.untyped_storage()
        if (
            type(tensor) is Tensor
            and tensor.dim() == 1
            and tensor.nbytes == storage.nbytes()
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            return tensor.clone().detach()  # statistics: this is quicker
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            storage.clone(),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        if tensor.is_conj():
            copy = torch.ops.aten._conj.default(copy)
        return torch.ops.aten._neg_view.default(copy) if tensor.is_neg() else copy
