"""Interprets a schedule: written once, for every engine.

An engine brings its verbs: advance without a tape, hold and resume a state, record a step, go
back through it. States rest in memory, or on the shelf of a store. The runner brings the order, and
one check: whenever it goes back through step k
it has the state that step k's recording ended in and the state that step k + 1's recording started
from. They must be the same, bit for bit, so a step that leads to another state is caught. A step
that differs while its states agree is not: states are all it compares. (Where they are all zeros,
and so prove nothing, the engine looks for closed-over numbers that change.)

A store may round what it holds. Then states can only be compared if they were computed from the
same rounded checkpoint, or both from the initial state, which is never rounded. So every state has
an `Origin`. The first steps of a loop always run again from the initial state: what they lead to
is rounded like the checkpoint that was made there, and the two must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, assert_never

from ..errors import RecomputeMismatchError
from ..schedules import Action, Advance, Backward, Drop, Restore, Save, Tape, Tier
from ..stores import RoundingShelf, Shelf

__all__ = ["LoopRun", "Verbs", "Watcher"]

State = TypeVar("State")  # what steps work on; an advance may change it in place
Held = TypeVar("Held")  # a state at rest: nobody changes it
Recorded = TypeVar("Recorded")  # one step with its tape
Gradient = TypeVar("Gradient")

# Where a state was computed from: the initial state (None), or a rounded checkpoint: its step and
# the origin of what was rounded. Two states at one step of the same origin are the same.
Origin = tuple[int, Any] | None


class Verbs(Protocol[State, Held, Recorded, Gradient]):
    """What an engine can do with a loop."""

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps without a tape."""
        ...

    def hold(self, state: State) -> Held:
        """Put a copy of a state to rest; the state itself goes on."""
        ...

    def rest(self, state: State) -> Held:
        """Put a state to rest that does not go on."""
        ...

    def resume(self, held: Held) -> State:
        """Wake a copy of a state up; the held one stays as it is."""
        ...

    @property
    def records_runs(self) -> bool:
        """Whether several steps can be recorded as one; if not, that is never asked for."""
        ...

    def record(self, held: Held, start: int, stop: int) -> Recorded:
        """Run steps with a tape; the held state stays as it is."""
        ...

    def before(self, recorded: Recorded) -> Held:
        """Return the state that a recording started from."""
        ...

    def after(self, recorded: Recorded) -> Held:
        """Return the state that a recording ended in."""
        ...

    def step_back(self, recorded: Recorded, gradient: Gradient, start: int) -> Gradient:
        """Go back through recorded steps, the first of which is `start`."""
        ...

    def difference(self, one: Held, other: Held) -> str | None:
        """Say how two states differ, or None if they are the same bit for bit."""
        ...

    def apart(self, held: Held) -> tuple[list[Any], Any]:
        """Take a state at rest apart: arrays that a store may take, and what goes with them."""
        ...

    def together(self, leaves: list[Any], rest: Any) -> Held:
        """Put a state together that `apart` has taken apart."""
        ...

    def compare_outputs(self, wanted: bool) -> None:
        """Say whether outputs of steps that are run again are those of the first run.

        They are not if a step starts from a rounded state. Asked only if a store rounds.
        """
        ...


class Watcher(Protocol):
    """Is told how many steps were run for the first time, run again, and gone back through.

    And what is held for a step: the state before it, or its tape (told once or more).
    """

    def forward(self, steps: int) -> None: ...

    def recompute(self, steps: int) -> None: ...

    def backward(self, steps: int) -> None: ...

    def holds_state(self, step: int, state: Any, nbytes: int | None) -> None:
        """A state is held, in so many bytes of memory if it rests in a store."""

    def frees_state(self, step: int) -> None: ...

    def holds_tape(self, step: int) -> None: ...

    def frees_tape(self, step: int) -> None: ...


