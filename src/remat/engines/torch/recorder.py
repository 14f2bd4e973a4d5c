"""The recorder: a dispatch mode that notes ops, and hooks that give autograd recipes.

One recorder serves a thread from the outermost region to its end. It sees every op below autograd
and autocast, with the very tensors that autograd handles. What it knows of memory is in its books;
nothing is attached to tensors, so one that outlives the recording keeps nothing of it alive.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import UnsupportedError
from .books import NO_SUBCLASSES, nothing, somebody
from .kinds import Kind, is_ordinary, kind_of, kinds
from .places import CALL, Place, here, users
from .randomness import generator_of
from .records import (
    Op,
    State,
    alias,
    count_together,
    counting_writes,
    minding_conjugates,
    states_in,
    version_of,
)
from .regions import Handle, Region, unpack
from .watch import WatchedHandle
from .writes import Writes

__all__ = ["Recorder", "recorder_of_this_thread", "without_recorder"]


class Recorder(Writes, TorchDispatchMode):
    """Notes what ops do to memory while at least one region is open in its thread."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.idle = 0  # regions that are open, but record nothing because gradients are off
        self._ops = 0
        self._hook = self._pack  # one object, to be recognised

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each op would pass through a wrapper that switches the compiler off

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled; what it makes comes from outside for us

    # Regions open and close in order; the first one switches the recorder on, the last one off.

    def open(self, region: Region) -> None:
        region.start = self._ops
        if self.opened:
            region.parent = self.region
            self.region.children = (*self.region.children, ref(region))
            region.has_hooks = self._hooks_are_covered()
            if region.has_hooks:
                _push_hooks(self._hook, unpack)
        else:
            try:
                _push_hooks(self._hook, unpack)
            except RuntimeError as error:  # somebody has forbidden them
                raise UnsupportedError(
                    "checkpointing needs hooks on saved tensors, which are switched off here: "
                    f"{error}"
                ) from error
            # What a mode's __enter__ does beyond this is to set flags, for all threads, by which
            # a compiler sees that a mode is on; it need not care about ours.
            _push_mode(self)
        self.opened.append(region)
        self.region = region

    def _hooks_are_covered(self) -> bool:
        """Return whether somebody has set other hooks since ours."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is None or top[0] is not self._hook

    def close(self, region: Region) -> None:
        if self.opened and self.opened[-1] is region:
            self.opened.pop()
        elif region in self.opened:
            while self.opened.pop() is not region:
                pass  # inner ones that were left open
        else:
            return  # an outer one was closed before it, and took it along
        if region.has_hooks:
            _pop_hooks()
        if self.opened:
            self.region = self.opened[-1]
        else:
            _pop_mode(None)
            _pop_hooks()
            del self.region
        if region.watch is not None:
            region.watch.closed(region)
        if not self.opened:
            self._left.regions.append(ref(region))
            if region.is_partly_light:
                region.balance = self._balance()
            self._begin_anew()

    # What autograd saves.

    def _pack(self, tensor: Tensor) -> Handle | State:
        known = self._outside.get(id(tensor))
        if (
            known is not None
            and known.version == tensor._version
            and self.region.watch is None
            and tensor.stride() == known.stride
            and tensor.shape == known.size
            and tensor.dtype is known.dtype
        ):
            known.read = True
            return known  # a parameter: the usual case
        piece = self.piece(tensor) if known is not None else self._piece(tensor)
        state = piece if type(piece) is State else piece.state
        state.read = True
        region = self.region
        watch = region.watch
        if piece is state and state.outside and watch is None:
            return state  # it stays held, so it serves as its own handle
        handle = Handle(piece, region) if watch is None else WatchedHandle(piece, region)
        if not state.outside:
            region.all_handles.append(ref(handle))
            if not tensor.is_contiguous():
                handle.stride = tensor.stride()
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
            made: Any = state.tensor()
            if made is None or made is somebody:
                self._meet(tensor)  # its shape is forgotten: from here on it is one from outside
            else:
                state.hold(alias(made))
                self.region.marks = (*self.region.marks, state)

    # What ops do. This runs for every op: it is long so that it need not call for the usual ones.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind = kinds.get(id(func)) or kind_of(func)
        if kind.special or kwargs or types or self.region.watch is not None:
            if kind.view:
                return self._run_view(kind, args, kwargs or {})
            usual = kind.special_if_it_draws and not kind.draws(args, {})
            if not usual or kwargs or types or self.region.watch is not None:
                return self._run(kind, args, kwargs or {}, keep=kind.opaque or bool(types))
        quick = kind if _function_modes() else kind.quick
        encoded = list(args)
        reads: list[State] = []
        for number, arg in enumerate(args):
            if type(arg) in NO_SUBCLASSES:
                encoded[number] = piece = self.piece(arg)
                state = piece if type(piece) is State else piece.state
                state.read = True
                reads.append(state)
            else:
                if kind.of_tensors or isinstance(arg, Tensor):
                    quick = kind
                encoded[number] = part = self._encode(arg)
                if part is not arg:
                    reads += states_in((part,))
        out = quick.call(*args)
        frame = _getframe(1)
        code, back = frame.f_code, frame.f_back
        if id(code) in users and (back is None or back.f_code is not CALL):
            place: Place = code, frame.f_lasti, None  # what `here` says, at once
        else:
            place = here(frame)
        op = _new_op(Op, (self._ops, quick, encoded, reads, None, None, place))
        self._ops += 1
        if type(out) is Tensor:
            self._made(out, op, 0)
        else:
            self._made_several(out, op, keep=False)
        return out

    def _run(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool) -> Any:
        """Run an op, and note all that can be noted of one; keep what it makes, if need be."""
        if kind.reshapes and is_ordinary(args[0]):
            return self._run_view(kind, args, kwargs)
        twins = self._before_writes_to_twins(kind, args, kwargs) if kind.may_write else ()
        written = self._before_writes(kind, args, kwargs)
        noted = args if kind.hidden_writes is None else self._without_hidden(kind, args)
        encoded = [self._encode(arg) for arg in noted]
        keywords = {name: self._encode(value) for name, value in kwargs.items()}
        random = None
        if kind.random and kind.draws(args, kwargs):
            generator = generator_of(args, kwargs)
            random = generator, generator.get_state()
        began = time.perf_counter()
        try:
            out = _call(kind, args, kwargs)
        except BaseException:
            # Nobody knows what it has written: whoever reads that meets it anew.
            for _, tensor, _ in written:
                if is_ordinary(tensor):
                    self._forget(tensor.untyped_storage())
            raise
        finally:
            for key in twins:
                self._states.pop(key, None)  # whoever reads it meets it anew
        seconds = time.perf_counter() - began
        reads = [*states_in(encoded), *states_in(keywords.values())]
        op = Op(self._ops, kind, encoded, reads, keywords or None, random, here(_getframe(2)))
        self._ops += 1
        made = [(self._after_write(op, *write, keep=keep), write[1]) for write in written]
        made += self._made_several(out, op, keep=keep)
        if kind.saved_early:
            for (_, _, before), (after, _) in zip(written, made, strict=False):
                self.region.hand_over(before, after)
        if random is not None:
            self._keep_what_was_drawn(random[1], made)
        for region in self.opened:
            if region.watch is not None:
                region.watch.ran(op, made, seconds)
        return out

    def _run_view(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that touches no bytes: nothing to note, but that autograd may count it."""
        tensor: Tensor = args[0]
        if kind.same:
            return kind.call(*args, **kwargs)
        state = self._known(tensor)
        if not kind.reshapes:
            if state is not None:
                state.has_views()
            if type(tensor) in NO_SUBCLASSES and not kwargs and not _function_modes():
                kind = kind.quick
            return kind.call(*args, **kwargs)
        family = [] if state is None else state.family()
        for sibling in family:
            if sibling.held is tensor:  # a leaf, which is held by itself: its shape is needed, too
                self._outside.pop(id(tensor), None)
                sibling.held = alias(tensor)
        out = kind.call(*args, **kwargs)
        for sibling in family:
            # No byte changes, but autograd will count it, also for what shares its counter.
            made, held = sibling.tensor(), sibling.held
            if not isinstance(made, Tensor) or count_together(tensor, made):
                sibling.version += 1
            if (
                held is not None
                and version_of(held) == sibling.held_version
                and count_together(tensor, held)
            ):
                sibling.held_version += 1
            sibling.tensor = nothing
        return out

    def _keep_what_was_drawn(
        self, generator_state: Tensor, made: list[tuple[State, Tensor]]
    ) -> None:
        """Hold what an op drew, if that is smaller than the state of its generator or wanted."""
        drawn = sum(tensor.untyped_storage().nbytes() for _, tensor in made)
        if self.region.preserve_rng_state and drawn > generator_state.nbytes:
            return
        for state, tensor in made:
            if not state.outside:
                self._keep(state, tensor)
                state.held_version = state.version


