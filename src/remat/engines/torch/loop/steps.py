"""The steps of a loop on tensors: what the loop runner asks of an engine.

A step always runs in the same way, whether its tape is kept or not: with gradients on, over
leaves of its own that require grad exactly where they would in the plain loop. So a step that looks
at such things, or kernels that do, repeat themselves bit for bit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .... import trees
from ....errors import UnsupportedError
from ....loops import Measured
from ....loops.differences import state_difference
from ....stores import Arrays
from ..arrays import TorchArrays
from ..backend import has_global_module_hooks
from ..comparing import difference_of
from ..recording.threads import without_recorder
from .autocast import AutocastState
from .captures import Captures
from .gradient_accumulator import GradientAccumulator
from .reach import Reach
from .scans import Outputs, PerStep
from .side_effects import SideEffects, StepMonitor
from .states import (
    Gradients,
    HeldState,
    LiveState,
    Recording,
    as_non_leaf,
    compact,
    refuse_graph_inside,
    refuse_shared,
    state_of,
    tensors_of,
    versions_of,
)

__all__ = ["Steps"]


class Steps:
    """A loop body over tensors: runs and records steps, and goes backward through them.

    `call(state, x)` returns the next state and an output (None for plain loops).
    """

    arrays: Arrays = TorchArrays()
    records_runs = True

    def __init__(
        self,
        call: Callable[[Any, Any], tuple[Any, Any]],
        structure: trees.Structure,
        reach: Reach,
        inputs: PerStep,
        outputs: Outputs,
    ) -> None:
        self.call = call
        self.structure = structure
        self.captures = Captures(reach)
        self.accumulator = GradientAccumulator(self.captures)
        self.effects = SideEffects(reach)
        self.scalars = reach.scalars
        self.inputs = inputs
        self.outputs = outputs
        self.plain_bytes = 0  # what a step adds to a plain pass, if it was measured
        self.seconds = 0.0  # that steps have taken, without their backward
        self._writes_in_place = True  # until step 0 shows that it does not
        self._monitor: StepMonitor | None = None  # of the first step
        self._reached = 0  # how far the loop was ever run
        self._single = structure.is_leaf()
        self._has_more = bool(inputs.leaves) or outputs.wanted  # than a state
        self._needs_gradients = False
        self._autocast = AutocastState()
        self._objects: set[int] = set()  # leaves of the initial state, by id
        self.uses_state: set[int] = set()  # positions of leaves of the initial state
        self.uses_inputs: set[int] = set()  # positions of leaves of xs
        self.reset_gradients()

    def reset_gradients(self) -> None:
        """Forget the gradients gradients so far."""
        self.accumulator.reset()
        self.inputs.reset_gradients()

    # -- operations ----------------------------------------------------------------------------

    def initial(self, leaves: list[Any], tracked: list[bool]) -> HeldState:
        """Return the state that the loop starts from."""
        state = self._held(leaves, tracked)
        self._objects = {id(leaf) for leaf in leaves}
        self._needs_gradients = any(tracked) or any(self.inputs.tracked)
        return state

    def advance(self, state: LiveState, start: int, stop: int) -> LiveState:
        started = time.perf_counter()
        own = self._own(state)
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
        self.seconds += time.perf_counter() - started
        return state

    def hold(self, state: LiveState) -> HeldState:
        # No copy: a step that writes in place gets copies.
        return self._held(state.leaves, state.tracked)

    hold_final = hold

    def resume(self, held: HeldState) -> LiveState:
        self._go_to(held)
        return LiveState(held.leaves, held.tracked)

    def record(self, held: HeldState, start: int, stop: int) -> Recording:
        started = time.perf_counter()
        self._go_to(held)
        own = self._own(held)
        results, inputs, outputs = own, [], []
        is_new = start >= self._reached
        checks_scalars = self.scalars.changed
        used: dict[int, None] = {}
        first = start
        if self._is_bare and not is_new and not checks_scalars:
            results, first = [self._record_bare(own[0], start, stop)], stop
        for step in range(first, stop):
            inputs.append(self._take(step))
            before = results
            results, output = self._run(results, inputs[-1], step, is_new=is_new)
            if is_new:
                used |= dict.fromkeys(self._search(results + output, before, inputs[-1], step))
            elif checks_scalars:
                self.scalars.check(step, before, results)
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
        self.seconds += time.perf_counter() - started
        return Recording(own, inputs, results, outputs, list(used), held, after)

    def before(self, recorded: Recording) -> HeldState:
        return recorded.before

    def after(self, recorded: Recording) -> HeldState:
        return recorded.after

    def backward_steps(self, recorded: Recording, gradient: Gradients, start: int) -> Gradients:
        pairs = [*zip(recorded.results, gradient, strict=True)]
        for step, outputs in enumerate(recorded.outputs, start):
            pairs += zip(outputs, self.outputs.seeds(step), strict=True)
        gradients = self.accumulator.through(recorded, pairs)
        at = len(gradient)
        for step, inputs in enumerate(recorded.inputs, start):
            self.inputs.gather(step, gradients[at : at + len(inputs)])
            at += len(inputs)
        return gradients[: len(gradient)]

    def difference(self, one: HeldState, other: HeldState) -> str | None:
        return state_difference(self.structure, one.leaves, other.leaves, difference_of)

    def split(self, held: HeldState) -> tuple[list[Any], Any]:
        return held.leaves, (held.tracked, held.effects)

    def join(self, leaves: list[Any], rest: Any) -> HeldState:
        tracked, effects = rest
        return HeldState(leaves, tracked, versions_of(leaves), effects)

    def now(self, held: HeldState) -> HeldState:
        return self._held(held.leaves, held.tracked)

    @property
    def needs_gradients(self) -> bool:
        return self._needs_gradients

    @property
    def is_random(self) -> bool:
        return self.effects.is_random

    def compare_outputs(self, wanted: bool) -> None:
        self.outputs.are_compared = wanted

    def settle(self) -> None:
        """Nothing is left to find out: later steps are searched like the first one."""

    def is_unmodified(self, held: HeldState) -> bool:
        """Say whether the caller has not written to a state since it was held."""
        return versions_of(held.leaves) == held.versions

    def state_bytes(self, held: HeldState) -> int:
        return max(1, sum(map(self.arrays.nbytes, held.leaves)))

    # -- a whole pass --------------------------------------------------------------------------

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

    def end_forward(self, initial: HeldState) -> None:
        self.captures.complete()
        self.outputs.complete()
        self.effects.complete(initial.effects)

    def begin_backward(self) -> None:
        self.captures.check()
        self.scalars.update()

    def end_backward(self) -> None:
        self.captures.check_recorded()

    def restart(self, initial: HeldState) -> None:
        self.effects.restore(initial.effects)

    def other_gradients(self) -> list[Tensor | None]:
        return [*self.inputs.gradients, *self.accumulator.gradients]

    def resident_bytes(self, held: HeldState) -> int:
        storages = [t.untyped_storage() for t in tensors_of(held.leaves)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def outputs_of_no_step(self, leaves: list[Any]) -> list[Any]:
        """Return empty stacks of outputs: run a step on zeros to learn what it returns."""
        detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        held = self.initial(detached, [False] * len(leaves))
        zeros = [leaf.new_zeros(leaf.shape[1:]) for leaf in self.inputs.leaves]
        with without_recorder(), torch.no_grad():
            try:
                _, outputs = self._run(self._own(held), zeros, 0, is_new=True)
            finally:
                self.effects.restore(held.effects)
        arrays = map(self.outputs.as_array, outputs)
        return [array.new_empty((0, *array.shape)) for array in arrays]

    # -- a run of a step -----------------------------------------------------------------------

    @property
    def _is_bare(self) -> bool:
        """Whether a step takes one tensor and returns one, and nothing else has to be handled.

        Such steps may be short, so their overhead counts.
        """
        is_plain = not self._writes_in_place and not has_global_module_hooks()
        return self._single and not self._has_more and is_plain

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
            error.add_note(_raised_in(step))
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
        state = given[0] if self._single else trees.unflatten(self.structure, given[: len(own)])
        if self.inputs.structure is not None:
            x = trees.unflatten(self.inputs.structure, given[len(own) :])
        try:
            if is_new and (self.effects.monitors_all_steps or not self._reached):
                with self._monitored(given):
                    new, output = self.call(state, x)
            else:
                new, output = self.call(state, x)
        except Exception as error:
            error.add_note(_raised_in(step))
            raise
        # (A step that does not write in place in the forward pass does not do so later.)
        if is_new and versions_of(own + inputs if inputs else own) != versions:
            raise _writes_in_place(step)
        results = [new] if self._single and type(new) is Tensor else self._checked(new, step)
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
            self._needs_gradients |= any(tensor.requires_grad for tensor in tensors)
        found = self.captures.captured_by(tensors, tensors_of(state + inputs), step)
        if not step:
            self.uses_state.update(self.captures.was_given(state))
        if inputs:
            self.uses_inputs.update(self.captures.was_given(inputs))
        self._reached = step + 1
        return found

    def _own(self, state: LiveState | HeldState) -> list[Any]:
        """Return a state as leaves of a graph, which require grad where the state had a history."""
        known: dict[int, Any] = {}  # what is one tensor stays one tensor
        for leaf in state.leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                known[id(leaf)] = leaf.detach()
        leaves = [known.get(id(leaf), leaf) for leaf in state.leaves]
        return self._marked(LiveState(leaves, state.tracked))

    def _own_of(self, results: list[Any]) -> list[Any]:
        """Return what a step has made as leaves of the next one's graph."""
        result = results[0] if self._single else None
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
        for entry, tracked in zip(entries, self.inputs.tracked, strict=True):
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
        if structure != self.structure:
            raise TypeError(
                f"step {step} returned a state of another structure than it got: "
                f"{trees.describe(structure)} instead of {trees.describe(self.structure)}"
                f"{'; return (state, output)' if self.outputs.wanted else ''}"
            )
        for leaf in leaves:
            if id(leaf) not in self._objects:
                refuse_graph_inside(leaf, f"step {step}")
        return leaves

    # -- what belongs to a state ---------------------------------------------------------------

    def _held(self, leaves: list[Any], tracked: list[bool]) -> HeldState:
        return HeldState(leaves, tracked, versions_of(leaves), self.effects.snapshot())

    def _go_to(self, held: HeldState) -> None:
        if not self.is_unmodified(held):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a state that a checkpointed loop holds was written to since; "
                "write to a copy, or after the backward pass"
            )
        if self._reached:
            self.effects.restore(held.effects)

    # -- measuring -----------------------------------------------------------------------------

    def measure(self, initial: HeldState, *, exactly: bool) -> tuple[Recording, Measured]:
        """Record step 0 and measure it: the memory that stays allocated is its tape.

        What a pass needs beside its checkpoints is estimated, or, `exactly`, tried out.
        """
        state_bytes = self.state_bytes(initial)
        recorded = self.record(initial, 0, 1)
        first = self._monitor
        assert first is not None
        made = max(first.live_bytes, state_bytes)
        self.plain_bytes = made
        captured = sum(map(self.arrays.nbytes, self.captures.sources))
        if exactly:
            with first:
                self.accumulator.dry_run(recorded)
            peak = first.peak_bytes + 2 * captured
        else:
            peak = state_bytes + 2 * made + 3 * captured
        # Beside the backward of a step: the working state, the state to compare with, and the
        # final state and its gradient, which the caller holds.
        working = 4 * state_bytes + peak + peak // 4
        return recorded, Measured(
            state_bytes, made + state_bytes, working, recording_cost=_RECORDING_COST
        )


class _MonitoredRun:
    """A run of a step under a monitor; its side effects are noted afterwards."""

    def __init__(self, steps: Steps, monitor: StepMonitor) -> None:
        self._steps = steps
        self._monitor = monitor

    def __enter__(self) -> None:
        self._monitor.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._monitor.__exit__(*error)
        self._steps.record_effects(self._monitor)


def _raised_in(step: int) -> str:
    return f"raised in step {step} of a loop that remat runs"


def _writes_in_place(step: int) -> UnsupportedError:
    return UnsupportedError(
        f"step {step} writes to its state or to its input in place, which step 0 did not "
        "do; write to a copy (x = x + 1 instead of x += 1), or do so in every step"
    )


# Calling autograd costs a few evaluations of a small step and hardly any of a large one. Counted as
# one it saves a half of the calls for a thousandth of the evaluations.
_RECORDING_COST = 1
