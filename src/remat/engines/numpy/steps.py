"""The steps of a loop on NumPy arrays: what only NumPy and autograd can know of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from autograd.core import defvjp_argnums
from autograd.extend import primitive
from autograd.tracer import isbox, trace_stack

from ... import trees
from ...loops import (
    EngineSteps,
    HeldState,
    LoopCall,
    LoopPass,
    Measured,
    no_gradient_of_checkpoints,
    raised_in,
)
from .captures import CapturedArrays, capture, objects_among
from .custom_vjp import run_custom_vjp
from .loop_arrays import NumpyLoopArrays
from .memory_measure import held_elsewhere, memories, nbytes, references, traced_memory
from .overlaps import copy_of, guarded, refuse_write_to_overlap
from .randomness import GeneratorStates, Randomness
from .tape import (
    Recording,
    SharedRoots,
    is_differentiable,
    is_made,
    plain,
    record,
    refuse_boxes,
    zeros_like,
)

__all__ = ["NumpySteps"]

# What Python needs beside the numbers, as measured with tracemalloc: it counts where states are
# small. For a checkpoint: its record, the list of leaves, an entry in a table that grows, and the
# object of each array.
_CHECKPOINT_BYTES = 480
_ARRAY_BYTES = 320
_TAPE_BYTES = 240  # for a tape beside what its step leaves behind
# Python takes small objects from its free lists first, and tracemalloc does not see those. So the
# first tape seems smaller than the others: by up to a quarter if it is small.
_FREE_LIST_BYTES = 64 * 1024


NumpyState = HeldState[GeneratorStates]
NumpyRecorded = tuple[Recording, NumpyState]  # a tape, and the state after


class NumpySteps(EngineSteps[Any, GeneratorStates, Recording]):
    """A loop body over raw arrays: runs and records steps, and goes backward through them."""

    arrays = NumpyLoopArrays()

    def __init__(self, call: LoopCall) -> None:
        _check_state(call.leaves)
        self._functions = call.functions
        # Without a trace there are no boxes to be found, and nothing is run again.
        searched = [*call.functions, *objects_among(call.given).values()]
        self.captures = capture(searched) if trace_stack.top >= 0 else CapturedArrays()
        self.traced = any(map(isbox, [*call.given, *self.captures.boxes]))
        super().__init__(call, [np.asarray(plain(x)) for x in call.xs], self.captures.numbers)
        self.captured = [read_only(plain(box)) for box in self.captures.boxes]
        self.shared = SharedRoots(self.captured)
        self.randomness = Randomness(self.captures.generators)
        # Leaves of the initial state: is their gradient needed?
        self._traced_leaves = [isbox(leaf) for leaf in call.leaves]
        self.reset_gradients()

    # -- runs of steps -------------------------------------------------------------------------

    def _advance(self, state: Any, start: int, stop: int) -> Any:
        step, call, collect, x = start, self.call, self.outputs.wanted, None
        try:
            for step in range(start, stop):
                if collect:
                    x = self.inputs.tree(self._entries(step))
                state, output = call(state, x)
                # A plain array is the usual case, and needs no checks.
                if not (self._is_single and type(state) is np.ndarray and state.flags.forc):
                    state = self._checked(state, step)
                if collect:
                    leaves = self.outputs.flat(output)
                    refuse_boxes(leaves)
                    self.outputs.keep(leaves, step)
        except Exception as error:
            refuse_write_to_overlap(error, state, step)
            error.add_note(raised_in(step))
            raise
        self._reached = max(self._reached, stop)
        return state

    def hold(self, state: Any) -> NumpyState:
        leaves, _ = trees.flatten(state)
        return HeldState(_copies(leaves), self.randomness.snapshot())

    def resume(self, held: NumpyState) -> Any:
        self.randomness.restore(held.context)
        return trees.unflatten(self.structure, _copies(held.leaves))

    def hold_final(self, state: Any) -> NumpyState:
        return HeldState(trees.flatten(state)[0], self.randomness.snapshot())

    def _record(self, held: NumpyState, start: int, stop: int) -> tuple[Recording, NumpyState]:
        assert stop == start + 1
        leaves, step = held.leaves, start
        self.randomness.restore(held.context)
        entries = self._entries(step)
        count, given = len(leaves), len(entries)

        def run(values: list[Any]) -> list[Any]:
            # What is not traced could be changed in place: the held one must not be.
            own = [copy_of(values[i]) if values[i] is leaf else values[i] for i, leaf in firsts]
            x = self.inputs.tree(values[count : count + given])
            with self.captures.filled(self.shared.boxes()):
                new, output = self.call(trees.unflatten(self.structure, own), x)
            results, structure = trees.flatten(new)
            self._check_structure(structure, step)
            results += self.outputs.flat(output)
            self.captures.refuse_hidden(results)
            return results

        inputs = [*leaves, *entries]
        wanted = [is_differentiable(value) for value in inputs]
        # Leaves that are one and the same array are one and the same box.
        firsts = [(_first_like(leaves, i), leaf) for i, leaf in enumerate(leaves)]
        for i, (first, _) in enumerate(firsts):
            wanted[i] = wanted[i] and first == i
        try:
            recording = record(run, inputs, wanted)
        except Exception as error:
            error.add_note(raised_in(step))
            raise
        results = recording.results
        refuse_boxes(results)
        self.outputs.keep(results[count:], step)
        new = results[:count]
        after = guarded(new, [_compact(leaf) for leaf in new])
        del new
        del results[:]  # the state after is held once, the outputs not at all
        state = HeldState(after, self.randomness.snapshot())
        if step < self._reached:
            self._check_again(step, held, recording, state)
        self._reached = max(self._reached, step + 1)
        return recording, state

    def _go_back(self, tape: Recording, seeds: list[Any]) -> list[Any]:
        gathered = tape.go_back(seeds, self.shared)
        return [None if g is None else g[0] for g in gathered]

    def now(self, held: NumpyState) -> NumpyState:
        return HeldState(held.leaves, self.randomness.snapshot())

    @property
    def is_random(self) -> bool:
        return self.randomness.is_used

    def settle(self) -> None:
        self.captures.accept_constants()

    def state_bytes(self, held: NumpyState) -> int:
        objects = _CHECKPOINT_BYTES + _ARRAY_BYTES * len(held.leaves)
        return objects + sum(map(nbytes, held.leaves))

    def _entries(self, step: int) -> list[Any]:
        # Copies: a step may work in place, and xs belongs to the caller.
        return [_copy(entry) for entry in self.inputs.take(step)]

    # -- a whole pass --------------------------------------------------------------------------

    def tree(self, state: Any) -> Any:
        return state

    def initial(self, leaves: list[Any]) -> NumpyState:
        return HeldState(_plain_leaves(leaves), self.randomness.snapshot())

    def connect(self, loop: LoopPass[GeneratorStates], given: list[Any]) -> list[Any]:
        if not self.traced:
            loop.forward_untraced()
            return loop.results
        node = _LoopPrimitive(loop, self)
        boxes = iter(run_custom_vjp(node, [*given, *self.captures.boxes]))
        # (Copies of the rest: the caller may write to them, and re-runs are compared with them.)
        differentiable = set(node.differentiable)
        return [
            next(boxes) if i in differentiable else _copy(result)
            for i, result in enumerate(loop.results)
        ]

    def viewer(self, given: list[Any], *, traced: bool) -> Callable[[Any], Any]:
        values = [*given, *self.captures.boxes]
        anchor = next((value for value in values if isbox(value)), None)

        def view(leaf: Any) -> Any:
            if anchor is None:
                return leaf
            return _read_only_checkpoint(leaf, anchor) if is_differentiable(leaf) else _copy(leaf)

        return view

    def made(self, given: list[Any]) -> Mapping[Hashable, int]:
        values = [*given, *self.captures.boxes]
        return memories([plain(value) for value in values if is_made(value)])

    def forward_context(self) -> AbstractContextManager[None]:
        return self.captures.filled(self.captured)

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        now = self.randomness.snapshot()
        try:
            with self.captures.filled(self.captured):
                yield
        finally:
            self.randomness.restore(now)

    def end_forward(self, initial: NumpyState) -> None:
        self.captures.refuse_leftovers()
        self.randomness.ignore_unused(initial.context)

    def reset_gradients(self) -> None:
        super().reset_gradients()
        self.shared.sums = {}

    def _captured_gradients(self) -> list[Any]:
        sums = self.shared.sums
        return [sums[i][0] if i in sums else None for i in range(len(self.captured))]

    def resident_bytes(self, held: NumpyState) -> int:
        return sum(memories(held.leaves).values())

    def _outputs_of(self, initial: NumpyState, entries: list[Any]) -> list[Any]:
        reach = capture(self._functions)
        randomness = Randomness(reach.generators)
        random_state = randomness.snapshot()
        state = trees.unflatten(self.structure, _copies(initial.leaves))
        try:
            with self.captures.filled(self.captured):
                _, output = self.call(state, self.inputs.tree(entries))
        except Exception as error:
            error.add_note("raised on zeros, which show what a scan without steps returns")
            raise
        finally:
            randomness.restore(random_state)
            reach.numbers.restore()
        return self.outputs.flat(output)

    # -- measuring -----------------------------------------------------------------------------

    def measure(self, initial: NumpyState, *, exactly: bool) -> tuple[NumpyRecorded, Measured]:
        state_bytes = self.state_bytes(initial)
        with traced_memory() as used:
            base, known = used(), references(initial.leaves)
            recorded = self.record(initial, 0, 1)
            # The outputs of a scan belong to the caller; they are allocated as a whole.
            base += sum(map(nbytes, self.outputs.stacks))
            made = max(used() - base, state_bytes)
            self.plain_bytes = made - self._idle_bytes(initial, recorded[1], known)
            peak = self._trial(*recorded) - base if exactly else None
        captured = sum(map(nbytes, self.captured))
        return recorded, Measured(
            state_bytes,
            made + _TAPE_BYTES + state_bytes,
            self.working_bytes(state_bytes, made, captured, peak=peak),
            unseen_bytes=min(made // 4, _FREE_LIST_BYTES),
        )

    def _idle_bytes(self, before: NumpyState, after: NumpyState, known: list[int]) -> int:
        """Return the bytes of a state that no tape needs, neither that before nor that after."""
        elsewhere = held_elsewhere(after.leaves)
        needed = zip(references(before.leaves), known, elsewhere, strict=True)
        pairs = zip(after.leaves, needed, strict=True)
        return sum(nbytes(leaf) for leaf, (now, then, held) in pairs if now <= then and not held)

    def _trial(self, tape: Recording, after: NumpyState) -> int:
        """Go backward through a step twice, adding to sums the second time; return the peak."""
        seeds = [zeros_like(leaf) if is_differentiable(leaf) else None for leaf in after.leaves]
        seeds += [None] * (len(tape.ends) - len(seeds))
        tape.go_back(seeds, self.shared)
        tracemalloc.reset_peak()
        tape.go_back(seeds, self.shared)
        self.shared.sums = {}
        return tracemalloc.get_traced_memory()[1]

    # -- checks --------------------------------------------------------------------------------

    def _checked(self, state: Any, step: int) -> Any:
        leaves, structure = trees.flatten(state)
        self._check_structure(structure, step)
        refuse_boxes(leaves)
        self.captures.refuse_hidden(leaves)
        compact = guarded(leaves, [_compact(leaf) for leaf in leaves])
        if all(map(_is, compact, leaves)):
            return state
        return trees.unflatten(structure, compact)

    def _check_again(
        self, step: int, before: NumpyState, tape: Recording, after: NumpyState
    ) -> None:
        """Check a step that was run again."""
        start = zip(before.leaves, self._traced_leaves, strict=True)
        # Why not strict? The outputs of a scan come after the state.
        ends = zip(after.leaves, tape.ends, strict=False)
        self._refuse_doubt(
            step,
            [leaf for leaf, traced in start if is_differentiable(leaf) and (traced or step > 0)],
            [leaf for leaf, node in ends if node is not None],
        )


class _LoopPrimitive:
    """A traced loop as a primitive of autograd: what `run_custom_vjp` calls."""

    name = "checkpointed loop"

    def __init__(self, loop: LoopPass[GeneratorStates], steps: NumpySteps) -> None:
        self.differentiable: list[int] = []  # leaves of the final state, and outputs
        self._loop = loop
        self._inputs = [*loop.initial.leaves, *steps.inputs.leaves, *steps.captured]

    def forward(self) -> tuple[Any, ...]:
        """Run forward; return the differentiable results."""
        self._loop.forward()
        results = self._loop.results
        self.differentiable = [i for i, r in enumerate(results) if is_differentiable(r)]
        return tuple(results[i] for i in self.differentiable)

    def backward(self, gradients: Sequence[Any]) -> list[Any]:
        """Return a gradient for each input: state, per-step inputs, captures."""
        found = self._loop.gradients(self.differentiable, gradients)
        return [
            zeros_like(value) if gradient is None and is_differentiable(value) else gradient
            for value, gradient in zip(self._inputs, found, strict=True)
        ]


@primitive  # type: ignore[untyped-decorator]
def _read_only_checkpoint(leaf: Any, anchor: Any) -> Any:
    return leaf


# A caller that changes what it looks at gets an array of its own; nothing is copied before.
_read_only_checkpoint.copies_on_write = True


def _checkpoint_vjp(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Callable[[Any], Any]:
    def vjp(g: Any) -> Any:
        raise no_gradient_of_checkpoints()

    return vjp


defvjp_argnums(_read_only_checkpoint, _checkpoint_vjp)


def _first_like(leaves: list[Any], i: int) -> int:
    """Return where the array that stands at `i` stands first among the leaves of a state."""
    if not isinstance(leaves[i], np.ndarray):
        return i
    return next(j for j, leaf in enumerate(leaves) if leaf is leaves[i])


def _is(one: Any, other: Any) -> bool:
    return one is other


def _copy(leaf: Any) -> Any:
    return leaf.copy(order="K") if isinstance(leaf, np.ndarray) else leaf


def _copies(leaves: list[Any]) -> list[Any]:
    """Copy the leaves of a state; what is one array stays one array."""
    if len(leaves) == 1:
        return [copy_of(leaves[0])]
    copies = {id(leaf): copy_of(leaf) for leaf in leaves}
    return guarded(leaves, [copies[id(leaf)] for leaf in leaves])


def _compact(leaf: Any) -> Any:
    """Make the layout of a state independent of how it came about.

    A checkpoint is a compact copy; sums over a strided view could round differently.
    """
    if isinstance(leaf, np.ndarray) and not leaf.flags.forc:
        return leaf.copy(order="K")
    return leaf


def read_only(value: Any) -> Any:
    """What a step closes over belongs to the caller: a step that writes into it gets an error."""
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value


def _plain_leaves(leaves: list[Any]) -> list[Any]:
    """Look through the boxes; two boxes over one array are two arrays to the caller."""
    found: list[Any] = []
    for i, leaf in enumerate(leaves):
        value = plain(leaf)
        others = zip(found, leaves[:i], strict=True)
        shared = any(value is other and leaf is not box for other, box in others)
        found.append(value.copy() if shared and isinstance(value, np.ndarray) else value)
    return guarded(found, found)


def _check_state(leaves: list[Any]) -> None:
    values = [plain(leaf) for leaf in leaves]
    for value in values:
        if isinstance(value, np.ndarray) and (
            value.dtype == object or type(value) is not np.ndarray
        ):
            kind = "of objects" if value.dtype == object else f"of type {type(value).__name__}"
            raise TypeError(
                f"the state holds an array {kind}; use plain numpy.ndarray of numbers instead"
            )
    if not any(isinstance(v, np.ndarray | np.inexact | float | complex) for v in values):
        kinds = ", ".join(sorted({type(v).__name__ for v in values})) or "nothing"
        raise TypeError(
            f"the state holds no array, only {kinds}: there is nothing to differentiate"
        )