class _Rack(Generic[Held]):
    """Where the states of one tier rest: as they are, or on the shelf of a store."""

    def __init__(self, verbs: Verbs[Any, Held, Any, Any], shelf: Shelf | None) -> None:
        self._verbs = verbs
        self._shelf = shelf
        self._states: dict[int, Any] = {}  # or what goes with them, if there is a shelf
        self._origins: dict[int, Origin] = {}  # of what was put there, if the shelf rounds
        self._rounds = shelf is not None and not shelf.exact

    def put(self, step: int, held: Held, origin: Origin) -> int | None:
        """Put a state to rest; return the memory that it takes there, if that is a shelf."""
        if self._rounds:
            self._origins[step] = origin
        if self._shelf is None:
            self._states[step] = held
            return None
        leaves, self._states[step] = self._verbs.apart(held)
        before = self._shelf.nbytes if self._shelf.in_memory else 0
        self._shelf.put(step, leaves)
        return self._shelf.nbytes - before if self._shelf.in_memory else 0

    def get(self, step: int) -> Held:
        if self._shelf is None:
            held: Held = self._states[step]
            return held
        return self._verbs.together(self._shelf.get(step), self._states[step])

    def origin(self, step: int) -> Origin:
        """Return the origin of what `get` returns."""
        return (step, self._origins[step]) if self._rounds else None

    def rounded(self, held: Held) -> Held | None:
        """Return a state as it would come back from here; None if the shelf cannot tell."""
        if not isinstance(self._shelf, RoundingShelf):
            return None
        leaves, rest = self._verbs.apart(held)
        return self._verbs.together(self._shelf.as_stored(leaves), rest)

    def drop(self, step: int) -> None:
        del self._states[step]
        self._origins.pop(step, None)
        if self._shelf is not None:
            self._shelf.drop(step)

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
        if self._shelf is not None:
            self._shelf.close()


