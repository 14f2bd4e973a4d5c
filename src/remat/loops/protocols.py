"""What an engine brings to run loops, and what observes a run: typed protocols.

`StepOperations` is what the runner of a schedule needs, `LoopSteps` what is needed to choose the
schedule, `PassSteps` what is needed around a whole pass. An engine has one class for all three.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from ..stores import Arrays
from .options import Measured
from .outputs import StepOutputs

__all__ = [
    "Gradient",
    "Held",
    "LoopObserver",
    "LoopSteps",
    "PassSteps",
    "Progress",
    "Recorded",
    "State",
    "StepOperations",
]

State = TypeVar("State")  # what steps work on; `advance` may change it in place
Held = TypeVar("Held")  # a state that nobody modifies any more
Recorded = TypeVar("Recorded")  # one step with its tape
Gradient = TypeVar("Gradient")


class StepOperations(Protocol[State, Held, Recorded, Gradient]):
    """What an engine can do with a loop."""

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps without a tape."""
        ...

    def hold(self, state: State) -> Held:
        """Return a copy of a state to hold; the state itself is used further."""
        ...

    def hold_final(self, state: State) -> Held:
        """Return a state to hold that is not used further: no copy is needed."""
        ...

    def resume(self, held: Held) -> State:
        """Return a copy of a held state for steps to work on."""
        ...

    @property
    def records_runs(self) -> bool:
        """Whether several steps can be recorded at once."""
        ...

    def record(self, held: Held, start: int, stop: int) -> Recorded:
        """Run steps with a tape; the held state is not modified."""
        ...

    def before(self, recorded: Recorded) -> Held:
        """Return the state that a recording started from."""
        ...

    def after(self, recorded: Recorded) -> Held:
        """Return the state that a recording ended in."""
        ...

    def backward_steps(self, recorded: Recorded, gradient: Gradient, start: int) -> Gradient:
        """Return the gradient of the state before recorded steps, the first of which is `start`."""
        ...

    def difference(self, one: Held, other: Held) -> str | None:
        """Say how two states differ; None if they are the same bit for bit."""
        ...

    def split(self, held: Held) -> tuple[list[Any], Any]:
        """Split a held state into arrays, which a store may take, and the rest."""
        ...

    def join(self, leaves: list[Any], rest: Any) -> Held:
        """Return a state from the parts that `split` gave."""
        ...

    def compare_outputs(self, wanted: bool) -> None:
        """Say whether outputs of steps that run next are to be compared with the first run.

        They differ if a step starts from a rounded state. Called only if a store rounds.
        """
        ...


class LoopObserver(Protocol):
    """Observes a run: steps run for the first time, run again, and gone backward through.

    And what is held for a step: the state before it, or its tape (reported once or more).
    """

    def forward(self, steps: int) -> None: ...

    def recompute(self, steps: int) -> None: ...

    def backward(self, steps: int) -> None: ...

    def holds_state(self, step: int, state: Any, nbytes: int | None) -> None:
        """A state is held; `nbytes` is the memory that it takes in a store, if it is in one."""

    def frees_state(self, step: int) -> None: ...

    def holds_tape(self, step: int) -> None: ...

    def frees_tape(self, step: int) -> None: ...


class Progress(LoopObserver, Protocol):
    """An observer that can be shown for a while."""

    def shown(self, *, last: bool) -> AbstractContextManager[None]: ...

    def expect(self, recomputed: int) -> None: ...


class LoopSteps(StepOperations[Any, Held, Recorded, Any], Protocol[Held, Recorded]):
    """What an engine can do with the steps of a loop, and what it knows of their states."""

    @property
    def arrays(self) -> Arrays:
        """Describes the engine's arrays to stores."""
        ...

    def measure(self, initial: Held, *, exactly: bool) -> tuple[Recorded, Measured]:
        """Record step 0, and measure what a step needs."""
        ...

    def settle(self) -> None:
        """Called once after step 0 was recorded: what the step closes over is known."""
        ...

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients can be asked for, as far as step 0 shows."""
        ...

    @property
    def is_random(self) -> bool:
        """Whether random numbers were drawn in the forward pass."""
        ...

    @property
    def seconds(self) -> float:
        """The time that steps have taken so far, without their backward."""
        ...

    def state_bytes(self, held: Held) -> int: ...

    def now(self, held: Held) -> Held:
        """Return the same state with the present states of random generators."""
        ...


class PassSteps(LoopSteps[Held, Recorded], Protocol[Held, Recorded]):
    """The steps of a loop, and what an engine does around a whole pass over them."""

    seconds: float  # that steps have taken, without their backward

    @property
    def outputs(self) -> StepOutputs:
        """The outputs of a scan."""
        ...

    @property
    def plain_bytes(self) -> int:
        """The bytes that a step adds to a pass without checkpointing, if it was measured."""
        ...

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return what has to be switched on while steps run for the first time."""
        ...

    def backward_context(self) -> AbstractContextManager[Any]:
        """Return what has to be switched on while steps run again; side effects are undone."""
        ...

    def end_forward(self, initial: Held) -> None:
        """Check what the steps did; called once, after the first forward pass."""
        ...

    def begin_backward(self) -> None:
        """Check that steps can run again: nothing that they need was modified."""
        ...

    def end_backward(self) -> None:
        """Check what the steps did when they ran again."""
        ...

    def restart(self, initial: Held) -> None:
        """Set side effects as they were before step 0: the whole loop runs again."""
        ...

    def is_unmodified(self, held: Held) -> bool:
        """Say whether the caller has not written to a state since it was held."""
        ...

    def reset_gradients(self) -> None:
        """Forget the gradients accumulated so far."""
        ...

    def other_gradients(self) -> list[Any]:
        """Return the gradients accumulated for the inputs of a scan and for captures."""
        ...

    def resident_bytes(self, held: Held) -> int:
        """Return the memory of a held state, as it is accounted for."""
        ...
