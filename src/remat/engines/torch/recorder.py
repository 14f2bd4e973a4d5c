"""The recorder: a dispatch mode that notes ops, and hooks that give autograd recipes.

One recorder serves a thread from the outermost region to its end. It sees every op below autograd
and autocast, with the very tensors that autograd handles. Nothing is attached to tensors; a
storage carries a note of which state its bytes are in, by number, so that a tensor that outlives
the recording keeps nothing of it alive.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ...watching import watchers
from .kinds import Kind, is_ordinary, kind_of, kinds
from .places import here
from .randomness import generator_of
from .records import Op, Piece, State, View, alias, fresh_copy, version_of
from .regions import Handle, Region, unpack
from .replay import flat
from .watch import Watch, WatchedHandle

__all__ = ["Recorder", "recorder_of_this_thread"]


class Recorder(TorchDispatchMode):
    """Notes what ops do to memory while at least one region is open in its thread."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Region] = []
        self.region: Region  # the innermost of them
        self.idle = 0  # regions that are open, but record nothing because gradients are off
        self._states: dict[int, State] = {}  # by the note on their storage
        self._outside: dict[int, State] = {}  # by id, for leaves, which are held, so ids stay
        self._ops = 0
        self._hooks = saved_tensors_hooks(self._pack, unpack)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each op would pass through a wrapper that switches the compiler off

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled; what it makes comes from outside for us

    # Regions open and close in order; the first one switches the recorder on, the last one off.

    def open(self, region: Region) -> None:
        region.start = self._ops
        watching = watchers()
        if watching:
            region.watch = Watch(region.name, watching)
        if self.opened:
            region.parent = self.region
            self.region.children = (*self.region.children, ref(region))
        else:
            self.__enter__()
            self._hooks.__enter__()
        self.opened.append(region)
        self.region = region

    def close(self, region: Region) -> None:
        if region not in self.opened:
            return  # an outer one was closed before it, and took it along
        while self.opened.pop() is not region:
            pass  # inner ones that were left open
        if self.opened:
            self.region = self.opened[-1]
        else:
            self._hooks.__exit__()
            self.__exit__(None, None, None)
            del self.region
        if region.watch is not None:
            region.watch.closed(region)
        if not self.opened:
            self._states = {}
            self._outside = {}

    # What autograd saves.

    def _pack(self, tensor: Tensor) -> Handle | State:
        piece = self.piece(tensor)
        state = piece if type(piece) is State else piece.state
        state.read = True
        region = self.region
        watch = region.watch
        if piece is state and state.outside and watch is None:
            return state  # it stays held, so it serves as its own handle
        handle = Handle(piece, region) if watch is None else WatchedHandle(piece, region)
        if not state.outside:
            region.all_handles.append(ref(handle))
            if region.room is not None and state.held is None:
                region.hold_if_there_is_room(handle, tensor)
        if watch is not None:
            watch.saved(handle, tensor)
        return handle

    def hold(self, tensor: Tensor) -> None:
        """Hold what a tensor is now, although it could be computed again."""
        piece = self.piece(tensor)
        state = piece if type(piece) is State else piece.state
        if state.held is None:
            self._hold(state, tensor)

    # What ops do. This runs for every op: it is long so that it need not call for the usual ones.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind = kinds.get(id(func)) or kind_of(func)
        if kind.special or kwargs or self.region.watch is not None:
            return self._run(kind, args, kwargs or {})
        encoded = list(args)
        for number, arg in enumerate(args):
            if isinstance(arg, Tensor):
                encoded[number] = piece = self.piece(arg)
                if type(piece) is State:
                    piece.read = True
                else:
                    piece.state.read = True
            elif type(arg) in _LISTS:
                encoded[number] = self._encode(arg)
        out = kind.call(*args)
        op = _new_op(Op, (self._ops, kind, encoded, None, None, here()))
        self._ops += 1
        if type(out) is Tensor:
            self._made(out, op, 0)
        else:
            self._made_several(out, op)
        return out

    def _run(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op, and note all that can be noted of one."""
        if kind.view or kind.reshapes:
            return self._run_view(kind, args, kwargs)
        written = self._before_writes(kind, args, kwargs)
        noted = args if kind.hidden_writes is None else self._without_hidden(kind, args)
        encoded = [self._encode(arg) for arg in noted]
        keywords = {name: self._encode(value) for name, value in kwargs.items()}
        random = None
        if kind.random and kind.draws(args, kwargs):
            generator = generator_of(args, kwargs)
            random = generator, generator.get_state()
        began = time.perf_counter()
        out = kind.call(*args, **kwargs)
        seconds = time.perf_counter() - began
        op = Op(self._ops, kind, encoded, keywords or None, random, here())
        self._ops += 1
        made = [self._after_write(op, *write) for write in written]
        made += self._made_several(out, op)
        if random is not None:
            self._keep_what_was_drawn(op, made)
        for region in self.opened:
            if region.watch is not None:
                region.watch.ran(op, made, seconds)
        return out

    def _run_view(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that touches no bytes: nothing to note, but that autograd may count it."""
        if kind.reshapes:
            state = self._known(args[0])
            if state is not None:
                state.version += 1
                state.tensor = _nothing
        return kind.call(*args, **kwargs)

    def _encode(self, value: Any) -> Any:
        """Return an argument with pieces in place of tensors."""
        if isinstance(value, Tensor):
            piece = self.piece(value)
            (piece if type(piece) is State else piece.state).read = True
            return piece
        if type(value) in _LISTS and any(isinstance(part, Tensor) for part in value):
            return [self._encode(part) for part in value]
        return value

    def piece(self, tensor: Tensor) -> Piece:
        """Return which piece of which state a tensor is now."""
        state = self._outside.get(id(tensor))
        if state is not None and state.version == tensor._version:
            return state
        state = self._known(tensor)
        if state is None:
            state = self._meet(tensor)
        elif state.blank:  # whoever wrote to it, we did not see it
            state.blank = False
            state.op = None
            self._hold(state, tensor)
        return state if state.tensor() is tensor else View(state, tensor)

    def _known(self, tensor: Tensor) -> State | None:
        """Return the state a tensor is in, if it was noted and not written to unseen."""
        try:
            state = self._states.get(tensor.untyped_storage()._remat)  # type: ignore[attr-defined]
            if state is not None and state.version == tensor._version:
                return state
        except (AttributeError, RuntimeError):  # no note, no storage, no version
            pass
        return None

    def _meet(self, tensor: Tensor) -> State:
        """Note a tensor whose bytes come from outside, or were written unseen: it is held."""
        state = self._new_state(tensor)
        state.outside = True
        state.leaf = tensor.grad_fn is None
        if state.leaf and tensor.requires_grad:
            state.held = tensor
            state.held_version = state.version
            self._outside[id(tensor)] = state
        else:
            # Not the tensor itself: a write may give it a history that leads back to us. Leaves
            # that require grad, the parameters, never get one.
            state.hold(alias(tensor))
        return state

    def _new_state(self, tensor: Tensor) -> State:
        """Return a new state for the bytes of a tensor, which they are in from now on."""
        state = State(tensor, version_of(tensor))
        if is_ordinary(tensor):
            note = next(_notes)
            tensor.untyped_storage()._remat = note  # type: ignore[attr-defined]
            self._states[note] = state
        return state

    def _hold(self, state: State, tensor: Tensor) -> None:
        """Hold a state by any tensor over it."""
        made = state.tensor()
        if made is None:  # views of it are absolute, so any tensor over it will do
            state.tensor, state.size = ref(tensor), tensor.size()
            made = tensor
        state.hold(alias(made))

    def _made(self, tensor: Tensor, op: Op, output: int) -> State | None:
        """Note an output. Over a storage that we know it is a view, and there is nothing to do."""
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # sparse: whoever reads it will meet it
            return None
        states = self._states
        if getattr(storage, "_remat", None) in states:
            return None
        note = next(_notes)
        storage._remat = note  # type: ignore[attr-defined]
        state = states[note] = State(tensor, 0, op, output)
        return state

    def _made_several(self, out: Any, op: Op) -> list[State]:
        made = []
        for number, tensor in enumerate(flat(out)):
            if isinstance(tensor, Tensor) and is_ordinary(tensor):
                state = self._made(tensor, op, number)
                if state is not None:
                    made.append(state)
                    state.blank = op.kind.blank
                    if op.kind.opaque:
                        state.op = None
                        state.hold(alias(tensor))
        return made

    # Writes. What is overwritten is copied before if it is needed and cannot be computed again.

    def _before_writes(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[tuple[Any, int], Tensor, State]]:
        written = []
        for key in kind.writes:
            if isinstance(key, str):
                target = kwargs.get(key)
            else:
                target = args[key] if key < len(args) else None
            tensors = target if isinstance(target, list | tuple) else [target]
            for number, tensor in enumerate(tensors):
                if isinstance(tensor, Tensor):
                    written.append(((key, number), tensor, self._before_write(kind, tensor)))
        return written

    def _before_write(self, kind: Kind, tensor: Tensor) -> State:
        state = self._known(tensor) or self._meet(tensor)
        if state.blank and not (kind.fills and _covers(tensor)):
            self.piece(tensor)  # it is read, so it is held
        if state.held is not None:
            self._outside.pop(id(state.held), None)
            if state.op is not None or (state.outside and not state.read and not kind.fresh):
                state.held = None
            else:
                state.hold(fresh_copy(state.held))
        return state

    def _after_write(self, op: Op, key: Any, tensor: Tensor, before: State) -> State:
        after = self._new_state(tensor)
        after.version += 1  # autograd counts the write when we are done with it
        after.outside, after.leaf = before.outside, before.leaf
        if before.outside or op.kind.opaque:
            after.hold(alias(tensor))
            after.held_version += 1
        else:
            after.op = op
            after.argument = key
            after.tensor, after.size = before.tensor, before.size
        return after

    def _without_hidden(self, kind: Kind, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments without those that are written to in secret and not read.

        What was read from them before is copied; whoever reads them again meets them anew.
        """
        assert kind.hidden_writes is not None
        numbers, condition = kind.hidden_writes
        if not args[condition]:
            return args
        for number in numbers:
            if isinstance(args[number], Tensor) and self._known(args[number]) is not None:
                self._before_write(kind, args[number])
                del args[number].untyped_storage()._remat
        return tuple(None if number in numbers else arg for number, arg in enumerate(args))

    def _keep_what_was_drawn(self, op: Op, made: list[State]) -> None:
        """Hold what an op drew, if that is smaller than the state of its generator or wanted."""
        assert op.random is not None
        tensors = [tensor for state in made if (tensor := state.tensor()) is not None]
        drawn = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        if self.region.preserve_rng_state and drawn > op.random[1].nbytes:
            return
        for state, tensor in zip(made, tensors, strict=True):
            if not state.outside:
                state.op = None
                state.hold(alias(tensor))
                state.held_version = state.version


def recorder_of_this_thread() -> Recorder:
    """Return the recorder of this thread; it is on if a region is open in it."""
    recorder: Recorder | None = getattr(_threads, "recorder", None)
    if recorder is None:
        recorder = _threads.recorder = Recorder()
    return recorder


_threads = threading.local()
_LISTS = (list, tuple)
_notes = itertools.count()  # numbers that no two recordings share
_new_op = tuple.__new__  # quicker than Op(), which parses its arguments


def _nothing() -> None:
    return None


def _covers(tensor: Tensor) -> bool:
    """Return whether a tensor lies over all bytes of its storage."""
    return tensor.nbytes == tensor.untyped_storage().nbytes() and tensor.is_contiguous()
