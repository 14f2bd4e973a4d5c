"""The recorder: a dispatch mode that records ops, and hooks that replace what autograd saves.

A recorder is active while at least one region is open. It sees every op below autograd and
autocast, with the same tensor objects as autograd.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ....core.records import Made, Op, Operand, Origin, Value, View, values_in
from ....core.region import BETWEEN, ExpectedOp, replace_saves
from ....core.retention import drop, keep_by_products
from ....errors import UnsupportedError
from ..adapter import TORCH
from ..backend import (
    MODULE_CALL,
    TorchDispatchMode,
    count_function_modes,
    current_graph_task,
    keep_compiler_out,
    push_dispatch_mode,
    push_saved_tensor_hooks,
)
from ..memory import uncounted_writes
from ..memory.geometry import geometry_of
from ..memory.tensors import EXACT_TYPES, alias, flat, is_plain, version_of
from ..memory.values import note_views
from ..op_facts import FACTS
from ..output_reuse import OutputReuse
from ..randomness import Draw, Unrepeatable, draw, generator_of
from ..region import TorchRegion, TorchSavedTensor, unpack
from ..retention import hold
from ..schema import FUNCTION, Route, SchemaTraits, call_in_mode, traits_by_id, traits_of
from ..source_location import SourceLocation, caller, user_code
from ..streams import Streams, streams_in_use
from .stacks import are_hooks_on_top, count_hooks, is_mode_on, remove_hooks, remove_mode
from .storages import StorageTable
from .views import run_view
from .writes import WriteTracker

__all__ = ["Recorder"]

Kwargs = dict[str, Any]


class Recorder(TorchDispatchMode):
    """Records ops while at least one region is open in its thread."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[TorchRegion] = []
        self.region: TorchRegion  # the innermost of them
        self.idle = 0  # open regions that have no effect, because grad mode is off
        self._reuse = OutputReuse()
        # By a weak reference: a thread, and a loop in a region, has a recorder of its own.
        self.table = StorageTable(self._reuse, partial(_function_returned, ref(self)))
        self._writes = WriteTracker(self.table)
        self._streams: Streams | None = None  # if an accelerator is in use
        self._ops = 0
        self.iteration_start = 0  # the number of the first op since backward last began

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # avoids a wrapper around every op that disables the compiler

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled; its outputs are external inputs

    @property
    def op_count(self) -> int:
        """The number of ops recorded in this thread so far."""
        return self._ops

    # -- regions open and close in order; the outermost activates the recorder ---------------------

    def open(self, region: TorchRegion) -> None:
        region.start = self._ops
        if self.opened:
            region.parent = self.region
            self.region.opened_inside(region)
            region.has_own_hooks = not are_hooks_on_top(self.pack)
            if region.has_own_hooks:
                push_saved_tensor_hooks(self.pack, unpack)
        else:
            try:
                push_saved_tensor_hooks(self.pack, unpack)
            except RuntimeError as error:  # the program has disabled them
                raise UnsupportedError(
                    f"checkpointing needs saved-tensor hooks, which are disabled here: {error}"
                ) from error
            uncounted_writes.install_hooks()
            keep_compiler_out()
            region.backward_began = self.end_iteration
            self._streams = streams_in_use()
            push_dispatch_mode(self)
        region.streams = self._streams
        self.opened.append(region)
        self.region = region

    def close(self, region: TorchRegion) -> None:
        if region not in self.opened:
            return  # it was closed with an outer region
        depth = self.opened.index(region)
        try:
            self._close(region)
        except BaseException:
            del self.opened[depth:]
            self._repair()
            raise

    def _close(self, region: TorchRegion) -> None:
        while True:  # also close inner regions that were left open
            innermost = self.opened.pop()
            if innermost.has_own_hooks:
                remove_hooks(self.pack)
            innermost.close()
            if innermost is region:
                break
        if self.opened:
            self.region = self.opened[-1]
            return
        remove_mode(self)
        remove_hooks(self.pack)
        self.__dict__.pop("region", None)
        self._reuse.closed(region)
        self.table.reset()

    def unwind(self, depth: int, idle: int) -> None:
        """Close what was opened above a depth, whatever an exception has left of it.

        An interrupt may come at any line of `open` and `close`.
        """
        self.idle = idle
        if len(self.opened) > depth:
            self.close(self.opened[depth])
        self._repair()

    def _repair(self) -> None:
        """Set the hooks and the mode that the open regions need, and no others."""
        needed = bool(self.opened) + sum(region.has_own_hooks for region in self.opened[1:])
        for _ in range(count_hooks(self.pack) - needed):
            remove_hooks(self.pack)
        if self.opened:
            self.region = self.opened[-1]
            return
        if is_mode_on(self):
            remove_mode(self)
        self.__dict__.pop("region", None)
        self.table.reset()

    def end_iteration(self) -> None:
        """Forget how values were computed: what is read next is an external input.

        Called when a backward pass without create_graph begins, and after an optimizer step.
        Otherwise a scope around a training loop would keep the ops of all iterations alive through
        tensors that outlive an iteration: optimizer state, a running total.
        """
        self.iteration_start = self._ops
        if self.opened:
            self.table.reset()

    # -- what autograd saves -----------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> TorchSavedTensor | Value:
        """Return what autograd holds instead of a tensor: the pack hook."""
        region = self.region
        operand = self.table.operand(tensor)
        value = operand if type(operand) is Value else operand.value
        if value.origin is _PARAMETER and operand is value and region.observer is None:
            return value  # the common case: it is held, so it needs no placeholder
        if type(operand) is View and value.op is not None and _is_detached(value, tensor):
            operand = value = self.function_returned(value, tensor)
        # A custom Function may save it, which must get leaves back as they are. Saved-tensor hooks
        # preserve leaves; other tensors lose their class and attributes.
        is_bare = type(tensor) is Tensor and not tensor.__dict__
        if value.origin.is_external or (tensor.is_leaf and not is_bare):
            return self._pack_external(operand, value, tensor, is_bare=is_bare)
        saved: TorchSavedTensor = region.save(operand, tensor)
        if not tensor.is_contiguous():
            saved.stride = tensor.stride()
        if not is_bare:
            saved.remark = _beside_data(tensor)
        return saved

    def _pack_external(
        self, operand: Operand, value: Value, tensor: Tensor, *, is_bare: bool
    ) -> TorchSavedTensor | Value:
        """Return what autograd holds instead of a tensor that is held anyway."""
        region, is_leaf = self.region, tensor.is_leaf
        if region.settled is not None and not (is_leaf or value.is_leaf):
            region.leave_plan()  # no plan knows that it is needed
        if region.observer is None and operand is value and is_bare and not is_leaf:
            return value
        saved: TorchSavedTensor = (region.outside or region).make_saved(operand)
        if is_leaf:
            saved.keep_leaf(tensor)
        elif not is_bare:
            saved.remark = _beside_data(tensor)
        if region.observer is not None:
            region.observer.saved(saved, tensor)
        return saved

    def function_returned(self, before: Value, tensor: Tensor) -> Value:
        """A custom Function has returned or saved a tensor over memory that ops have written.

        Its forward may have called a kernel that wrote to this memory, which neither PyTorch nor a
        mode sees. So what is there now is held, and never recomputed from what was there before.
        """
        if self.region.settled is not None:
            self.region.leave_plan()
        drop(before)
        note_views(before)
        self.table.overwritten(before)
        location = caller(_getframe(1))
        op = Op(
            self._ops,
            FUNCTION,
            None,
            [View(before, geometry_of(tensor))],
            [before],
            None,
            None,
            location,
        )
        self._ops += 1
        after = Value(ref(tensor), version_of(tensor))
        after.argument, after.is_shared = (0, 0), before.is_shared
        self.table.keep(after, tensor)
        self.table.note(tensor.untyped_storage(), after)
        replace_saves(before, after)
        if self.region.is_attended:
            self._attend(op, [(after, tensor)], (tensor,), {}, tensor, 0.0)
        return after

    def mark(self, tensor: Tensor) -> None:
        """Keep the current value of a tensor, although it could be recomputed."""
        if self.region.settled is not None:
            self.region.leave_plan()
        operand = self.table.operand(tensor)
        value = operand if type(operand) is Value else operand.value
        value.must_recompute = False
        if value.held is None:
            made = value.tensor()
            if made is None:
                self.table.first_seen(
                    tensor
                )  # its geometry is unknown: treat it as an external input
            else:
                hold(value, alias(made))
                self.region.marked(value)

    def name(self, tensor: Tensor, name: str) -> None:
        """Give a tensor a name for policies and reports."""
        if self.region.settled is not None:
            return  # nothing is decided or reported any more
        operand = self.table.operand(tensor)
        value = operand if type(operand) is Value else operand.value
        value.name = name
        retention = self.region.retention
        made = value.tensor()
        if retention is not None and made is not None and value.op is not None:
            retention.named(value, made)
            self.region.marked(value)

    def before_direct_write(self, tensor: Tensor) -> None:
        """Called before a write to a tensor that is no op."""
        self._writes.before_direct_write(tensor)

    # -- what ops do -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        traits = traits_by_id.get(id(func)) or traits_of(func)
        region, settled = self.region, self.region.settled
        if current_graph_task() != -1 and not torch.is_grad_enabled():
            return self._run_in_backward(traits, args, kwargs or {})
        expected = None if settled is None else settled.next(func, args)
        if expected is None and (settled is not None or region.admits is not None):
            expected = self._ask(region, traits, args, kwargs or {})
        if expected is not None:
            if not expected.is_recorded:
                return self._run_expected(expected, traits, args, kwargs or {})
            assert region.settled is not None
            region.settled.op_number, region.is_attended = self._ops, expected.is_attended
        if traits.route is _SIMPLE and not (kwargs or types):
            out = self._run_simple(traits, args)
        elif traits.route is _VIEW:
            return run_view(self.table, traits, args, kwargs or {})
        elif (
            traits.route is _SIMPLE_UNLESS_RANDOM
            and not (kwargs or types)
            and not traits.draws(args, {})
        ):
            out = self._run_simple(traits, args)
        else:
            out = self._run(traits, args, kwargs or {}, keep=traits.opaque or bool(types))
        if (
            expected is not None
            and type(out) is Tensor
            and 0 <= expected.nbytes != out.untyped_storage().nbytes()
        ):
            region.leave_plan()
        return out

    def _ask(
        self, region: TorchRegion, traits: SchemaTraits, args: tuple[Any, ...], kwargs: Kwargs
    ) -> ExpectedOp | None:
        """Ask a region about an op: whether it belongs to it, and to its plan."""
        if traits.route is _VIEW or traits.reshapes_in_place:
            return None
        admits = region.admits if current_graph_task() == -1 else None
        if admits is not None and not admits(self.table, traits.func, args, kwargs):
            return BETWEEN
        return region.ran_unexpected(traits, args, kwargs) if region.settled is not None else None

    def _run_expected(
        self, expected: ExpectedOp, traits: SchemaTraits, args: tuple[Any, ...], kwargs: Kwargs
    ) -> Any:
        """Run an op that is not recorded: no recomputation replays it. Its output may be held."""
        if expected is BETWEEN:
            return self._run_between(traits, args, kwargs)
        settled = self.region.settled
        assert settled is not None
        settled.op_number = -1
        out = traits.call(*args, **kwargs)
        if type(out) is Tensor:
            if expected.is_held:
                settled.held = self.table.made_and_held(out)
            if 0 <= expected.nbytes != out.untyped_storage().nbytes():
                self.region.leave_plan()
        return out

    def _run_simple(self, traits: SchemaTraits, args: tuple[Any, ...]) -> Any:
        """Run an op that reads tensors and allocates its output: the common case, inlined."""
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
        is_attended = self.region.is_attended
        began = time.perf_counter() if is_attended else 0.0
        out = call(*args)
        seconds = time.perf_counter() - began if is_attended else 0.0
        frame = _getframe(2)
        code, back = frame.f_code, frame.f_back
        if id(code) in user_code and (back is None or back.f_code is not MODULE_CALL):
            location: SourceLocation = code, frame.f_lasti, None  # `caller`, inlined
        else:
            location = caller(frame)
        if self._streams is not None:
            call = self._streams.bound(call, out)
        op = _new_op(Op, (self._ops, traits, call, encoded, reads, None, None, location))
        self._ops += 1
        if type(out) is Tensor and not is_attended:
            self.table.made(out, op, 0)
            return out
        made = self._made_several(out, op, keep=False)
        if is_attended:
            self._attend(op, made, args, {}, out, seconds)
        return out

    def _run_in_backward(self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run an op of a backward pass without create_graph. It is not recorded."""
        region = self.region
        if region.settled is not None and self.table.values and region.settled.is_complete:
            region.backward_runs()
        if region.observer is None and traits.route is not _GENERAL:
            return traits.call(*args, **kwargs)
        if traits.may_write and not traits.reshapes_in_place:
            return self._run_unrecorded(traits, args, kwargs)
        out = call_in_mode(traits, partial(traits.call, *args, **kwargs))
        if self.region.observer is not None and traits.makes_memory:
            made = (tensor for tensor in flat(out) if isinstance(tensor, Tensor))
            self.region.observer.ran_in_backward(made)
        return out

    def _run_between(self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run an op between two passes, of which nothing is remembered."""
        if not (traits.may_write or traits.reshapes_in_place or traits.uses_conjugates):
            return traits.call(*args, **kwargs)
        out = self._run_unrecorded(traits, args, kwargs)
        if self.table.values or self.table.parameters:  # what it has written to
            self.table.reset()
        return out

    def _run_unrecorded(self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run an op that belongs to no region: what it makes is an external input when it is read.

        Values that it overwrites may be needed, so writes are tracked.
        """
        if traits.reshapes_in_place and is_plain(args[0]):
            return run_view(self.table, traits, args, kwargs)
        if not (traits.may_write and (self.table.values or self.table.parameters)):
            return call_in_mode(traits, partial(traits.call, *args, **kwargs))
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

    def _run(
        self, traits: SchemaTraits, args: tuple[Any, ...], kwargs: Kwargs, *, keep: bool
    ) -> Any:
        """Run any op and record it: writes, random numbers, keywords. `keep` keeps its outputs."""
        if traits.reshapes_in_place and is_plain(args[0]):
            return run_view(self.table, traits, args, kwargs)
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
            # What it has written is unknown: treat its targets as external inputs.
            for write in written:
                if is_plain(write.tensor):
                    table.forget(write.tensor.untyped_storage())
            raise
        finally:
            for key in overlapped:
                table.values.pop(key, None)
        seconds = time.perf_counter() - began
        if isinstance(drawn, Unrepeatable):
            drawn, keep = None, True
        reads = [*values_in(encoded), *values_in(keywords.values())]
        location = caller(_getframe(2))
        replayed = traits.call if self._streams is None else self._streams.bound(traits.call, out)
        op = Op(self._ops, traits, replayed, encoded, reads, keywords or None, drawn, location)
        self._ops += 1
        made = [(writes.after(op, write, keep=keep), write.tensor) for write in written]
        if traits.saves_before_write:
            for write, (after, _) in zip(written, made, strict=False):
                self.region.replace(write.before, after)
        made += self._made_several(out, op, keep=keep)
        if drawn is not None:
            self._keep_random_numbers(drawn, made)
        self._attend(op, made, args, kwargs, out, seconds)
        return out

    def _attend(
        self, op: Op, made: Made, args: Any, kwargs: Kwargs, out: Any, seconds: float
    ) -> None:
        """Ask the policy of the region, and notify observers."""
        if self.region.settled is not None:
            self.region.ran_expected(made)
            return
        retention = self.region.retention
        if retention is not None and retention.asks_about_made:
            computed = [(value, tensor) for value, tensor in made if value.op is op]
            if computed:
                retention.made(computed, args, kwargs, out)
        self.opened[0].ran_on(args, kwargs)
        has_grad = FACTS.has_gradient(args, kwargs)
        for region in self.opened:
            if region.observer is not None:
                region.observer.ran(op, made, seconds, has_grad=has_grad)

    def _made_several(self, out: Any, op: Op, *, keep: bool) -> Made:
        made: Made = []
        for number, tensor in enumerate(flat(out)):
            if isinstance(tensor, Tensor) and is_plain(tensor):
                value = self.table.made(tensor, op, number)
                if value is not None:
                    made.append((value, tensor))
                    if op.traits.leaves_uninitialized or (
                        op.traits.is_scratch and not torch.is_grad_enabled()
                    ):
                        value.origin = Origin.UNINITIALIZED
                    if keep:
                        self.table.keep(value, tensor)
        if len(made) > 1 and not keep:
            keep_by_products(made, TORCH)
        return made

    def _keep_random_numbers(self, drawn: Draw, made: Made) -> None:
        """Hold random numbers smaller than the generator state, or if the region asks for it."""
        nbytes = sum(tensor.untyped_storage().nbytes() for _, tensor in made)
        if self.region.preserve_rng_state and nbytes > drawn.before.nbytes:
            return
        for value, tensor in made:
            if not value.origin.is_external:
                self.table.keep(value, tensor)
                assert value.held is not None
                value.held.version = value.version


def _function_returned(recorder: ref[Recorder], before: Value, tensor: Tensor) -> Value:
    recording = recorder()
    assert recording is not None  # it owns the table that calls this
    return recording.function_returned(before, tensor)


def _call(
    traits: SchemaTraits, args: tuple[Any, ...], kwargs: Kwargs
) -> tuple[Any, Draw | Unrepeatable | None]:
    """Call an op; return its output, and how to draw its random numbers again."""
    call = partial(traits.call, *args, **kwargs)
    if traits.is_random and traits.draws(args, kwargs):
        return draw(generator_of(args, kwargs), call)
    return call_in_mode(traits, call), None


def _is_detached(value: Value, tensor: Tensor) -> bool:
    """Return whether a tensor without a graph is over the memory of one that has a graph.

    A custom Function may have written to it before it saved it so: a fused loss leaves its gradient
    where its input was.
    """
    made = value.tensor()
    return made is not None and made.requires_grad and not tensor.requires_grad


def _beside_data(tensor: Tensor) -> str:
    """Return what saved-tensor hooks lose of a tensor that is no leaf."""
    return f"its class {type(tensor).__name__}" if type(tensor) is not Tensor else "attributes"


_getframe = sys._getframe
_SIMPLE, _VIEW, _SIMPLE_UNLESS_RANDOM = Route.SIMPLE, Route.VIEW, Route.SIMPLE_UNLESS_RANDOM
_GENERAL, _PARAMETER = Route.GENERAL, Origin.PARAMETER
_new_op = tuple.__new__  # faster than Op(), which parses its arguments