class _Ahead(Iterator[Action]):
    """Actions, with a look at the one that comes next."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self._actions = iter(actions)
        self._seen: Action | None = None

    def __next__(self) -> Action:
        action, self._seen = self._seen, None
        return next(self._actions) if action is None else action

    def take_run(self, step: int) -> int:
        """Take the tapes of steps from here on that follow one another; return the next step.

        And the step after them, if the way back begins with it at once.
        """
        for action in self:
            if type(action) is not Tape or action.step != step:
                self._seen = action
                return step + (type(action) is Backward and action.step == step)
            step += 1
        return step


class _Recording(NamedTuple, Generic[Recorded]):
    tape: Recorded
    start: int  # its first step
    origin: Origin  # of the state that it starts from, and so of the one that it ends in


class LoopRun(Generic[State, Held, Recorded, Gradient]):
    """One pass over a loop: `forward()` to the final state, then `backward(gradient)`."""

    def __init__(
        self,
        verbs: Verbs[State, Held, Recorded, Gradient],
        initial: Held,
        steps: int,
        *,
        first: Recorded | None = None,
        early: Mapping[int, Held] | None = None,
        watcher: Watcher | None = None,
        shelves: Mapping[Tier, Shelf] | None = None,
    ) -> None:
        self.verbs = verbs
        self.steps = steps
        self.evaluations = 0
        self.initial = initial
        self._first = first  # step 0, if it was recorded already to measure it
        self._early = dict(early or {})  # states before steps that were reached already
        self._watcher = watcher
        self._reached = 0  # how far the loop has been run for the first time
        self._shelves = shelves or {}
        self._racks: dict[Tier, _Rack[Held]] = {
            tier: _Rack(verbs, self._shelves.get(tier)) for tier in (Tier.MEMORY, Tier.DISK)
        }
        rounding = [tier for tier, shelf in self._shelves.items() if not shelf.exact]
        self._rounding = self._racks[rounding[0]] if rounding else None
        self._tapes: dict[int, _Recording[Recorded]] = {}  # by their last step
        # The working state: live, or still at rest, which is all that recording needs of it.
        self._at: int | None = None
        self._live: State | None = None
        self._resting: Held | None = None
        self._resumed_from = 0
        self._origin: Origin = None  # of the working state
        self._actions = _Ahead(())
        self._last: _Recording[Recorded] | None = None
        self.goes_back = False  # whether the way ahead was one that a way back can follow

    @property
    def positions(self) -> list[int]:
        """Where states are held now."""
        return sorted({step for rack in self._racks.values() for step in rack})

    def held(self, step: int) -> Held:
        """Return a state that is held now."""
        return next(rack.get(step) for rack in self._racks.values() if step in rack)

    @property
    def is_shelved(self) -> bool:
        """Whether some states rest on the shelf of a store."""
        return bool(self._shelves)

    @property
    def storing_error(self) -> float:
        """The largest error that storing a state has caused so far."""
        return max((shelf.error for shelf in self._shelves.values()), default=0.0)

    def close(self) -> None:
        """Free all that is held, wherever it rests."""
        for rack in self._racks.values():
            rack.clear()
        self._tapes.clear()
        self._first = self._last = None
        self._early.clear()
        self._forget_working_state()

    # -- ahead ---------------------------------------------------------------------------------

    def forward(self, schedule: Iterable[Action]) -> Held:
        """Run to the end of the loop, where the way back begins, and return the final state."""
        self._actions = _Ahead(schedule)
        if self._first is None:
            self._load(0, Tier.CALLER)
        for action in self._actions:
            if isinstance(action, Backward):
                self._last = self._recorded(action.step)
                self.goes_back = True
                return self.verbs.after(self._last.tape)
            self._act(action)
        return self._put_to_rest()  # nobody goes back: the loop ends where the actions end

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
        self.steps, self.goes_back = 0, True
        if not (goes_on(self._wake_up()) if begins is None else begins):
            return self._put_to_rest(), 0
        for action in placement:
            if not isinstance(action, Advance):
                self._act(action)
                continue
            for step in range(action.start, action.stop):
                self._act(Advance(step, step + 1))
                self.steps = step + 1
                # Asked before anything is saved here: the final state is no checkpoint.
                if not goes_on(self._wake_up()):
                    return self._put_to_rest(), self.steps
        raise AssertionError("a placement has no end")

    # -- back ----------------------------------------------------------------------------------

    def backward(
        self,
        gradient: Gradient,
        schedule: Iterable[Action] | None = None,
        final: Held | None = None,
    ) -> Gradient:
        """Go back through every step.

        After `forward_while`, `schedule` is the way back and `final` the state it starts from.
        """
        if schedule is not None:
            self._actions = _Ahead(schedule)
        following = final  # the state that the step after this one started from
        origin: Origin = None  # of that state: the final one was never stored
        done = self.steps  # the step up to which the way back has come
        if self._last is not None:
            last, self._last = self._last, None
            following, origin = self.verbs.before(last.tape), last.origin
            gradient, done = self._step_back(last.tape, gradient, last.start, done), last.start
            del last
        for action in self._actions:
            if not isinstance(action, Backward):
                self._act(action)
            elif action.step < done:  # or it was recorded together with the steps after it
                tape, start, began = self._recorded(action.step)
                if following is not None:
                    self._compare(self.verbs.after(tape), began, following, origin, done)
                following, origin = self.verbs.before(tape), began
                gradient, done = self._step_back(tape, gradient, start, done), start
                del tape
        return gradient

    def _step_back(self, recorded: Recorded, gradient: Gradient, start: int, stop: int) -> Gradient:
        gradient = self.verbs.step_back(recorded, gradient, start)
        self._forget_working_state()
        if self._watcher:
            for step in range(start, stop):
                self._watcher.frees_tape(step)
            self._watcher.backward(stop - start)
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
        difference = self.verbs.difference(rerun, known)
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
                at_rest = self._resting is not None
                state = self._resting if at_rest else self.verbs.hold(self._wake_up())
                assert state is not None
                nbytes = self._racks[tier].put(step, state, self._origin)
                if self._watcher:
                    self._watcher.holds_state(step, state, nbytes)
            case Restore(step, tier):
                self._load(step, tier)
            case Drop(step, tier):
                self._racks[tier].drop(step)
                if self._watcher:
                    self._watcher.frees_state(step)
            case Tape(step):
                stop = step + 1
                if self.verbs.records_runs and (step or self._first is None):
                    stop = self._actions.take_run(stop)
                recorded = self._tapes[stop - 1] = self._recorded(step, stop)
                self._set_resting(stop, self.verbs.after(recorded.tape))
            case Backward():
                raise AssertionError("`backward` handles these")
            case _:
                assert_never(action)

    def _advance(self, start: int, stop: int) -> None:
        if self._first is not None and start == 0:
            first, self._first = self._first, None
            self._set_resting(1, self.verbs.after(first))
            self._count(0, 1)
            start = 1
        assert self._at == start
        start = self._skip_early(start, stop)
        # In pieces if somebody watches, so that a long sweep shows on the way.
        piece = max(1, self.steps // 100) if self._watcher else max(1, stop - start)
        for at in range(start, stop, piece):
            end = min(at + piece, stop)
            state = self._wake_up()
            self._forget_working_state()  # no second reference: large states count
            self._at, self._live = end, self.verbs.advance(state, at, end)
            del state
            self._count(at, end)

    def _skip_early(self, start: int, stop: int) -> int:
        """Go on from the last state that was reached already; return where it is."""
        reached = max((at for at in self._early if start < at <= stop), default=start)
        if reached > start:
            self._set_resting(reached, self._early[reached])
            self._count(start, reached)
        self._early = {at: held for at, held in self._early.items() if at > reached}
        return reached

    def _recorded(self, step: int, stop: int | None = None) -> _Recording[Recorded]:
        """Return the recording that ends with a step, or one up to `stop`, and its first step.

        Whatever was held for its steps is freed.
        """
        found = self._tapes.pop(step, None) if stop is None else None
        stop = step + 1 if stop is None else stop
        if found is None:
            if step == 0 and stop == 1 and self._first is not None:
                recorded, self._first = self._first, None
            else:
                if self._at != step:
                    self._load_any(step)
                recorded = self.verbs.record(self._put_to_rest(), step, stop)
            self._count(step, stop)
            found = _Recording(recorded, step, self._origin)
        steps = range(found.start, stop)
        for rack in self._racks.values():
            for at in rack.among(steps):
                rack.drop(at)
        if self._watcher:
            for at in steps:
                self._watcher.holds_tape(at)  # until the step back
                self._watcher.frees_state(at)
        return found

    def _load_any(self, step: int) -> None:
        for tier in (Tier.MEMORY, Tier.DISK):
            if step in self._racks[tier]:
                return self._load(step, tier)
        return self._load(step, Tier.TAPE if step - 1 in self._tapes else Tier.CALLER)

    def _load(self, step: int, tier: Tier) -> None:
        origin: Origin = None
        if tier is Tier.CALLER:
            held = self.initial
        elif tier is Tier.TAPE:
            held = self.verbs.after(self._tapes[step - 1].tape)
            origin = self._tapes[step - 1].origin
        else:
            held = self._racks[tier].get(step)
            origin = self._racks[tier].origin(step)
        self._resumed_from, self._origin = step, origin
        if self._rounding is not None:
            self.verbs.compare_outputs(origin is None)
        self._set_resting(step, held)

    # -- the working state ---------------------------------------------------------------------

    def _set_resting(self, at: int, held: Held) -> None:
        self._at, self._resting, self._live = at, held, None

    def _wake_up(self) -> State:
        if self._live is None:
            assert self._resting is not None
            self._live, self._resting = self.verbs.resume(self._resting), None
        return self._live

    def _put_to_rest(self) -> Held:
        held = self.verbs.rest(self._wake_up()) if self._resting is None else self._resting
        self._forget_working_state()
        return held

    def _forget_working_state(self) -> None:
        self._at = self._live = self._resting = None

    def _count(self, start: int, stop: int) -> None:
        self.evaluations += stop - start
        new = max(0, stop - max(start, self._reached))
        self._reached = max(self._reached, stop)
        if self._watcher:
            self._watcher.forward(new)
            self._watcher.recompute(stop - start - new)
