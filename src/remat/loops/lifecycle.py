"""One differentiable loop from its forward pass to its last backward pass, for every engine.

An engine brings `EngineSteps`: what can be done with the steps of this loop and what has to be
switched on around them. It ties the results into its autograd and asks for gradients through
`LoopPass.gradients`. Running the loop, accounting, progress, checkpoints and a second backward pass
are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic

from ..errors import RecomputeMismatchError
from .accounts import Account, LoopEvents
from .checkpoints import checkpoints_of
from .lengths import AnyRun, Length
from .options import Measured
from .protocols import Progress
from .steps import Context, EngineSteps, HeldState

__all__ = ["LoopPass"]


class LoopPass(Generic[Context]):
    """A loop that runs forward once, and backward as often as autograd asks."""

    def __init__(
        self,
        name: str,
        steps: EngineSteps[Any, Context, Any],
        initial: HeldState[Context],
        length: Length,
        progress: Progress | None,
        *,
        traced: bool,
        made: Callable[[], Mapping[Hashable, int]],
    ) -> None:
        self.name = name
        self.steps = steps
        self.initial = initial
        self.final = initial
        self.traced = traced  # whether anybody may ask for gradients
        self.run: AnyRun | None = None  # what is held for the next backward pass
        self._length = length
        self._progress = progress
        self._account = Account()
        self._events: LoopEvents | None = None
        if self._account.must_measure and traced:  # `made`: inputs that the pass itself has made
            self._events = LoopEvents(self._account, made(), steps.resident_bytes, progress)

    # -- forward -------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run the loop: sets `final` and `run`."""
        self._account.begin(self.name)
        with (
            self._account.inside(),
            self.steps.forward_context(),
            self._shown(last=not self.traced),
        ):
            self.run = self._start()
        if self._events:
            self._events.settle()
        self.steps.end_forward(self.initial)

    def forward_untraced(self) -> None:
        """Run a loop without gradients and without accounting."""
        with self._shown(last=True):
            self.run = self._start()

    def _start(self) -> AnyRun:
        run, self.final = self._length.forward(
            self.steps,
            self.initial,
            traced=self.traced,
            on_measured=self._on_measured if self._events else None,
            observer=self._events or self._progress,
        )
        return run

    def _on_measured(self, measured: Measured) -> None:
        assert self._events is not None
        tape_bytes = measured.tape_bytes - measured.state_bytes
        self._events.add_measured(tape_bytes, plain_bytes=self.steps.plain_bytes)

    def _shown(self, *, last: bool) -> AbstractContextManager[None]:
        return self._progress.shown(last=last) if self._progress else nullcontext()

    def checkpoints(self, shown: Callable[[HeldState[Context]], Any]) -> Mapping[int, Any]:
        """Return the states that are held, by position, as `shown` makes them for the caller."""
        assert self.run is not None
        return checkpoints_of(self.run, shown, lazily=self.traced)

    # -- backward ------------------------------------------------------------------------------

    @property
    def results(self) -> list[Any]:
        """The leaves of the final state, and the outputs of a scan."""
        return [*self.final.leaves, *self.steps.outputs.stacks]

    def gradients(self, of: Sequence[int], seeds: Sequence[Any]) -> list[Any]:
        """Go backward from gradients of those results, by number; None is zero.

        Return the gradients of the initial state, of the inputs of a scan, and of captures.
        """
        steps = self.steps
        of_results = dict(zip(of, seeds, strict=True))
        state = [of_results.get(i) for i in range(len(self.initial.leaves))]
        outputs = [of_results.get(i + len(state)) for i in range(len(steps.outputs.stacks))]
        steps.begin_backward()
        steps.reset_gradients()
        steps.outputs.gradients = outputs
        known, steps.seconds = self.run.evaluations if self.run else 0, 0.0
        if self._events:
            self._events.is_forward = False
        try:
            with self._account.inside(), steps.backward_context(), self._shown(last=True):
                run, self.run = self.run or self._run_again(), None
                # What the caller has written to cannot be compared with.
                final = self.final if steps.is_unmodified(self.final) else None
                gradients = self._length.backward(steps, run, final, state)
            steps.end_backward()
        finally:
            steps.outputs.gradients = ()
        if run.evaluations > known:
            self._account.recomputed(run.evaluations - known, steps.seconds)
        self._account.rounded(run.storing_error)
        found = [*gradients, *steps.other_gradients()]
        steps.reset_gradients()
        return found

    def _run_again(self) -> AnyRun:
        """Run forward once more: the first backward pass has used up the checkpoints."""
        known = self.final
        self.steps.restart(self.initial)
        run = self._start()
        if self.steps.is_unmodified(known):
            difference = self.steps.difference(self.final, known)
            if difference:
                raise RecomputeMismatchError(
                    f"the whole loop was run again and its final {difference}"
                )
        return run
