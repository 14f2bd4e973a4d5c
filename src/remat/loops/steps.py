"""The steps of a loop on an engine's arrays: what is the same on every engine.

An engine adds how steps are run, recorded and gone back through, what belongs to a state beside its
leaves (the states of random generators), and how a loop becomes one node of its autograd.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from .. import trees
from .arrays import LoopArrays
from .differences import state_difference
from .numbers import ClosedOverNumbers
from .options import Measured
from .protocols import State, StepTape
from .scans import StepInputs, StepOutputs

if TYPE_CHECKING:
    from .lifecycle import LoopPass

__all__ = ["AnySteps", "EngineSteps", "HeldState", "LoopCall", "raised_in"]

Context = TypeVar("Context")  # what belongs to a state although the step does not return it


class HeldState(NamedTuple, Generic[Context]):
    """A state that nobody modifies any more."""

    leaves: list[Any]
    context: Context


@dataclass(frozen=True, slots=True)
class LoopCall:
    """A loop as it is called; `leaves` and `xs` may be part of a graph of the engine's autograd."""

    functions: list[list[Any]]  # step and condition: each where an engine may exchange it
    step: Callable[[Any, Any], tuple[Any, Any]]  # from state and input to state and output
    leaves: list[Any]
    structure: trees.Structure
    xs: list[Any]
    xs_structure: trees.Structure | None  # None if this is no scan
    steps: int
    takes_any_state: bool  # also one that holds nothing to differentiate

    @property
    def given(self) -> list[Any]:
        return [*self.leaves, *self.xs]


