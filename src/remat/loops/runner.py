"""Interprets a schedule: written once, for every engine.

An engine brings `StepOperations`: run steps without a tape, hold and resume a state, record steps,
go backward through them. States are held in memory, or in a store. The runner brings the order and
one check: before it goes backward through step k it has the state that the recording of step k
ended in, and the state that the recording of step k + 1 started from. They must be the same, bit
for bit. A step that leads to another state when it is run again is caught; one that differs while
its states agree is not. (States of zeros prove nothing. There the engine looks for closed-over
numbers that have changed.)

A store may round what it holds. Then states can only be compared if they were computed from the
same rounded checkpoint, or both from the initial state, which is never rounded. So every state has
an `Origin`. The first steps of a loop always run again from the initial state: what they lead to
is rounded like the checkpoint that was made there, and the two must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, assert_never

from ..errors import RecomputeMismatchError
from ..schedules import Action, Advance, Backward, Drop, IllegalMoveError, Restore, Save, Tape, Tier
from ..stores import Checkpoints, RoundedCheckpoints
from .protocols import Gradient, Held, LoopObserver, State, StepOperations, StepTape

__all__ = ["LoopRun"]

# Where a state was computed from: the initial state (None), or a rounded checkpoint: its step and
# the origin of what was rounded. Two states at one step of the same origin are the same.
Origin = tuple[int, Any] | None


class _TierStorage(Generic[Held]):
    """The states that are held in one tier: as they are, or in a store."""

    def __init__(
        self, operations: StepOperations[Any, Held, Any, Any], stored: Checkpoints | None
    ) -> None:
        self._operations = operations
        self._stored = stored
        self._states: dict[int, Any] = {}  # or what `split` leaves of them, if there is a store
        self._origins: dict[int, Origin] = {}  # of what was put here, if the store rounds
        self._rounds = stored is not None and not stored.exact

    def put(self, step: int, held: Held, origin: Origin) -> int | None:
        """Hold a state; return the memory that it takes in the store, None without one."""
        if self._rounds:
            self._origins[step] = origin
        if self._stored is None:
            self._states[step] = held
            return None
        leaves, self._states[step] = self._operations.split(held)
        before = self._stored.nbytes if self._stored.in_memory else 0
        self._stored.put(step, leaves)
        return self._stored.nbytes - before if self._stored.in_memory else 0

    def get(self, step: int) -> Held:
        if self._stored is None:
            held: Held = self._states[step]
            return held
        return self._operations.join(self._stored.get(step), self._states[step])

    def origin(self, step: int) -> Origin:
        """Return the origin of what `get` returns."""
        return (step, self._origins[step]) if self._rounds else None

    def rounded(self, held: Held) -> Held | None:
        """Return a state as it would come back from here; None if the store cannot tell."""
        if not isinstance(self._stored, RoundedCheckpoints):
            return None
        leaves, rest = self._operations.split(held)
        return self._operations.join(self._stored.as_stored(leaves), rest)

    def drop(self, step: int) -> None:
        del self._states[step]
        self._origins.pop(step, None)
        if self._stored is not None:
            self._stored.drop(step)

    def among(self, steps: range) -> list[int]:
        """Return those of these steps before which a state is held."""
        if len(steps) < len(self._states):
            return [step for step in steps if step in self._states]
        return [step for step in self._states if step in steps]

    def __contains__(self, step: int) -> bool:
        return step in self._states

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def clear(self) -> None:
        self._states.clear()
        self._origins.clear()
        if self._stored is not None:
            self._stored.close()


class _Lookahead(Iterator[Action]):
    """Actions, with a lookahead of one."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self._actions = iter(actions)
        self._seen: Action | None = None

    def __next__(self) -> Action:
        action, self._seen = self._seen, None
        return next(self._actions) if action is None else action

    def take_run(self, step: int) -> int:
        """Take the tapes of consecutive steps from here on; return the step after them.

        The last step, with which backward begins, is included if it follows.
        """
        while True:  # a tape is always followed by something: by the backward that uses it
            action = next(self)
            if type(action) is not Tape or action.step != step:
                self._seen = action
                return step + (type(action) is Backward and action.step == step)
            step += 1


