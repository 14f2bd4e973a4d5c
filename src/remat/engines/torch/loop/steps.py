"""The steps of a loop on tensors: what only PyTorch can know of them.

A step always runs in the same way, whether its tape is kept or not: with gradients on, over
leaves of its own that require grad exactly where they would in the plain loop. So a step that looks
at such things, or kernels that do, repeat themselves bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .... import trees
from ....errors import UnsupportedError
from ....loops import EngineSteps, HeldState, LoopCall, LoopPass, Measured, raised_in
from ..backend import has_global_module_hooks
from ..recording.threads import without_recorder
from .arrays import TorchLoopArrays, TorchOutputs
from .autocast import AutocastState
from .autograd_node import connect, read_only_checkpoint
from .captures import CapturedTensors, replace_for_outer_loops
from .gradient_accumulator import GradientAccumulator
from .reach import Reach
from .side_effects import SideEffects, StepMonitor
from .states import (
    Gradients,
    LiveState,
    StepGraph,
    TensorContext,
    TorchState,
    as_non_leaf,
    compact,
    is_floating,
    is_object,
    is_tracked,
    refuse_graph_inside,
    refuse_shared,
    state_of,
    tensors_of,
    versions_of,
)

__all__ = ["TorchSteps"]

TorchRecorded = tuple[StepGraph, TorchState]  # a tape, and the state after


class TorchSteps(EngineSteps[LiveState, TensorContext, StepGraph]):
    """A loop body over tensors: runs and records steps, and goes backward through them."""

    arrays = TorchLoopArrays()
    records_runs = True
    outputs: TorchOutputs

    def __init__(self, call: LoopCall) -> None:
        if not call.takes_any_state:
            _check_state(call.leaves)
        functions = [function for (function,) in call.functions]
        reach = Reach([*functions, *filter(is_object, call.given)])
        inputs = list(map(_detached, call.xs))
        super().__init__(call, inputs, reach.numbers)
        self.traced = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self.captures = CapturedTensors(reach)
        self.accumulator = GradientAccumulator(self.captures)
        self.effects = SideEffects(reach)
        self._tracked_inputs = list(map(is_tracked, call.xs))
        self._writes_in_place = True  # until step 0 shows that it does not
        self._monitor: StepMonitor | None = None  # of the first step
        self._has_more = bool(inputs) or self.outputs.wanted  # than a state
        self.needs_gradients = False
        self._autocast = AutocastState()
        self._objects: set[int] = set()  # leaves of the initial state, by id
        self._used_state: set[int] = set()  # positions of leaves of the initial state
        self._used_inputs: set[int] = set()  # positions of leaves of xs
        self.reset_gradients()

    def _new_outputs(self, call: LoopCall) -> TorchOutputs:
        return TorchOutputs(self.arrays, call.steps, wanted=call.xs_structure is not None)

    def reset_gradients(self) -> None:
        super().reset_gradients()
        self.accumulator.reset()

    # -- runs of steps -------------------------------------------------------------------------

    def _advance(self, state: LiveState, start: int, stop: int) -> LiveState:
        own = self._own(state.leaves, state.tracked)
        if self._is_bare and not self.effects.monitors_all_steps:
            state, start = self._advance_bare(own[0], start, stop), stop
        for step in range(start, stop):
            inputs = self._take(step)
            is_new = step >= self._reached
            results, outputs = self._run(own, inputs, step, is_new=is_new)
            known = len(self.captures)
            if is_new:
                self._search(results + outputs, own, inputs, step)
            if outputs:
                self.outputs.keep(outputs, step)
            own = []
            if step + 1 < stop:
                own = self._own_of(results)
            else:
                state = state_of(results)
            del inputs, results, outputs  # and with them the graph
            if len(self.captures) > known:
                self.captures.release(known)
        return state

    def hold(self, state: LiveState) -> TorchState:
        # No copy: a step that writes in place gets copies.
        return self._held(state.leaves, state.tracked)

    def hold_final(self, state: LiveState) -> TorchState:
        return self._held(state.leaves, state.tracked)

    def resume(self, held: TorchState) -> LiveState:
        self._go_to(held)
        return LiveState(held.leaves, held.context.tracked)

    def _record(self, held: TorchState, start: int, stop: int) -> tuple[StepGraph, TorchState]:
        self._go_to(held)
        own = self._own(held.leaves, held.context.tracked)
        results, inputs, outputs = own, [], []
        is_new = start >= self._reached
        has_doubt = self._numbers.changed
        used: dict[int, None] = {}
        first = start
        if self._is_bare and not is_new and not has_doubt:
            results, first = [self._record_bare(own[0], start, stop)], stop
        for step in range(first, stop):
            inputs.append(self._take(step))
            before = results
            results, output = self._run(results, inputs[-1], step, is_new=is_new)
            if is_new:
                used |= dict.fromkeys(self._search(results + output, before, inputs[-1], step))
            elif has_doubt:
                self._refuse_doubt(step, *(list(filter(is_tracked, v)) for v in (before, results)))
            if step + 1 < stop:
                results = [compact(r) if isinstance(r, Tensor) else r for r in results]
            if output:
                self.outputs.keep(output, step)
            outputs.append(output)
        if not is_new:
            ends = tensors_of([*results, *itertools.chain(*outputs)])
            mine = itertools.chain(own, *inputs)
            used = dict.fromkeys(self.captures.captures_used_by(ends, mine, start, stop))
        self.captures.recorded(used)
        after = self._held(*state_of(results))
        return StepGraph(own, inputs, results, outputs, list(used)), after

    def _go_back(self, tape: StepGraph, seeds: Gradients) -> Gradients:
        return self.accumulator.through(tape, seeds)

    def join(self, leaves: list[Any], context: TensorContext) -> TorchState:
        return HeldState(leaves, context._replace(versions=versions_of(leaves)))

    def now(self, held: TorchState) -> TorchState:
        return self._held(held.leaves, held.context.tracked)

    @property
    def is_random(self) -> bool:
        return self.effects.is_random

    def is_unmodified(self, held: TorchState) -> bool:
        return versions_of(held.leaves) == held.context.versions

    def state_bytes(self, held: TorchState) -> int:
        return max(1, sum(map(self.arrays.nbytes, held.leaves)))

    # -- a whole pass --------------------------------------------------------------------------

    def tree(self, state: LiveState) -> Any:
        return trees.unflatten(self.structure, state.leaves)

    def initial(self, leaves: list[Any]) -> TorchState:
        tracked = [self.traced and is_tracked(leaf) for leaf in leaves]
        once = {id(leaf): _detached(leaf) for leaf in leaves}  # one tensor that occurs twice is one
        detached = [once[id(leaf)] for leaf in leaves]
        self._objects = set(map(id, detached))
        self.needs_gradients = any(tracked) or any(self._tracked_inputs)
        return self._held(detached, tracked)

    def connect(self, loop: LoopPass[TensorContext], given: list[Any]) -> list[Any]:
        loop.forward()
        assert loop.run is not None
        count = len(loop.initial.leaves)
        if not loop.run.steps:
            return given[:count]
        sources = [*given, *replace_for_outer_loops(self.captures.sources)]
        state = [i in self._used_state for i in range(count)]
        inputs = [i in self._used_inputs for i in range(len(given) - count)]
        used = [*state, *inputs, *self.captures.used]
        return connect(loop, sources, used, self.outputs.tracked)

    def viewer(self, given: list[Any], *, traced: bool) -> Callable[[Any], Any]:
        anchor = torch.zeros((), requires_grad=True) if traced else None
        return partial(read_only_checkpoint, anchor=anchor)

    def made(self, given: list[Any]) -> Mapping[Hashable, int]:
        made = [value for value in given if is_tracked(value) and not value.is_leaf]
        return {("torch", key): size for key, size in _storages(made).items()}

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with without_recorder(), self._autocast, self.captures.active():
            yield

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        with (
            without_recorder(),
            self._autocast,
            torch.enable_grad(),
            self.captures.active(),
            self.captures.no_new_hooks(),
            self.effects.undone(),
        ):
            yield

    def end_forward(self, initial: TorchState) -> None:
        self.captures.complete()
        self.outputs.complete()
        self.effects.complete(initial.context.effects)

    def begin_backward(self) -> None:
        self.captures.check()
        self._numbers.update()

    def end_backward(self) -> None:
        self.captures.check_recorded()

    def restart(self, initial: TorchState) -> None:
        self.effects.restore(initial.context.effects)

    def _captured_gradients(self) -> list[Tensor | None]:
        return self.accumulator.gradients

    def resident_bytes(self, held: TorchState) -> int:
        return sum(_storages(tensors_of(held.leaves)).values())

    def _outputs_of(self, initial: TorchState, entries: list[Any]) -> list[Any]:
        held = self._held(initial.leaves, [False] * len(initial.leaves))
        with without_recorder(), torch.no_grad():
            try:
                own = self._own(held.leaves, held.context.tracked)
                return self._run(own, entries, 0, is_new=True)[1]
            finally:
                self.effects.restore(held.context.effects)

    # -- a run of a step -----------------------------------------------------------------------

    @property
    def _is_bare(self) -> bool:
        """Whether a step takes one tensor and returns one, and nothing else has to be handled.

        Such steps may be short, so their overhead counts.
        """
        is_plain = not self._writes_in_place and not has_global_module_hooks()
        return self._is_single and not self._has_more and is_plain

    def _advance_bare(self, state: Any, start: int, stop: int) -> LiveState:
        """Run such steps, each with a graph of its own, which shows what it closes over."""
        captures, tracked = self.captures, False
        for step in range(start, stop):
            known, is_new = len(captures), step >= self._reached
            versions = versions_of([state]) if is_new else None
            new = self._call_bare(state, step)
            if is_new:
                if versions_of([state]) != versions:
                    raise _writes_in_place(step)
                self._search([new], [state], [], step)
            (state,), (tracked,) = state_of([new])
            if tracked and step + 1 < stop:
                captures.guard_leaf(state.requires_grad_())
            del new  # and with it the graph
            if len(captures) > known:
                captures.release(known)
        return LiveState([state], [tracked])

    def _record_bare(self, state: Any, start: int, stop: int) -> Any:
        """Run such steps again, with one graph."""
        for step in range(start, stop - 1):
            state = self._call_bare(state, step)
            if isinstance(state, Tensor):
                state = compact(state)
        return self._call_bare(state, stop - 1)

    def _call_bare(self, state: Any, step: int) -> Any:
        try:
            new = self.call(state, None)[0]
        except Exception as error:
            error.add_note(raised_in(step))
            raise
        if type(new) is not Tensor:
            new = self._checked(new, step)[0]
        return self.captures.replaced([new])[0]

    def _run(
        self, own: list[Any], inputs: list[Any], step: int, *, is_new: bool
    ) -> tuple[list[Any], list[Any]]:
        """Run a step over these leaves; return its results and its outputs, with their graph."""
        # A step may write to arrays of NumPy, which have no version: it gets copies.
        given = [x.copy() if isinstance(x, np.ndarray) else x for x in (*own, *inputs)]
        versions = versions_of(given) if is_new else []
        if self._writes_in_place:
            copies = {id(leaf): leaf.clone() for leaf in given if isinstance(leaf, Tensor)}
            given = [copies.get(id(leaf), leaf) for leaf in given]
        elif has_global_module_hooks():
            given = [as_non_leaf(leaf) for leaf in given]
        x = None
        state = given[0] if self._is_single else trees.unflatten(self.structure, given[: len(own)])
        if self.inputs.structure is not None:
            x = trees.unflatten(self.inputs.structure, given[len(own) :])
        try:
            if is_new and (self.effects.monitors_all_steps or not self._reached):
                with self._monitored(given):
                    new, output = self.call(state, x)
            else:
                new, output = self.call(state, x)
        except Exception as error:
            error.add_note(raised_in(step))
            raise
        # (A step that does not write in place in the forward pass does not do so later.)
        if is_new and versions_of(own + inputs if inputs else own) != versions:
            raise _writes_in_place(step)
        results = [new] if self._is_single and type(new) is Tensor else self._checked(new, step)
        if is_new and self._writes_in_place:
            refuse_shared(results, step)
            if not step:
                refuse_shared(own, step)
        outputs = self.outputs.flat(output) if self.outputs.wanted else []
        return self.captures.replaced(results), self.captures.replaced(outputs)

    def _search(self, ends: list[Any], state: list[Any], inputs: list[Any], step: int) -> list[int]:
        """Find what a step that was run for the first time closes over, and what it uses."""
        tensors = tensors_of(ends)
        if not self._reached:
            self.needs_gradients |= any(tensor.requires_grad for tensor in tensors)
        found = self.captures.captured_by(tensors, tensors_of(state + inputs), step)
        if not step:
            self._used_state.update(self.captures.was_given(state))
        if inputs:
            self._used_inputs.update(self.captures.was_given(inputs))
        self._reached = step + 1
        return found

    def _own(self, leaves: list[Any], tracked: list[bool]) -> list[Any]:
        """Return a state as leaves of a graph, which require grad where the state had a history."""
        known: dict[int, Any] = {}  # what is one tensor stays one tensor
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                known[id(leaf)] = leaf.detach()
        return self._marked(LiveState([known.get(id(leaf), leaf) for leaf in leaves], tracked))

    def _own_of(self, results: list[Any]) -> list[Any]:
        """Return what a step has made as leaves of the next one's graph."""
        result = results[0] if self._is_single else None
        if type(result) is not Tensor:
            return self._marked(state_of(results))
        own = compact(result.detach())
        if result.requires_grad:
            self.captures.guard_leaf(own.requires_grad_())
        return [own]

    def _marked(self, state: LiveState) -> list[Any]:
        """Make the tensors of a state leaves that require grad where they had a history."""
        for leaf, tracked in zip(state.leaves, state.tracked, strict=True):
            if tracked:
                self.captures.guard_leaf(leaf.requires_grad_())
        return state.leaves

    def _take(self, step: int) -> list[Any]:
        """Return the entries of `xs` for a step, as leaves of its graph."""
        if not self.inputs.leaves:
            return []
        entries = self.inputs.take(step)
        for entry, tracked in zip(entries, self._tracked_inputs, strict=True):
            if tracked:
                self.captures.guard_leaf(entry.requires_grad_())
        return entries

    def _monitored(self, given: list[Any]) -> AbstractContextManager[Any]:
        """Monitor step 0, or all steps of the forward pass."""
        monitor = StepMonitor(given)
        if not self._reached:
            self._monitor = monitor
        return _MonitoredRun(self, monitor)

    def record_effects(self, monitor: StepMonitor) -> None:
        """Note the side effects of a step."""
        if monitor is self._monitor:
            self._writes_in_place = monitor.writes_in_place
        self.effects.add(monitor)

    def _checked(self, state: Any, step: int) -> list[Any]:
        leaves, structure = trees.flatten(state)
        self._check_structure(structure, step)
        for leaf in leaves:
            if id(leaf) not in self._objects:
                refuse_graph_inside(leaf, f"step {step}")
        return leaves

    # -- what belongs to a state ---------------------------------------------------------------

    def _held(self, leaves: list[Any], tracked: list[bool]) -> TorchState:
        context = TensorContext(tracked, versions_of(leaves), self.effects.snapshot())
        return HeldState(leaves, context)

    def _go_to(self, held: TorchState) -> None:
        if not self.is_unmodified(held):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a state that a checkpointed loop holds was written to since; "
                "write to a copy, or after the backward pass"
            )
        if self._reached:
            self.effects.restore(held.context.effects)

    # -- measuring -----------------------------------------------------------------------------

    def measure(self, initial: TorchState, *, exactly: bool) -> tuple[TorchRecorded, Measured]:
        state_bytes = self.state_bytes(initial)
        recorded = self.record(initial, 0, 1)
        first = self._monitor
        assert first is not None
        made = self.plain_bytes = max(first.live_bytes, state_bytes)
        captured, peak = sum(map(self.arrays.nbytes, self.captures.sources)), None
        if exactly:
            with first:
                self.accumulator.dry_run(recorded[0])
            peak = first.peak_bytes + 2 * captured
        return recorded, Measured(
            state_bytes,
            made + state_bytes,
            self.working_bytes(state_bytes, made, captured, peak=peak),
            recording_cost=_RECORDING_COST,
        )


class _MonitoredRun:
    """A run of a step under a monitor; its side effects are noted afterwards."""

    def __init__(self, steps: TorchSteps, monitor: StepMonitor) -> None:
        self._steps = steps
        self._monitor = monitor

    def __enter__(self) -> None:
        self._monitor.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._monitor.__exit__(*error)
        self._steps.record_effects(self._monitor)


def _writes_in_place(step: int) -> UnsupportedError:
    return UnsupportedError(
        f"step {step} writes to its state or to its input in place, which step 0 did not "
        "do; write to a copy (x = x + 1 instead of x += 1), or do so in every step"
    )


# Calling autograd costs a few evaluations of a small step and hardly any of a large one. Counted as
# one it saves a half of the calls for a thousandth of the evaluations.
_RECORDING_COST = 1


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    """Return the bytes of storages, by address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _check_state(leaves: list[Any]) -> None:
    if not any(is_floating(leaf) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise TypeError(
            f"the state holds no floating-point tensor, only {kinds}: there is nothing to "
            "differentiate"
        )
