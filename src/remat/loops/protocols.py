"""What the runner of a schedule needs, and what observes a run: typed protocols."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

__all__ = [
    "Gradient",
    "Held",
    "LoopObserver",
    "Progress",
    "State",
    "StepOperations",
    "StepTape",
]

State = TypeVar("State")  # what steps work on; `advance` may change it in place
Held = TypeVar("Held")  # a state that nobody modifies any more
StepTape = TypeVar("StepTape")  # what leads back through recorded steps
Gradient = TypeVar("Gradient")


class StepOperations(Protocol[State, Held, StepTape, Gradient]):
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

    def record(self, held: Held, start: int, stop: int) -> tuple[StepTape, Held]:
        """Run steps with a tape; return it, and the state after. `held` is not modified."""
        ...

    def backward_steps(self, tape: StepTape, gradient: Gradient, start: int, stop: int) -> Gradient:
        """Return the gradient of the state before these steps, which were recorded together."""
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