class _TapedSteps(NamedTuple, Generic[StepTape, Held]):
    tape: StepTape
    before: Held  # the state that it starts from, and the one that it ends in
    after: Held
    start: int  # its first step
    origin: Origin  # of the state that it starts from, and so of the one that it ends in


class LoopRun(Generic[State, Held, StepTape, Gradient]):
    """One pass over a loop: `forward()` to the final state, then `backward(gradient)`."""

    def __init__(
        self,
        operations: StepOperations[State, Held, StepTape, Gradient],
        initial: Held,
        steps: int,
        *,
        first: tuple[StepTape, Held] | None = None,
        early: Mapping[int, Held] | None = None,
        observer: LoopObserver | None = None,
        stores: Mapping[Tier, Checkpoints] | None = None,
    ) -> None:
        self.operations = operations
        self.steps = steps
        self.evaluations = 0
        self.initial = initial
        self._first = first  # the tape of step 0 and the state after, if measured
        self._early = dict(early or {})  # states before steps that have been run already
        self._observer = observer
        self._reached = 0  # the step that the first run has reached
        self._stores = stores or {}
        self._tiers: dict[Tier, _TierStorage[Held]] = {
            tier: _TierStorage(operations, self._stores.get(tier))
            for tier in (Tier.MEMORY, Tier.DISK)
        }
        rounding = [tier for tier, stored in self._stores.items() if not stored.exact]
        self._rounding = self._tiers[rounding[0]] if rounding else None
        self._tapes: dict[int, _TapedSteps[StepTape, Held]] = {}  # by their last step
        # The working state: live, or as it is held, which is all that recording needs.
        self._at: int | None = None
        self._live: State | None = None
        self._held: Held | None = None
        self._resumed_from = 0
        self._origin: Origin = None  # of the working state
        self._actions = _Lookahead(())
        self._last: _TapedSteps[StepTape, Held] | None = None
        self.can_go_backward = False  # whether the forward pass held what backward needs

    @property
    def positions(self) -> list[int]:
        """Where states are held now."""
        return sorted({step for tier in self._tiers.values() for step in tier})

    def held(self, step: int) -> Held:
        """Return a state that is held now."""
        return next(tier.get(step) for tier in self._tiers.values() if step in tier)

    @property
    def has_stores(self) -> bool:
        """Whether some states are held in a store."""
        return bool(self._stores)

    @property
    def storing_error(self) -> float:
        """The largest error of a state that a store has rounded so far."""
        return max((stored.error for stored in self._stores.values()), default=0.0)

    def close(self) -> None:
        """Free everything that is held, in memory and in stores."""
        for tier in self._tiers.values():
            tier.clear()
        self._tapes.clear()
        self._first = self._last = None
        self._early.clear()
        self._clear_working_state()

    # -- forward -------------------------------------------------------------------------------

    def forward(self, schedule: Iterable[Action]) -> Held:
        """Run to the end of the loop, where backward begins, and return the final state."""
        self._actions = _Lookahead(schedule)
        if self._first is None:
            self._load(0, Tier.CALLER)
        for action in self._actions:
            if isinstance(action, Backward):
                self._refuse_unless(action.step == self.steps - 1, self.steps)
                self._last = self._recorded(action.step)
                self.can_go_backward = True
                return self._last.after
            self._act(action)
        self._refuse_unless(self._at == self.steps, self.steps)
        return self._held_state()  # without backward

    def forward_while(
        self,
        placement: Iterable[Action],
        goes_on: Callable[[State], bool],
        begins: bool | None = None,
    ) -> tuple[Held, int]:
        """Run until `goes_on` says no; return the final state and the number of steps.

        `begins` is its answer for the initial state, if it was asked already.
        """
        self._load(0, Tier.CALLER)
        self.steps, self.can_go_backward = 0, True
        if not (goes_on(self._live_state()) if begins is None else begins):
            return self._held_state(), 0
        for action in placement:
            if not isinstance(action, Advance):
                self._act(action)
                continue
            for step in range(action.start, action.stop):
                self._act(Advance(step, step + 1))
                self.steps = step + 1
                # Asked before anything is saved here: the final state is no checkpoint.
                if not goes_on(self._live_state()):
                    return self._held_state(), self.steps
        raise AssertionError("a placement has no end")

    # -- backward ------------------------------------------------------------------------------

    def backward(
        self,
        gradient: Gradient,
        schedule: Iterable[Action] | None = None,
        final: Held | None = None,
    ) -> Gradient:
        """Go backward through every step; return the gradient of the initial state.

        After `forward_while`, `schedule` is the backward part and `final` the state it starts from.
        """
        if schedule is not None:
            self._actions = _Lookahead(schedule)
        following = final  # the state that the next step started from
        origin: Origin = None  # of that state; the final one was never rounded
        done = self.steps  # the step that backward has reached
        if self._last is not None:
            last, self._last = self._last, None
            following, origin = last.before, last.origin
            gradient, done = self._backward_steps(last.tape, gradient, last.start, done), last.start
            del last
        for action in self._actions:
            if not isinstance(action, Backward):
                self._act(action)
            elif action.step < done:  # otherwise it was recorded together with later steps
                self._refuse_unless(action.step == done - 1, done)
                last = self._recorded(action.step)
                if following is not None:
                    self._compare(last.after, last.origin, following, origin, done)
                following, origin = last.before, last.origin
                gradient = self._backward_steps(last.tape, gradient, last.start, done)
                done = last.start
                del last
        self._refuse_unless(done == 0, done)
        return gradient

    def _refuse_unless(self, right: bool, done: int) -> None:
        """Raise if a schedule is not the one that was checked: its gradient would be wrong."""
        if not right:
            raise IllegalMoveError(
                f"the schedule went on or ended with steps 0 to {done - 1} of {self.steps} still "
                "ahead; it must give the same actions every time that it is iterated"
            )

    def _backward_steps(
        self, tape: StepTape, gradient: Gradient, start: int, stop: int
    ) -> Gradient:
        gradient = self.operations.backward_steps(tape, gradient, start, stop)
        self._clear_working_state()
        if self._observer:
            for step in range(start, stop):
                self._observer.frees_tape(step)
            self._observer.backward(stop - start)
        return gradient

    def _compare(
        self, rerun: Held, origin: Origin, known: Held, known_origin: Origin, position: int
    ) -> None:
        """Compare two states before a step, as far as they are of the same origin."""
        if origin != known_origin:
            if self._rounding is None or known_origin != (position, origin):
                return
            rounded = self._rounding.rounded(rerun)
            if rounded is None:
                return
            rerun = rounded
        difference = self.operations.difference(rerun, known)
        if difference is not None:
            raise RecomputeMismatchError(
                f"steps {self._resumed_from} to {position - 1} were run again and led to another "
                f"state before step {position} than the first time: {difference}. The step does "
                "not repeat itself. Likely causes: it reads something that changes between calls "
                "(a counter, a clock, a file, a global), it changes something that it closes over, "
                "or it draws from a random generator that remat cannot see; make it a function of "
                "its state"
            )

    # -- actions -------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        match action:
            case Advance(start, stop):
                self._advance(start, stop)
            case Save(step, tier):
                assert self._at == step
                is_held = self._held is not None
                state = self._held if is_held else self.operations.hold(self._live_state())
                assert state is not None
                nbytes = self._tiers[tier].put(step, state, self._origin)
                if self._observer:
                    self._observer.holds_state(step, state, nbytes)
            case Restore(step, tier):
                self._load(step, tier)
            case Drop(step, tier):
                self._tiers[tier].drop(step)
                if self._observer:
                    self._observer.frees_state(step)
            case Tape(step):
                stop = step + 1
                if self.operations.records_runs and (step or self._first is None):
                    stop = self._actions.take_run(stop)
                recorded = self._tapes[stop - 1] = self._recorded(step, stop)
                self._set_held(stop, recorded.after)
            case Backward():  # pragma: no cover
                raise AssertionError("`backward` handles these")
            case _:
                assert_never(action)

    def _advance(self, start: int, stop: int) -> None:
        if self._first is not None and start == 0:
            first, self._first = self._first, None
            self._set_held(1, first[1])
            self._count(0, 1)
            start = 1
        assert self._at == start
        start = self._skip_early(start, stop)
        # In pieces if there is an observer, so that progress shows.
        piece = max(1, self.steps // 100) if self._observer else max(1, stop - start)
        for at in range(start, stop, piece):
            end = min(at + piece, stop)
            state = self._live_state()
            self._clear_working_state()  # no second reference: states may be large
            self._at, self._live = end, self.operations.advance(state, at, end)
            del state
            self._count(at, end)

    def _skip_early(self, start: int, stop: int) -> int:
        """Go on from the last state that was reached already; return where it is."""
        reached = max((at for at in self._early if start < at <= stop), default=start)
        if reached > start:
            self._set_held(reached, self._early[reached])
            self._count(start, reached)
        self._early = {at: held for at, held in self._early.items() if at > reached}
        return reached

    def _recorded(self, step: int, stop: int | None = None) -> _TapedSteps[StepTape, Held]:
        """Return the recording that ends with a step, or one up to `stop`, and its first step.

        What was held for its steps is freed.
        """
        found = self._tapes.pop(step, None) if stop is None else None
        stop = step + 1 if stop is None else stop
        if found is None:
            if step == 0 and stop == 1 and self._first is not None:
                (tape, after), self._first = self._first, None
                before = self.initial
            else:
                if self._at != step:
                    self._load_any(step)
                before = self._held_state()
                tape, after = self.operations.record(before, step, stop)
            self._count(step, stop)
            found = _TapedSteps(tape, before, after, step, self._origin)
        steps = range(found.start, stop)
        for tier in self._tiers.values():
            for at in tier.among(steps):
                tier.drop(at)
        if self._observer:
            for at in steps:
                self._observer.holds_tape(at)  # until backward
                self._observer.frees_state(at)
        return found

    def _load_any(self, step: int) -> None:
        for tier in (Tier.MEMORY, Tier.DISK):
            if step in self._tiers[tier]:
                return self._load(step, tier)
        return self._load(step, Tier.TAPE if step - 1 in self._tapes else Tier.CALLER)

    def _load(self, step: int, tier: Tier) -> None:
        origin: Origin = None
        if tier is Tier.CALLER:
            held = self.initial
        elif tier is Tier.TAPE:
            held = self._tapes[step - 1].after
            origin = self._tapes[step - 1].origin
        else:
            held = self._tiers[tier].get(step)
            origin = self._tiers[tier].origin(step)
        self._resumed_from, self._origin = step, origin
        if self._rounding is not None:
            self.operations.compare_outputs(origin is None)
        self._set_held(step, held)

    # -- the working state ---------------------------------------------------------------------

    def _set_held(self, at: int, held: Held) -> None:
        self._at, self._held, self._live = at, held, None

    def _live_state(self) -> State:
        if self._live is None:
            assert self._held is not None
            self._live, self._held = self.operations.resume(self._held), None
        return self._live

    def _held_state(self) -> Held:
        held = self.operations.hold_final(self._live_state()) if self._held is None else self._held
        self._clear_working_state()
        return held

    def _clear_working_state(self) -> None:
        self._at = self._live = self._held = None

    def _count(self, start: int, stop: int) -> None:
        self.evaluations += stop - start
        new = max(0, stop - max(start, self._reached))
        self._reached = max(self._reached, stop)
        if self._observer:
            self._observer.forward(new)
            self._observer.recompute(stop - start - new)
