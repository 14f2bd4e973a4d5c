"""The recorder: a dispatch mode that notes ops, and hooks that give autograd saved tensors.

One recorder serves a thread from its outermost region to that one's end. It sees every op below
autograd and autocast, with the very tensors that autograd handles.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....errors import UnsupportedError
from ..backend import (
    count_function_modes,
    current_graph_task,
    keep_compiler_out,
    on_conjugates,
    pop_dispatch_mode,
    pop_saved_tensor_hooks,
    push_dispatch_mode,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
    with_version_counters,
)
from ..memory import uncounted_writes
from ..memory.records import Op, Origin, Place, Value, values_in
from ..memory.tensors import EXACT_TYPES, alias, is_plain, share_a_counter, version_of
from ..output_reuse import OutputReuse
from ..randomness import Draw, draw, generator_of
from ..region import Region, SavedTensor, unpack
from ..replay import flat
from ..retention import hold, keep_by_products
from ..schema import OpTraits, Route, traits_by_id, traits_of
from ..source_location import MODULE_CALL, caller, user_code
from .storages import StorageTable, gone
from .writes import WriteTracker

__all__ = ["Recorder", "recorder_of_this_thread", "without_recorder"]

Kwargs = dict[str, Any]
Made = list[tuple[Value, Tensor]]


class Recorder(TorchDispatchMode):
    """Notes what ops do to memory while at least one region is open in its thread."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Region] = []
        self.region: Region  # the innermost of them
        self.idle = 0  # regions that are open, but record nothing because gradients are off
        self._reuse = OutputReuse()
        self.table = StorageTable(self._reuse)
        self._writes = WriteTracker(self.table)
        self._ops = 0
        self.iteration_start = 0  # the number of the first op since backward last began
        self._hook = self._pack  # one object, to be recognised

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each op would pass through a wrapper that switches the compiler off

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled; what it makes is external to us

    @property
    def op_count(self) -> int:
        """How many ops were recorded in this thread so far."""
        return self._ops

    # -- regions open and close in order; the first switches the recorder on, the last one off -----

    def open(self, region: Region) -> None:
        region.start = self._ops
        if self.opened:
            region.parent = self.region
            region.is_attended |= self.region.is_attended
            self.region.has_children = True
            region.has_own_hooks = self._hooks_are_covered()
            if region.has_own_hooks:
                push_saved_tensor_hooks(self._hook, unpack)
        else:
            try:
                push_saved_tensor_hooks(self._hook, unpack)
            except RuntimeError as error:  # somebody has forbidden them
                raise UnsupportedError(
                    "checkpointing needs hooks on saved tensors, which are switched off here: "
                    f"{error}"
                ) from error
            uncounted_writes.watch()
            keep_compiler_out()
            region.backward_began = self.end_iteration
            push_dispatch_mode(self)
        self.opened.append(region)
        self.region = region

    def _hooks_are_covered(self) -> bool:
        """Return whether somebody has set other hooks since ours."""
        top = top_saved_tensor_hooks(False)
        return top is None or top[0] is not self._hook

    def close(self, region: Region) -> None:
        if region not in self.opened:
            return  # an outer one was closed before it, and took it along
        while True:  # inner ones that were left open are closed, too
            innermost = self.opened.pop()
            if innermost.has_own_hooks:
                self._remove_hooks()
            innermost.close()
            if innermost is region:
                break
        if self.opened:
            self.region = self.opened[-1]
            return
        self._remove_mode()
        self._remove_hooks()
        del self.region
        self._reuse.closed(region)
        self.table.reset()

    def _remove_hooks(self) -> None:
        """Remove our hooks from the stack; those that the program has set since stay."""
        above = []
        while (hooks := top_saved_tensor_hooks(False)) is not None:
            pop_saved_tensor_hooks()
            if hooks[0] is self._hook:
                break
            above.append(hooks)
        for hooks in reversed(above):
            push_saved_tensor_hooks(*hooks)

    def _remove_mode(self) -> list[Any]:
        """Take this mode off the stack; those that the program has entered since stay on."""
        above = []
        while (mode := pop_dispatch_mode(None)) is not self:
            above.append(mode)
        for mode in reversed(above):
            push_dispatch_mode(mode)
        return above

    def end_iteration(self) -> None:
        """Forget how values were computed: what is read next is an external input.

        To be called when a backward pass that builds no graph begins, and after an optimizer's
        step. Else a scope around a training loop would hold all of its past, for the sake of what
        outlives an iteration: the state of the optimizer, a running total.
        """
        self.iteration_start = self._ops
        if self.opened:
            self.table.reset()

    # -- what autograd saves -----------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> SavedTensor | Value:
        region = self.region
        known = self.table.parameters.get(id(tensor))
        if known is not None and region.observer is None and known is self.table.operand(tensor):
            return known  # it stays held, so it serves as its own saved tensor: the usual case
        operand = self.table.operand(tensor)
        value = operand if type(operand) is Value else operand.value
        as_it_is = _getframe(1).f_code is _FUNCTION_APPLY and _must_come_back(tensor, value)
        if not value.is_external and not as_it_is:
            saved: SavedTensor = region.save(operand, tensor)
            return saved
        if region.observer is None:
            if operand is value and not as_it_is:
                return value
            saved = SavedTensor(operand, region)
        else:
            saved = region.observer.make_saved(operand, region)
        if as_it_is:
            saved.keep_leaf(tensor)
        if region.observer is not None:
            region.observer.saved(saved, tensor)
        return saved

    def mark(self, tensor: Tensor) -> None:
        """Hold what a tensor is now, although it could be computed again."""
        operand = self.table.operand(tensor)
        value = operand if type(operand) is Value else operand.value
        value.must_recompute = False
        if value.held is None:
            made = value.tensor()
            if made is None:
                self.table.first_seen(tensor)  # its shape is forgotten: it is external from here on
            else:
                hold(value, alias(made))
                self.region.marks = (*self.region.marks, ref(value))

    def name(self, tensor: Tensor, name: str) -> None:
        """Give a tensor a name for policies and reports."""
        operand = self.table.operand(tensor)
        value = operand if type(operand) is Value else operand.value
        value.name = name
        retention = self.region.retention
        made = value.tensor()
        if retention is not None and made is not None and value.op is not None:
            retention.named(value, made)
            self.region.marks = (*self.region.marks, ref(value))

    def before_direct_write(self, tensor: Tensor) -> None:
        """Somebody is about to write to a tensor without an op."""
        self._writes.before_direct_write(tensor)

    # -- what ops do -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        traits = traits_by_id.get(id(func)) or traits_of(func)
        if current_graph_task() != -1 and not torch.is_grad_enabled():
            return self._run_in_backward(traits, args, kwargs or {})
        if traits.route is _SIMPLE and not (kwargs or types or self.region.is_attended):
            return self._run_simple(traits, args)
        if traits.route is _VIEW:
            return self._run_view(traits, args, kwargs or {})
        if (
            traits.route is _SIMPLE_UNLESS_RANDOM
            and not (kwargs or types or self.region.is_attended)
            and not traits.draws(args, {})
        ):
            return self._run_simple(traits, args)
        return self._run(traits, args, kwargs or {}, keep=traits.opaque or bool(types))

    def _run_simple(self, traits: OpTraits, args: tuple[Any, ...]) -> Any:
        """Run an op that reads tensors and makes new memory: the common case, without calls."""
        call = traits.call if count_function_modes() else traits.fast_call
        operand_of = self.table.operand
        encoded = list(args)
        reads: list[Value] = []
        for number, arg in enumerate(args):
            if type(arg) in EXACT_TYPES:
                encoded[number] = operand = operand_of(arg)
                reads.append(operand if type(operand) is Value else operand.value)
            else:
                if traits.fast_if_all_tensors or isinstance(arg, Tensor):
                    call = traits.call
                encoded[number] = part = self.table.encode(arg)
                if part is not arg:
                    reads += values_in((part,))
        out = call(*args)
        frame = _getframe(2)
        code, back = frame.f_code, frame.f_back
        if id(code) in user_code and (back is None or back.f_code is not MODULE_CALL):
            place: Place = code, frame.f_lasti, None  # what `caller` says, at once
        else:
            place = caller(frame)
        op = _new_op(Op, (self._ops, traits, call, encoded, reads, None, None, place))
        self._ops += 1
        if type(out) is Tensor:
            self.table.made(out, op, 0)
        else:
            self._made_several(out, op, keep=False)
        return out

    def _run_in_backward(self, traits: OpTraits, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run an op of a backward pass that builds no graph: what it makes is never recomputed.

        What it overwrites may be needed.
        """
        if not traits.may_write or traits.reshapes_in_place:
            out = traits.call(*args, **kwargs)
            if self.region.observer is not None and traits.makes_memory:
                self.region.observer.ran_in_backward(out)
            return out
        writes = self._writes
        overlapped = writes.save_overlapping(traits, args, kwargs)
        written = writes.before(traits, args, kwargs)
        writes.without_hidden(traits, args)
        out, _ = _call(traits, args, kwargs)
        for key in overlapped:
            self.table.values.pop(key, None)
        for write in written:
            writes.after_unrecorded(traits, write)
        return out

    def _run(self, traits: OpTraits, args: tuple[Any, ...], kwargs: Kwargs, *, keep: bool) -> Any:
        """Run an op, and note all that can be noted of one; keep what it makes, if need be."""
        if traits.reshapes_in_place and is_plain(args[0]):
            return self._run_view(traits, args, kwargs)
        table, writes = self.table, self._writes
        overlapped = writes.save_overlapping(traits, args, kwargs) if traits.may_write else ()
        written = writes.before(traits, args, kwargs)
        noted = args if traits.hidden_writes is None else writes.without_hidden(traits, args)
        encoded = [table.encode(arg) for arg in noted]
        keywords = {name: table.encode(value) for name, value in kwargs.items()}
        began = time.perf_counter()
        try:
            out, drawn = _call(traits, args, kwargs)
        except BaseException:
            # Nobody knows what it has written: whoever reads that sees it for the first time.
            for write in written:
                if is_plain(write.tensor):
                    table.forget(write.tensor.untyped_storage())
            raise
        finally:
            for key in overlapped:
                table.values.pop(key, None)
        seconds = time.perf_counter() - began
        reads = [*values_in(encoded), *values_in(keywords.values())]
        place = caller(_getframe(2))
        op = Op(self._ops, traits, traits.call, encoded, reads, keywords or None, drawn, place)
        self._ops += 1
        made = [(writes.after(op, write, keep=keep), write.tensor) for write in written]
        if traits.saves_before_write:
            for write, (after, _) in zip(written, made, strict=False):
                self.region.replace(write.before, after)
        made += self._made_several(out, op, keep=keep)
        if drawn is not None:
            self._keep_what_was_drawn(drawn, made)
        self._attend(op, made, args, kwargs, out, seconds)
        return out

    def _attend(
        self, op: Op, made: Made, args: Any, kwargs: Kwargs, out: Any, seconds: float
    ) -> None:
        """Ask the policy of the region, and tell observers."""
        retention = self.region.retention
        if retention is not None and retention.asks_about_made:
            computed = [(value, tensor) for value, tensor in made if value.op is op]
            if computed:
                retention.made(computed, args, kwargs, out)
        for region in self.opened:
            if region.observer is not None:
                region.observer.ran(op, made, seconds)

    def _run_view(self, traits: OpTraits, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run an op that touches no bytes: nothing to note, but that autograd may count it."""
        tensor: Tensor = args[0]
        if not isinstance(tensor, Tensor):
            # A number that autograd has saved as a tensor comes here as a number.
            dtype = torch.complex128 if isinstance(tensor, complex) else torch.float64
            return traits.call(torch.tensor(tensor, dtype=dtype), *args[1:], **kwargs)
        if traits.is_identity:
            return traits.call(*args, **kwargs)
        value = self.table.known(tensor)
        if traits.reshapes_in_place:
            return self._reshape(traits, value, args, kwargs)
        if value is not None:
            value.note_views()
        if type(tensor) in EXACT_TYPES and not kwargs and not count_function_modes():
            return traits.fast_call(*args)
        return traits.call(*args, **kwargs)

    def _reshape(
        self, traits: OpTraits, value: Value | None, args: tuple[Any, ...], kwargs: Kwargs
    ) -> Any:
        """Run an op that changes the shape of a tensor in place."""
        tensor: Tensor = args[0]
        family = [] if value is None else value.family()
        for member in family:
            held = member.held
            if held is not None and held.tensor is tensor:  # a parameter: its shape is needed, too
                self.table.parameters.pop(id(tensor), None)
                held.tensor, held.storage = alias(tensor), None
        out = traits.call(*args, **kwargs)
        for member in family:
            # No byte changes, but autograd will count it, also for what shares its counter.
            made, held = member.tensor(), member.held
            if made is None or share_a_counter(tensor, made):
                member.version += 1
            if (
                held is not None
                and version_of(held.tensor) == held.version
                and share_a_counter(tensor, held.tensor)
            ):
                held.version += 1
            member.tensor = gone
        return out

    def _made_several(self, out: Any, op: Op, *, keep: bool) -> Made:
        made: Made = []
        for number, tensor in enumerate(flat(out)):
            if isinstance(tensor, Tensor) and is_plain(tensor):
                value = self.table.made(tensor, op, number)
                if value is not None:
                    made.append((value, tensor))
                    if op.traits.leaves_uninitialized:
                        value.origin = Origin.UNINITIALIZED
                    if keep:
                        self.table.keep(value, tensor)
        if len(made) > 1 and not keep:
            keep_by_products(made)
        return made

    def _keep_what_was_drawn(self, drawn: Draw, made: Made) -> None:
        """Hold what an op drew, if that is smaller than the state of its generator or wanted."""
        nbytes = sum(tensor.untyped_storage().nbytes() for _, tensor in made)
        if self.region.preserve_rng_state and nbytes > drawn.before.nbytes:
            return
        for value, tensor in made:
            if not value.is_external:
                self.table.keep(value, tensor)
                assert value.held is not None
                value.held.version = value.version


def _call(traits: OpTraits, args: tuple[Any, ...], kwargs: Kwargs) -> tuple[Any, Draw | None]:
    """Call an op; return what it gave, and what it drew if it is random."""
    call = partial(traits.call, *args, **kwargs)
    if traits.is_random and traits.draws(args, kwargs):
        return draw(generator_of(args, kwargs), call)
    if traits.counts_writes:
        with with_version_counters():
            return call(), None
    if traits.uses_conjugates:
        with on_conjugates():
            return call(), None
    return call(), None


def _must_come_back(tensor: Tensor, value: Value) -> bool:
    """Return whether a custom Function that saves a tensor must get that very tensor back.

    Its backward may write to a leaf from outside, or use the class and the attributes of a tensor.
    PyTorch's hooks return leaves as they are; of other tensors they lose class and attributes.
    """
    is_bare = type(tensor) is Tensor and not tensor.__dict__
    if tensor.is_leaf:
        return value.is_external or not is_bare
    if not is_bare:
        lost = f"its class {type(tensor).__name__}" if type(tensor) is not Tensor else "attributes"
        raise UnsupportedError(
            f"a custom autograd.Function saves a tensor with a history inside of a checkpointed "
            f"region; PyTorch's hooks on saved tensors lose {lost}. Save a plain tensor "
            "(tensor.as_subclass(torch.Tensor)) and keep the rest on ctx, or call the function "
            "outside of the region"
        )
    return False


# -- the recorder of a thread ----------------------------------------------------------------------


def recorder_of_this_thread() -> Recorder:
    """Return the recorder of this thread; it is on if a region is open in it."""
    try:
        recorder: Recorder = _threads.recorder
    except AttributeError:
        recorder = _threads.recorder = Recorder()
    return recorder


@contextmanager
def without_recorder() -> Iterator[None]:
    """Run code that the regions of this thread do not see; regions inside are regions of their own.

    A loop records for itself: to a region around it, what it makes is an external input.
    """
    outer = recorder_of_this_thread()
    if not outer.opened and not outer.idle:
        yield
        return
    _threads.recorder = Recorder()
    covered = outer._hooks_are_covered() if outer.opened else True
    if not covered:
        pop_saved_tensor_hooks()
    try:
        with _off(outer) if outer.opened else nullcontext():
            yield
    finally:
        if not covered:
            push_saved_tensor_hooks(outer._hook, unpack)
        _threads.recorder = outer


@contextmanager
def _off(recorder: Recorder) -> Iterator[None]:
    """Take a recorder off the stack of modes; those that the program has entered since stay on."""
    above = recorder._remove_mode()
    try:
        yield
    finally:
        for _ in above:
            pop_dispatch_mode(None)
        push_dispatch_mode(recorder)
        for mode in reversed(above):
            push_dispatch_mode(mode)


def _before_direct_write(tensor: Tensor) -> None:
    recorder = recorder_of_this_thread()
    if recorder.opened:
        recorder.before_direct_write(tensor)


def _after_optimizer_step() -> None:
    recorder_of_this_thread().end_iteration()


uncounted_writes.on_direct_write.append(_before_direct_write)
uncounted_writes.on_optimizer_step.append(_after_optimizer_step)
_getframe = sys._getframe
_FUNCTION_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_SIMPLE, _VIEW, _SIMPLE_UNLESS_RANDOM = Route.SIMPLE, Route.VIEW, Route.SIMPLE_UNLESS_RANDOM
_threads = threading.local()
_new_op = tuple.__new__  # quicker than Op(), which parses its arguments
