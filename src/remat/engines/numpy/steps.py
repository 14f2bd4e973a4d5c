"""The steps of a loop on NumPy arrays: what the loop runner asks of an engine."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np

from ... import trees
from ...loops import Measured, StepOutputs
from ...loops.differences import same_object, state_difference
from ...stores import Arrays
from .arrays import NumpyArrays
from .captures import Captures
from .memory_measure import held_elsewhere, memories, nbytes, references, traced_memory
from .overlaps import copy_of, guarded, refuse_write_to_overlap
from .randomness import GeneratorStates, Randomness
from .tape import (
    Flagged,
    Recording,
    SharedRoots,
    is_differentiable,
    plain,
    record,
    refuse_boxes,
    zeros_like,
)

__all__ = [
    "Gradients",
    "HeldState",
    "Outputs",
    "PerStep",
    "RecordedStep",
    "Steps",
    "difference_of",
    "is_inconclusive",
    "read_only",
]

# What Python needs beside the numbers, as measured with tracemalloc: it counts where states are
# small. For a checkpoint: its record, the list of leaves, an entry in a table that grows, and the
# object of each array.
_CHECKPOINT_BYTES = 480
_ARRAY_BYTES = 320
_TAPE_BYTES = 240  # for a tape beside what its step leaves behind
# Python takes small objects from its free lists first, and tracemalloc does not see those. So the
# first tape seems smaller than the others: by up to a quarter if it is small.
_FREE_LIST_BYTES = 64 * 1024

Gradients = list[Any]  # one for each leaf of the state; None is zero


class HeldState(NamedTuple):
    """A held state, with the states of the random generators."""

    leaves: list[Any]
    random_state: GeneratorStates


class RecordedStep(NamedTuple):
    """A step with its tape."""

    recording: Recording
    before: HeldState
    after: HeldState


class Steps:
    """A loop body over raw arrays: runs and records steps, and goes backward through them.

    `call(state, step)` returns the next state and an output (None for plain loops).
    """

    arrays: Arrays = NumpyArrays()
    needs_gradients = True  # or it would not have come this far
    records_runs = False

    def __init__(
        self,
        call: Callable[[Any, Any], tuple[Any, Any]],
        structure: trees.Structure,
        traced: Sequence[bool],
        captures: Captures,
        captured: Sequence[Any],
        randomness: Randomness,
        inputs: PerStep,
        outputs: Outputs,
    ) -> None:
        self.call = call
        self.structure = structure
        self.single = structure.is_leaf()
        self.traced = traced  # leaves of the initial state: is their gradient needed?
        self.captures = captures
        self.captured = [read_only(value) for value in captured]
        self.shared = SharedRoots(self.captured)
        self.randomness = randomness
        self.inputs = inputs
        self.outputs = outputs
        self.plain_bytes = 0  # what a step adds to a plain pass, if it was measured
        self.seconds = 0.0  # that steps have taken, without their backward
        self._reached = 0  # the step that the first pass has reached
        self.reset_gradients()

    def reset_gradients(self) -> None:
        """Forget the gradients gathered so far."""
        self.shared.sums = {}
        self.inputs.reset_gradients()

    @property
    def captured_sums(self) -> list[Flagged | None]:
        """The gradients of what the step closes over, as far as they were gathered."""
        return [self.shared.sums.get(i) for i in range(len(self.captured))]

    # -- operations ----------------------------------------------------------------------------

    def advance(self, state: Any, start: int, stop: int) -> Any:
        step, started = start, time.perf_counter()
        call, take, keep = self.call, self.inputs.take, self.outputs.keep_output
        collect = self.outputs.wanted
        try:
            for step in range(start, stop):
                state, output = call(state, take(step))
                # A plain array is the usual case, and needs no checks.
                if not (self.single and type(state) is np.ndarray and state.flags.forc):
                    state = self._checked(state, step)
                if collect:
                    keep(output, step)
        except Exception as error:
            refuse_write_to_overlap(error, state, step)
            _note(error, step)
            raise
        self._reached = max(self._reached, stop)
        self.seconds += time.perf_counter() - started
        return state

    def hold(self, state: Any) -> HeldState:
        leaves, _ = trees.flatten(state)
        return HeldState(_copies(leaves), self.randomness.snapshot())

    def resume(self, held: HeldState) -> Any:
        self.randomness.restore(held.random_state)
        return trees.unflatten(self.structure, _copies(held.leaves))

    def hold_final(self, state: Any) -> HeldState:
        return HeldState(trees.flatten(state)[0], self.randomness.snapshot())

    def record(self, held: HeldState, start: int, stop: int) -> RecordedStep:
        assert stop == start + 1
        return self._record(held, start)

    def _record(self, held: HeldState, step: int) -> RecordedStep:
        leaves, started = held.leaves, time.perf_counter()
        self.randomness.restore(held.random_state)
        given = trees.flatten(self.inputs.take(step))
        sizes = len(leaves), len(given[0])

        def run(values: list[Any]) -> list[Any]:
            # What is not traced could be changed in place: the held one must not be.
            own = [copy_of(values[i]) if values[i] is leaf else values[i] for i, leaf in firsts]
            x = trees.unflatten(given[1], values[sizes[0] : sum(sizes)])
            with self.captures.filled(self.shared.boxes()):
                new, output = self.call(trees.unflatten(self.structure, own), x)
            results, structure = trees.flatten(new)
            self._check_structure(structure, step)
            results += self.outputs.flat(output)
            self.captures.refuse_hidden(results)
            return results

        inputs = [*leaves, *given[0]]
        wanted = [is_differentiable(value) for value in inputs]
        # Leaves that are one and the same array are one and the same box.
        firsts = [(_first_like(leaves, i), leaf) for i, leaf in enumerate(leaves)]
        for i, (first, _) in enumerate(firsts):
            wanted[i] = wanted[i] and first == i
        try:
            recording = record(run, inputs, wanted)
        except Exception as error:
            _note(error, step)
            raise
        results = recording.results
        refuse_boxes(results)
        self.outputs.keep(results[sizes[0] :], step)
        new = results[: sizes[0]]
        after = guarded(new, [_compact(leaf) for leaf in new])
        del new
        del results[:]  # the state after is held once, the outputs not at all
        recorded = RecordedStep(recording, held, HeldState(after, self.randomness.snapshot()))
        if step < self._reached:
            self._refuse_doubt(recorded, step)
        self._reached = max(self._reached, step + 1)
        self.seconds += time.perf_counter() - started
        return recorded

    def before(self, recorded: RecordedStep) -> HeldState:
        return recorded.before

    def after(self, recorded: RecordedStep) -> HeldState:
        return recorded.after

    def backward_steps(self, recorded: RecordedStep, gradient: Gradients, start: int) -> Gradients:
        seeds = gradient + self.outputs.seeds(start)
        count, given = len(gradient), self.inputs.count
        gathered = recorded.recording.go_back(seeds, [None] * (count + given), self.shared)
        self.inputs.gather(start, [g and g[0] for g in gathered[count : count + given]])
        return [None if g is None else g[0] for g in gathered[:count]]

    def difference(self, one: HeldState, other: HeldState) -> str | None:
        return state_difference(self.structure, one.leaves, other.leaves, difference_of)

    def split(self, held: HeldState) -> tuple[list[Any], GeneratorStates]:
        return held.leaves, held.random_state

    def join(self, leaves: list[Any], rest: GeneratorStates) -> HeldState:
        return HeldState(leaves, rest)

    def now(self, held: HeldState) -> HeldState:
        return HeldState(held.leaves, self.randomness.snapshot())

    @property
    def is_random(self) -> bool:
        return self.randomness.is_used

    def compare_outputs(self, wanted: bool) -> None:
        self.outputs.are_compared = wanted

    def settle(self) -> None:
        self.captures.accept_constants()

    def state_bytes(self, held: HeldState) -> int:
        objects = _CHECKPOINT_BYTES + _ARRAY_BYTES * len(held.leaves)
        return objects + sum(map(nbytes, held.leaves))

    # -- a whole pass --------------------------------------------------------------------------

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

    def end_forward(self, initial: HeldState) -> None:
        self.captures.refuse_leftovers()
        self.randomness.ignore_unused(initial.random_state)

    def begin_backward(self) -> None:
        """Nothing to check: what was modified shows in the states."""

    end_backward = begin_backward

    def restart(self, initial: HeldState) -> None:
        """Nothing to do: random states are restored with the initial state."""

    def is_unmodified(self, held: HeldState) -> bool:
        return True  # the caller has copies

    def other_gradients(self) -> list[Any]:
        captured = [None if total is None else total[0] for total in self.captured_sums]
        return [*self.inputs.gradients, *captured]

    def resident_bytes(self, held: HeldState) -> int:
        return sum(memories(held.leaves).values())

    def outputs_of_no_step(self, leaves: list[Any], reach: Captures) -> list[Any]:
        """Return empty stacks of outputs: run a step on zeros to learn what it returns.

        Generators and numbers in its `reach` are set back.
        """
        randomness = Randomness(reach.generators)
        random_state = randomness.snapshot()
        state = trees.unflatten(self.structure, _copies([plain(leaf) for leaf in leaves]))
        try:
            with self.captures.filled(self.captured):
                _, output = self.call(state, self.inputs.zeros())
        except Exception as error:
            error.add_note("raised on zeros, which show what a scan without steps returns")
            raise
        finally:
            randomness.restore(random_state)
            reach.restore_numbers()
        arrays = map(np.asarray, self.outputs.flat(output))
        return [np.empty((0, *array.shape), array.dtype) for array in arrays]

    # -- measuring -----------------------------------------------------------------------------

    def measure(self, initial: HeldState, *, exactly: bool) -> tuple[RecordedStep, Measured]:
        """Record step 0 and measure it: the bytes that stay allocated are its tape.

        What a pass needs beside its checkpoints is estimated, or, `exactly`, tried out.
        """
        state_bytes = self.state_bytes(initial)
        with traced_memory() as used:
            base, known = used(), references(initial.leaves)
            recorded = self._record(initial, 0)
            # The outputs of a scan belong to the caller; they are allocated as a whole.
            base += sum(map(nbytes, self.outputs.stacks))
            made = max(used() - base, state_bytes)
            self.plain_bytes = made - self._idle_bytes(recorded, known)
            peak = self._trial(recorded) - base if exactly else self._guess(made, state_bytes)
        # Beside the backward of a step: the working state, the state to compare with, and the
        # final state and its gradient, which the caller holds. A quarter more
        # for what the allocator keeps for itself (measured from outside: up to 0.4 MB of 2 MB).
        working = 4 * state_bytes + peak + peak // 4
        unseen = min(made // 4, _FREE_LIST_BYTES)
        tape_bytes = made + _TAPE_BYTES + state_bytes
        return recorded, Measured(state_bytes, tape_bytes, working, unseen_bytes=unseen)

    def _idle_bytes(self, recorded: RecordedStep, known: list[int]) -> int:
        """Return the bytes of a state that no tape needs, neither that before nor that after."""
        before, after = recorded.before.leaves, recorded.after.leaves
        needed = zip(references(before), known, held_elsewhere(after), strict=True)
        pairs = zip(after, needed, strict=True)
        return sum(nbytes(leaf) for leaf, (now, then, held) in pairs if now <= then and not held)

    def _guess(self, made: int, state_bytes: int) -> int:
        """The gradient, the tape and as much again in passing, and what gathers gradients."""
        return state_bytes + 2 * made + 3 * sum(map(nbytes, self.captured))

    def _trial(self, recorded: RecordedStep) -> int:
        """Go backward through a step twice, adding to sums the second time; return the peak."""
        after = recorded.after.leaves
        seeds = [zeros_like(leaf) if is_differentiable(leaf) else None for leaf in after]
        seeds += [None] * (len(recorded.recording.ends) - len(seeds))
        no_sums: list[Flagged | None] = [None] * len(recorded.recording.roots)
        recorded.recording.go_back(seeds, no_sums, self.shared)
        tracemalloc.reset_peak()
        recorded.recording.go_back(seeds, no_sums, self.shared)
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

    def _refuse_doubt(self, recorded: RecordedStep, step: int) -> None:
        """Refuse a step that was run again if its states cannot prove that it did the same."""
        before = zip(recorded.before.leaves, self.traced, strict=True)
        start = [leaf for leaf, t in before if is_differentiable(leaf) and (t or step > 0)]
        # Why not strict? The outputs of a scan come after the state.
        after = zip(recorded.after.leaves, recorded.recording.ends, strict=False)
        if is_inconclusive(start, [leaf for leaf, node in after if node is not None]):
            self.captures.refuse_changed_number(
                f"step {step}",
                "Keep the number in the state, take it from the xs of remat.checkpointed_scan, or "
                'run no step twice (schedule="all")',
            )

    def _check_structure(self, structure: trees.Structure, step: int) -> None:
        if structure != self.structure:
            raise TypeError(
                f"step {step} returned a state of another structure than it got: "
                f"{trees.describe(structure)} instead of {trees.describe(self.structure)}"
                f"{'; return (state, output)' if self.outputs.wanted else ''}"
            )


class PerStep:
    """What a scan hands to each step: the entries of `xs` along the first axis."""

    def __init__(self, leaves: list[Any], structure: trees.Structure | None) -> None:
        self.leaves = leaves
        self.structure = structure
        self.count = len(leaves)
        self.gradients: list[Any] = []

    def take(self, step: int) -> Any:
        if self.structure is None:
            return None
        # Copies: a step may work in place, and xs belongs to the caller.
        return trees.unflatten(self.structure, [_copy(leaf[step]) for leaf in self.leaves])

    def zeros(self) -> Any:
        """Return what a step would get if there was one."""
        assert self.structure is not None
        zeros = [np.zeros(leaf.shape[1:], leaf.dtype)[()] for leaf in self.leaves]
        return trees.unflatten(self.structure, zeros)

    def reset_gradients(self) -> None:
        self.gradients = [None] * self.count

    def gather(self, step: int, gradients: list[Any]) -> None:
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                if self.gradients[i] is None:
                    self.gradients[i] = np.zeros(self.leaves[i].shape, self.leaves[i].dtype)
                self.gradients[i][step] = gradient


class Outputs(StepOutputs):
    """The outputs of a scan over arrays."""

    def keep_output(self, output: Any, step: int) -> None:
        leaves = self.flat(output)
        refuse_boxes(leaves)
        self.keep(leaves, step)

    def as_array(self, leaf: Any) -> Any:
        return np.asarray(leaf)

    def new_stack(self, value: Any) -> Any:
        return np.empty((self.steps, *value.shape), value.dtype)

    def put(self, stack: Any, value: Any, step: int) -> Any:
        common = np.result_type(stack.dtype, value.dtype)
        if common != stack.dtype:
            stack = stack.astype(common)
        stack[step] = value
        return stack

    def difference(self, stack: Any, value: Any, step: int) -> str | None:
        return difference_of(value.astype(stack.dtype), stack[step])


def _note(error: Exception, step: int) -> None:
    error.add_note(f"raised in step {step} of a loop that remat runs")


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


def is_inconclusive(before: list[Any], after: list[Any]) -> bool:
    """Return whether values agree whatever a step computes: zero times anything is zero.

    One result of zeros is enough for that; of what it started from, all has to be zero.
    """
    return any(map(_is_zero, after)) or (bool(before) and all(map(_is_zero, before)))


def _is_zero(leaf: Any) -> bool:
    return np.size(leaf) > 0 and not np.any(leaf)


_NUMBERS = (np.ndarray, np.generic, bool, int, float, complex)


def difference_of(one: Any, other: Any) -> str | None:
    """Compare bit for bit: NaNs are equal to themselves, 0.0 is not -0.0."""
    if one is other:
        return None
    if not (isinstance(one, _NUMBERS) and isinstance(other, _NUMBERS)):
        return None if same_object(one, other) else f"is {one!r} instead of {other!r}"
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {a.dtype} of shape {a.shape} instead of {b.dtype} of shape {b.shape}"
    if a.dtype.kind not in "biufc" or not a.size:
        return None if same_object(a, b) else f"is {one!r} instead of {other!r}"
    # The bytes of a long double are not all in use.
    padded = a.dtype in (np.longdouble, np.clongdouble)
    if np.array_equal(a, b, equal_nan=True) if padded else np.array_equal(*_bits(a, b)):
        return None
    wrong = a != b
    if not np.any(wrong):
        return "differs in the sign of a zero"
    largest = np.max(np.abs(np.subtract(a, b, dtype=np.complex128)))
    return f"differs in {np.count_nonzero(wrong)} of {a.size} entries, by up to {largest:.3g}"


def _bits(a: Any, b: Any) -> tuple[Any, Any]:
    """Look at two arrays as integers, without a copy where both are laid out alike."""
    if a.flags.f_contiguous and b.flags.f_contiguous:
        a, b = a.T, b.T
    size = a.dtype.itemsize
    kind = np.uint64 if size % 8 == 0 else np.uint32 if size % 4 == 0 else np.uint8
    return np.ravel(a).view(kind), np.ravel(b).view(kind)