class EngineSteps(ABC, Generic[State, Context, StepTape]):
    """The steps of one loop: runs and records them, and goes backward through them.

    It is what the runner asks for (`StepOperations`), and what is done around a whole pass.
    """

    arrays: LoopArrays
    records_runs = False  # whether several steps can be recorded at once
    traced: bool  # whether anybody may ask for gradients
    needs_gradients = True  # whether there can be any, as far as step 0 shows

    def __init__(self, call: LoopCall, xs: list[Any], numbers: ClosedOverNumbers) -> None:
        self.call = call.step
        self.structure = call.structure
        self.inputs = StepInputs(self.arrays, xs, call.xs_structure)
        self.outputs = self._new_outputs(call)
        self.plain_bytes = 0  # what a step adds to a pass without checkpointing, if measured
        self.seconds = 0.0  # that steps have taken, without their backward
        self._numbers = numbers
        self._is_single = call.structure.is_leaf()
        self._reached = 0  # the step that the first pass has reached

    def _new_outputs(self, call: LoopCall) -> StepOutputs:
        return StepOutputs(self.arrays, call.steps, wanted=call.xs_structure is not None)

    # -- what the runner asks ------------------------------------------------------------------

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps without a tape."""
        started = time.perf_counter()
        state = self._advance(state, start, stop)
        self.seconds += time.perf_counter() - started
        return state

    def record(
        self, held: HeldState[Context], start: int, stop: int
    ) -> tuple[StepTape, HeldState[Context]]:
        """Run steps with a tape; return it, and the state after. `held` is not modified."""
        started = time.perf_counter()
        recorded = self._record(held, start, stop)
        self.seconds += time.perf_counter() - started
        return recorded

    def backward_steps(
        self,
        tape: StepTape,
        gradient: list[Any],
        start: int,
        stop: int,
    ) -> list[Any]:
        """Return the gradient of the state before these steps; None is zero."""
        seeds = list(gradient)
        for step in range(start, stop) if self.outputs.gradients else ():
            seeds += self.outputs.seeds(step)
        found = self._go_back(tape, seeds)
        at, count = len(gradient), len(self.inputs.leaves)
        for step in range(start, stop) if count else ():
            self.inputs.gather(step, found[at : at + count])
            at += count
        return found[: len(gradient)]

    def difference(self, one: HeldState[Context], other: HeldState[Context]) -> str | None:
        """Say how two states differ; None if they are the same bit for bit."""
        return state_difference(self.structure, one.leaves, other.leaves, self.arrays.difference)

    def split(self, held: HeldState[Context]) -> tuple[list[Any], Context]:
        """Split a held state into arrays, which a store may take, and the rest."""
        return held

    def join(self, leaves: list[Any], context: Context) -> HeldState[Context]:
        """Return a state from the parts that `split` gave."""
        return HeldState(leaves, context)

    def compare_outputs(self, wanted: bool) -> None:
        """Say whether outputs of steps that run next are to be compared with the first run.

        They differ if a step starts from a rounded state. Called only if a store rounds.
        """
        self.outputs.are_compared = wanted

    @abstractmethod
    def _advance(self, state: State, start: int, stop: int) -> State: ...

    @abstractmethod
    def _record(
        self, held: HeldState[Context], start: int, stop: int
    ) -> tuple[StepTape, HeldState[Context]]: ...

    @abstractmethod
    def _go_back(self, tape: StepTape, seeds: list[Any]) -> list[Any]:
        """Go backward from the gradients of the state after, and of the outputs step by step.

        Return those of the state before, and of the inputs step by step; None is zero.
        """

    @abstractmethod
    def hold(self, state: State) -> HeldState[Context]:
        """Return a copy of a state to hold; the state itself is used further."""

    @abstractmethod
    def hold_final(self, state: State) -> HeldState[Context]:
        """Return a state to hold that is not used further: no copy is needed."""

    @abstractmethod
    def resume(self, held: HeldState[Context]) -> State:
        """Return a copy of a held state for steps to work on."""

    # -- what the choice of a schedule needs ---------------------------------------------------

    @abstractmethod
    def measure(
        self, initial: HeldState[Context], *, exactly: bool
    ) -> tuple[tuple[StepTape, HeldState[Context]], Measured]:
        """Record step 0 and measure it: the bytes that stay allocated are its tape.

        What a pass needs beside its checkpoints is estimated, or, `exactly`, tried out.
        """

    @staticmethod
    def working_bytes(
        state_bytes: int, made: int, captured: int, *, peak: int | None = None
    ) -> int:
        """Return what a pass needs beside its checkpoints.

        `made` are the bytes that a step leaves behind, `captured` those of what it closes over,
        `peak` those of its backward. If that was not tried out, it is the gradient, the tape and as
        much again in passing, and what gathers gradients.
        """
        if peak is None:
            peak = state_bytes + 2 * made + 3 * captured
        # Beside the backward of a step: the working state, the state to compare with, and the
        # final state and its gradient, which the caller holds. A quarter more for what the
        # allocator keeps for itself (measured from outside: up to 0.4 MB of 2 MB).
        return 4 * state_bytes + peak + peak // 4

    @abstractmethod
    def state_bytes(self, held: HeldState[Context]) -> int:
        """Return the bytes of a state that is held."""

    @property
    @abstractmethod
    def is_random(self) -> bool:
        """Whether random numbers were drawn in the forward pass."""

    @abstractmethod
    def now(self, held: HeldState[Context]) -> HeldState[Context]:
        """Return the same state with the present states of random generators."""

    def settle(self) -> None:
        """Called once after step 0 was recorded: what the step closes over is known."""

    # -- a whole pass --------------------------------------------------------------------------

    @abstractmethod
    def tree(self, state: State) -> Any:
        """Return a state between two steps as the program sees it."""

    @abstractmethod
    def initial(self, leaves: list[Any]) -> HeldState[Context]:
        """Return the state that the loop starts from."""

    @abstractmethod
    def connect(self, loop: LoopPass[Context], given: list[Any]) -> list[Any]:
        """Run the loop; return the results, connected with their sources: one node for all steps.

        `given` are the leaves of the initial state and of xs, with their graphs.
        """

    @abstractmethod
    def viewer(self, given: list[Any], *, traced: bool) -> Callable[[Any], Any]:
        """Return what shows a leaf of a checkpoint to the caller: a gradient there is an error."""

    @abstractmethod
    def made(self, given: list[Any]) -> Mapping[Hashable, int]:
        """Return the memory of inputs that the pass itself has made."""

    @abstractmethod
    def forward_context(self) -> AbstractContextManager[None]:
        """Return what has to be switched on while steps run for the first time."""

    @abstractmethod
    def backward_context(self) -> AbstractContextManager[None]:
        """Return what has to be switched on while steps run again; side effects are undone."""

    @abstractmethod
    def end_forward(self, initial: HeldState[Context]) -> None:
        """Check what the steps did; called once, after the first forward pass."""

    def begin_backward(self) -> None:
        """Check that steps can run again: nothing that they need was modified."""

    def end_backward(self) -> None:
        """Check what the steps did when they ran again."""

    def restart(self, initial: HeldState[Context]) -> None:
        """Set side effects as they were before step 0: the whole loop runs again."""

    def is_unmodified(self, held: HeldState[Context]) -> bool:
        """Say whether the caller has not written to a state since it was held."""
        return True

    def reset_gradients(self) -> None:
        """Forget the gradients accumulated so far."""
        self.inputs.reset_gradients()

    def other_gradients(self) -> list[Any]:
        """Return the gradients accumulated for the inputs of a scan and for captures."""
        return [*self.inputs.gradients, *self._captured_gradients()]

    @abstractmethod
    def _captured_gradients(self) -> list[Any]: ...

    @abstractmethod
    def resident_bytes(self, held: HeldState[Context]) -> int:
        """Return the memory of a held state, as it is accounted for."""

    def outputs_of_no_step(self, initial: HeldState[Context]) -> list[Any]:
        """Return empty stacks of outputs: run a step on zeros to learn what it returns."""
        return self.outputs.of_no_step(self._outputs_of(initial, self.inputs.zeros()))

    @abstractmethod
    def _outputs_of(self, initial: HeldState[Context], entries: list[Any]) -> list[Any]:
        """Run one step, with these entries of xs; undo its side effects."""

    # -- checks --------------------------------------------------------------------------------

    def _check_structure(self, structure: trees.Structure, step: int) -> None:
        if structure != self.structure:
            raise TypeError(
                f"step {step} returned a state of another structure than it got: "
                f"{trees.describe(structure)} instead of {trees.describe(self.structure)}"
                f"{'; return (state, output)' if self.outputs.wanted else ''}"
            )

    def _refuse_doubt(self, step: int, before: list[Any], after: list[Any]) -> None:
        """Refuse a step that was run again if its states cannot prove that it did the same.

        Zero times anything is zero. One result of zeros is enough for that; of what it started
        from, all has to be zero.
        """
        is_zero = self.arrays.is_zero
        if any(map(is_zero, after)) or (before and all(map(is_zero, before))):
            self._numbers.refuse_change(step)


AnySteps = EngineSteps[Any, Any, Any]


def raised_in(step: int) -> str:
    return f"raised in step {step} of a loop that remat runs"