@contextmanager
def without_recorder() -> Iterator[None]:
    """Run code that the regions of this thread do not see; regions inside are regions of their own.

    A loop keeps its own books: to a region around it, what it makes comes from outside.
    """
    outer = recorder_of_this_thread()
    if not outer.opened and not outer.idle:
        yield
        return
    _threads.recorder = Recorder()
    covered = outer._hooks_are_covered() if outer.opened else True
    if not covered:
        _pop_hooks()
    try:
        with _off(outer) if outer.opened else nullcontext():
            yield
    finally:
        if not covered:
            _push_hooks(outer._hook, unpack)
        _threads.recorder = outer


@contextmanager
def _off(recorder: Recorder) -> Iterator[None]:
    """Take a recorder off the stack of modes; those that the program has entered since stay on."""
    above = []
    while (mode := _pop_mode(None)) is not recorder:
        above.append(mode)
    for mode in reversed(above):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode(None)
        _push_mode(recorder)
        for mode in reversed(above):
            _push_mode(mode)


def recorder_of_this_thread() -> Recorder:
    """Return the recorder of this thread; it is on if a region is open in it."""
    try:
        recorder: Recorder = _threads.recorder
    except AttributeError:
        recorder = _threads.recorder = Recorder()
    return recorder


def _not_to_be_compiled(function: Any) -> None:
    """Keep a compiler out of a function and what it calls, without a wrapper that takes time."""
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


# The compiler looks at functions that are called from code which it could not compile.
_not_to_be_compiled(Recorder.open)
_not_to_be_compiled(Recorder.close)
# What torch.autograd.graph.saved_tensors_hooks does.
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_mode = torch._C._push_on_torch_dispatch_stack
_pop_mode = torch._C._pop_torch_dispatch_stack
_getframe = sys._getframe
_function_modes = torch._C._len_torch_function_stack
_threads = threading.local()
_new_op = tuple.__new__  # quicker than Op(), which parses its arguments


def _call(kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kind.counts:
        with counting_writes():
            return kind.call(*args, **kwargs)
    if kind.conjugates:
        with minding_conjugates():
            return kind.call(*args, **kwargs)
    return kind.call(*args, **kwargs)
