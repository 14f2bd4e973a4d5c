"""A forward pass under a budget and its backward: traced, measured, and kept within the budget.

Inside of a manager a pass begins with the first op that has a gradient: what runs before, without
gradients, is no part of it and is not recorded. It ends with its backward, or when nothing of its
graph is left; and another one begins where the program starts again, although a result of the one
before is still there, as that of the last batch of a validation. Where this was wrong, since both
were differentiated, it is not done again.

While a plan is followed, the values that it keeps are held and all others are dropped. A pass that
nobody has planned, or that leaves its plan, keeps what autograd saves as long as there is room.
Saved tensors belong to stages, which are recomputed one at a time in backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

from ..observers import observers
from .accounting import PassAccounting
from .engine import Engine, NeededOp
from .eviction import Evictor
from .following import Follower, Planned
from .meter import Meter
from .records import Made, Op, Operand, OpTraits, Origin, Value
from .region import ExpectedOp, Region, SavedTensor
from .settled import JUST_RUN, SettledPass
from .tracing import OpFacts, Tracer, key_of

__all__ = ["BudgetedPass", "Owner", "PassRegion", "Sections"]

Tensor = Any  # an array of the engine

_STAGE_SHARE = 8  # of the budget is what a stage saves, if nobody has planned it


class Sections(Protocol):
    """Cuts of a pass: what one section makes and another one reads is kept."""

    def ran_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the arguments of an op, for `ran`."""

    def ran(self, op: Op, made: Made) -> list[Value]:
        """Note the section of an op; return what is kept because of it."""

    def section_of(self, value: Value) -> int: ...


class Owner(Protocol):
    """Who plans passes: `budget.Budget`."""

    @property
    def engine(self) -> Engine: ...

    @property
    def facts(self) -> OpFacts: ...

    @property
    def is_shared(self) -> bool:
        """Whether other processes train with this one, and are to evict the same."""

    def make_region(self, name: str) -> Region: ...

    def find_sections(self) -> Sections | None: ...

    def room(self, plain_bytes: int) -> int:
        """Return how many bytes an unplanned pass may hold in its forward part by now."""

    def restart(self) -> None:
        """Begin another pass."""

    def starts_again(self, op: Any, first: Any) -> bool:
        """Return whether a program starts again with an op, in a pass that began with `first`."""

    def learn_that_it_goes_on(self, op: Any) -> None:
        """Let no program start again with an op: each step of an RNN begins with it."""

    def backward_began(self, begun: BudgetedPass) -> None: ...

    def forward_ended(self, ended: BudgetedPass) -> None:
        """Plan a pass that nobody has planned, as soon as its forward part is known."""

    def backward_ended(self, ended: BudgetedPass) -> None: ...

    def expect_gradient(self, parameter: Tensor) -> None:
        """A parameter is used whose gradient is not to be counted."""

    def settle(self, planned: Planned, first: Any) -> None:
        """Let a pass that has begun with an op be a settled one, if its plan is."""


class PassRegion(Region):
    """The region of a whole pass: what is saved in it goes to the stages of the pass.

    An engine combines it with its own kind of region.
    """

    def __init__(self, observed: BudgetedPass, owner: Owner) -> None:
        super().__init__("memory budget")
        self.current = observed
        self._owner = owner
        self._stages: dict[int, ref[Region]] = {}  # of a settled pass
        self.attend(observed)

    def begin(self, observed: BudgetedPass) -> None:
        """Begin another pass."""
        self.current = observed
        self.marks = ()
        self.settled = self.outside = None
        self.attend(observed)

    # -- a settled pass ----------------------------------------------------------------------------

    def settle(self, settled: SettledPass) -> None:
        """Follow a plan of which all is known: no op is attended any more."""
        self.settled = self.current.settled = settled
        self.outside, self._stages = self._owner.make_region("memory budget"), {}
        self.observer, self.is_attended = None, False

    def ran_expected(self, made: Made) -> None:
        assert self.current.settled is not None
        for output, stages in self.current.settled.hold(made, self.engine).items():
            for stage in stages if output < len(made) else ():
                self.current.hold_on(stage, made[output][0])

    def ran_unexpected(
        self, traits: OpTraits, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ExpectedOp | None:
        settled, facts = self.current.settled, self._owner.facts
        assert settled is not None
        expected = settled.take(traits.func)  # which might have been the first of another pass
        if expected is not None:
            return expected
        has_grad = facts.has_gradient(args, kwargs)
        if not traits.may_write and (not has_grad or facts.reads_shapes_only(traits.func)):
            return JUST_RUN  # a metric, or something printed: backward has nothing to do with it
        self.leave_plan()
        return None

    def backward_runs(self) -> None:
        self.current.backward_began()

    def leave_plan(self) -> None:
        self.settled = self.outside = None
        self.current.leave_plan()
        self.attend(self.current)

    # -- what is saved -----------------------------------------------------------------------------

    def make_saved(self, operand: Operand) -> Any:
        if self.settled is not None:
            return super().make_saved(operand)
        return self.current.make_saved_outside(operand)

    def save(self, operand: Operand, tensor: Tensor | None, *, by_region: bool = False) -> Any:
        value = operand if type(operand) is Value else operand.value
        current = self.current
        if self.settled is not None:
            assert current.settled is not None
            number = current.settled.stage_for(value)
            reference = self._stages.get(number)
            stage = None if reference is None else reference()
            if stage is None:
                stage = current.begin_stage(number)
                self.joined_by(stage)
                self._stages[number] = ref(stage)
            return stage.save(operand, tensor)
        node = current.node_of(value, by_region=by_region)
        stage = current.stage_of(node, value)
        self.joined_by(stage)
        saved = stage.save(operand, tensor, by_region=by_region)
        if by_region and tensor is not None:
            current.keep_if_unplanned(saved, tensor)
        return saved

    def joined_by(self, stage: Region) -> None:
        """Called with a stage that is about to save what is made in this region."""

    def marked(self, value: Value) -> None:
        super().marked(value)
        self.current.is_alone = False

    def ran_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.current.sections is not None:
            self.current.sections.ran_on(args, kwargs)

    def opened_inside(self, child: Region) -> None:
        if self.settled is not None:
            self.leave_plan()
        self.current.is_alone = False
        super().opened_inside(child)

    def closed_inside(self, child: Region, reads: Iterable[Value]) -> None:
        self.current.region_closed(child, reads)


class BudgetedPass:
    """Observes the regions of one pass, and decides what is held."""

    def __init__(self, owner: Owner, follower: Follower) -> None:
        self._owner = owner
        self._engine = owner.engine
        self.tracer = Tracer(owner.engine, owner.facts)
        self.meter = Meter()
        self.follower = follower
        self.follows = follower.current is not None
        self.tracer.is_new = not self.follows
        self.recompute_seconds = 0.0
        self.recomputed_ops = 0
        self.began = time.perf_counter()
        self._is_shared = owner.is_shared  # all ranks are to evict the same
        self._evictor = Evictor(self.meter, owner.engine)
        self._node = 0  # of what is being saved
        # By number and section. They live as long as what is saved in them.
        self._stages: WeakValueDictionary[tuple[int, int], Region] = WeakValueDictionary()
        self._outside: ref[Region] | None = None  # for what was there before and is saved
        self._saved_for_next: list[ref[SavedTensor]] = []  # of that, for the op that runs next
        self.first: Any = None  # op, and its shapes
        self.left: tuple[ref[BudgetedPass], Any] | None = None  # a pass that may be a part of it
        self._left_at: Any = None  # the op with which another pass began
        # Of a pass that was taken for several, or that has left its plan: not to be planned.
        self.is_part = False
        self.is_alone = True  # no regions inside of it, and no marks: its ops say it all
        self.settled: SettledPass | None = None
        self._left_bytes = 0  # that it held when it left its plan
        self.sections: Sections | None = None
        self._stage = -1  # the last one, if nobody has planned them
        self._last_stage = -1
        self._stage_bytes = 0
        self._held_on: dict[int, list[ref[Value]]] = {}
        self._is_forward = True
        self._is_planned = False
        self.has_begun = False  # an op has run, or has saved its inputs
        self._accounting: PassAccounting | None = None  # if profilers track at that time
        self._kernel_workspace = 0  # of the op whose backward runs next
        self._task = -1  # the backward pass whose end it waits for

    # -- where it begins and ends ------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether its backward has begun, or nothing is left of its graph."""
        if not self._is_forward:
            return True
        if not len(self.tracer) or self._stages:
            return False
        return self._last_stage >= 0 or not (self.meter.live or self.settled)

    @property
    def position(self) -> int:
        """The number of ops that it has run."""
        return len(self.tracer) if self.settled is None else self.settled.index

    @property
    def has_backward(self) -> bool:
        return self.settled is not None or self.tracer.has_backward

    def goes_on_with(self, func: Any) -> bool:
        """Return whether the plan goes on with an op that reads nothing that the pass has made."""
        if self.settled is not None:
            return self.settled.begins_part(func)
        return self.follows and self.follower.begins_part(func)

    def leave_plan(self) -> None:
        """The program differs: from here on it is recorded, but too late to be planned."""
        assert self.settled is not None
        self._left_bytes = self.settled.kept_bytes
        self.settled.planned.was_left()
        self.settled, self.follows, self.is_part = None, False, True
        self.tracer.is_new = True
        self._stage = -1  # a new one: no observer has seen what is saved in the last one

    def adopt(self, before: BudgetedPass) -> None:
        """Take over what autograd has saved for the op that runs next: it is the first one."""
        for reference in before.take_saved_for_next():
            if (saved := reference()) is not None:
                self._begin_accounting()
                saved.region, saved.node = self._region_outside(), 0

    def take_saved_for_next(self) -> list[ref[SavedTensor]]:
        saved, self._saved_for_next = self._saved_for_next, []
        return saved

    def follow_on(self, before: BudgetedPass, op: Any) -> None:
        """Begin where the program of another pass starts again; something of that is left."""
        self.first = op
        self.left = ref(before), op
        before._left_at = op

    def look_back(self, reads_its_own: Callable[[], bool]) -> None:
        """See whether an op reads what the pass that was left has made: then they are one."""
        assert self.left is not None
        if self.left[0]() is None:
            self.left = None
        elif reads_its_own():
            self._join()

    def _join(self) -> None:
        self.is_part = True
        if self.left is not None:
            reference, op = self.left
            self.left = None
            self._owner.learn_that_it_goes_on(op)
            if (before := reference()) is not None:
                before._join()

    @property
    def _held_before(self) -> int:
        """The bytes that are held and not metered, and those of the pass that was left."""
        before = None if self.left is None else self.left[0]()
        return self._left_bytes + (0 if before is None else before.meter.live + before._held_before)

    # -- forward -----------------------------------------------------------------------------------

    def ran(self, op: Op, made: Made, seconds: float, *, has_grad: bool) -> None:
        number = len(self.tracer)
        if number == 0:
            self._begin_accounting()
            self.sections = self._owner.find_sections()
        self._saved_for_next.clear()
        key = key_of(op, made, self._engine)
        has_grad = has_grad and not self._owner.facts.reads_shapes_only(op.traits.func)
        writes = op.traits.may_write and any(v.origin is not Origin.EXTERNAL for v, _ in made)
        matters = has_grad or writes or self.sections is not None
        if self.follows and not matters and self.follower.next_plan(key) is None:
            return  # a metric, or something printed: backward has nothing to do with it
        planned = self.follower.step(key)
        # The key of the plan is the same: one object for all passes.
        known = key if planned is None else planned.keys[number]
        self.tracer.ran(op, made, seconds, known, has_grad=has_grad)
        if self.sections is not None:
            for value in self.sections.ran(op, made):
                self.tracer.pin(value)
        if self._is_shared:
            seconds = self._nominal_seconds(made)
        self._evictor.ran(op.number, seconds)
        self._count(op, made)
        if self.follows:
            self._follow(planned, number, made)
            if number == 0 and planned is not None and self._may_settle():
                self._owner.settle(planned, op.traits.func)
        else:
            room = self._owner.room(self.tracer.plain_bytes) - self._held_before
            self._evictor.shrink(max(room, 0))

    def _nominal_seconds(self, made: Made) -> float:
        """Return a time for an op that does not differ from run to run: that of writing its output.

        A pass that nobody has planned drops what is cheap by the seconds. If ranks dropped
        different values, parameters that FSDP gathers for a replay would not be the same on all.
        """
        return sum(self._engine.nbytes(tensor) for _, tensor in made) * 1e-10 + 1e-6

    def _may_settle(self) -> bool:
        return self._accounting is None and self.sections is None and self.left is None

    def hold_on(self, stage: int, value: Value) -> None:
        """Let a stage hold a value once it is recomputed."""
        self._held_on.setdefault(stage, []).append(ref(value))

    def _count(self, op: Op, made: Made) -> None:
        for value, tensor in made:
            if value.origin is not Origin.EXTERNAL:  # a write to memory that was there before
                self.meter.add(self._engine.memory(tensor))
        for value in op.reads:
            if value.origin is Origin.PARAMETER and value.held is not None:
                self._owner.expect_gradient(value.held.tensor)

    def _follow(self, planned: Planned | None, number: int, made: Made) -> None:
        if planned is None:
            self.follows = False  # another program: from here on nobody has planned it
            self.tracer.is_new = True
            self._stage = self._last_stage
            return
        keeps = planned.keeps[number]
        for output, (value, tensor) in enumerate(made):
            if keeps is not None and keeps[output]:
                self._keep(value, tensor)
            for stage in planned.held_on.get((number, output), ()):
                self.hold_on(stage, value)

    def _keep(self, value: Value, tensor: Tensor) -> None:
        value.dies_with = None  # a by-product does not go with what its op is run for
        if _is_to_decide(value):
            self._engine.hold_made(value, tensor)
            self._evictor.keeps(value, self.tracer.nbytes(value))

    def node_of(self, value: Value, *, by_region: bool) -> int:
        """Return the op for whose backward a value is saved now, and note it."""
        self._node = len(self.tracer) - 1 if by_region else self.tracer.saved_for(value)
        return self._node

    def stage_of(self, node: int, value: Value) -> Region:
        """Return the stage of the backward of an op, or the part of it that recomputes a value."""
        planned = self.follower.current if self.follows else None
        number = self._unplanned_stage() if planned is None else planned.stage_of(node)
        section = 0 if self.sections is None else self.sections.section_of(value)
        stage = self._stages.get((number, section))
        if stage is None:
            stage = self._owner.make_region(f"stage {number}")
            self._stages[number, section] = stage
            stage.attend(self)
            self._last_stage = max(self._last_stage, number)
            stage.hold_on = self._held_on.setdefault(number, [])
        return stage

    def begin_stage(self, number: int) -> Region:
        """Return a new stage of a settled pass."""
        stage = self._stages[number, 0] = self._owner.make_region(f"stage {number}")
        stage.backward_began = self.backward_began
        stage.hold_on = self._held_on.setdefault(number, [])
        self._last_stage = max(self._last_stage, number)
        return stage

    def _unplanned_stage(self) -> int:
        limit = self._owner.room(self.tracer.plain_bytes) // _STAGE_SHARE
        if self._stage < 0 or self._stage_bytes > limit:
            self._stage, self._stage_bytes = self._last_stage + 1, 0
        return self._stage

    def _region_outside(self) -> Region:
        """Return the region of what was there before the pass, and is saved in it."""
        region = None if self._outside is None else self._outside()
        if region is None:
            region = self._owner.make_region("memory budget")
            region.attend(self)
            self._outside = ref(region)
        return region

    def make_saved_outside(self, operand: Operand) -> SavedTensor:
        """Return a placeholder for a tensor from outside of the pass, and note what it is for."""
        value = operand if type(operand) is Value else operand.value
        self._node = self.tracer.saved_for(value)
        saved: SavedTensor = self._region_outside().make_saved(operand)
        if value.part_of is not None or self._accounting is not None:
            # It is in memory that the pass has made, or a profiler is told of what is saved.
            self.tracer.saved(value, max(self._node, 0), saved)
        if saved.watch is None and self._node == len(self.tracer):
            self._saved_for_next.append(ref(saved))
        return saved

    def saves(self, saved: SavedTensor) -> None:
        saved.node = self._node
        if not saved.value.origin.is_external:
            self.tracer.saved(saved.value, max(self._node, 0), saved)
        if self._node <= 0:
            self._begin_accounting()
        if self._accounting is not None:
            self._accounting.watch(saved)

    def _begin_accounting(self) -> None:
        """The first op runs, or saves its inputs: profilers that track now see the whole pass."""
        if not self.has_begun:
            self.has_begun = True
            if tracking := observers():
                owner = self._owner
                self._accounting = PassAccounting(
                    "memory budget", tracking, owner.engine, owner.facts, self.tracer
                )

    def saved(self, saved: SavedTensor, tensor: Tensor) -> None:
        if not saved.value.origin.is_external:
            self.keep_if_unplanned(saved, tensor)
        if self._accounting is not None:
            self._accounting.counts(saved, tensor)

    def keep_if_unplanned(self, saved: SavedTensor, tensor: Tensor) -> None:
        value = saved.value
        if self.follows or saved.tensor is not None or not _is_to_decide(value):
            return
        nbytes = self.tracer.nbytes(value)
        saved.keep(tensor)
        self._stage_bytes += nbytes
        self._evictor.keeps(value, nbytes)

    def region_closed(self, region: Region, reads: Iterable[Value]) -> None:
        """A region of the program inside of the pass is at its end: it recomputes by itself.

        `reads` are the values from before it that are held already, and that it starts from.
        """
        tracer, node = self.tracer, max(len(self.tracer) - 1, 0)
        for value in reads:
            tracer.saved(value, node)
        dropped = []
        for value, is_held in _saved_in(region).items():
            if is_held:
                tracer.keeps(value)
            else:
                dropped.append(value)
        tracer.needs_workspace(node, sum(map(tracer.nbytes, dropped)))
        self.pin_marks(region)

    def pin_marks(self, region: Region) -> None:
        for reference in region.marks:
            if (value := reference()) is not None and value.held is not None:
                self.tracer.pin(value)

    def closed(self, region: Region) -> None:
        """A region is closed; that of the pass is told by its owner."""

    def end_forward(self, region: Region | None = None) -> None:
        if self._is_forward:
            self._is_forward = False
            if region is not None:
                self.pin_marks(region)
            self.tracer.end_forward()
            if self._accounting is not None:
                self._accounting.ended_forward(list(self._stages.values()))

    def plan(self) -> None:
        """Let the owner plan it, once. What raises is raised again by the next backward."""
        self.end_forward()
        if not self._is_planned:
            if not self.is_part and self.has_backward:
                self._owner.forward_ended(self)
            self._is_planned = True

    def abandon(self) -> None:
        """The program has failed: there is nothing to plan."""
        self._is_forward = False
        self._is_planned = True

    # -- backward ----------------------------------------------------------------------------------

    def used(self, saved: SavedTensor) -> None:
        """Autograd asks for a saved tensor."""
        if self._engine.is_differentiating():
            return  # a gradient that is part of a graph
        self.tracer.used(saved.node)
        self._kernel_workspace = self.tracer.kernel_workspace.get(saved.node, 0)
        self.backward_began()

    def backward_began(self) -> None:
        task = self._engine.current_pass()
        if task not in (-1, self._task):
            self._task = task
            self._engine.at_end_of_pass(self._end_backward)
            if self._left_at is not None:  # it was not a validation that has been left
                self._owner.learn_that_it_goes_on(self._left_at)
            self._owner.backward_began(self)
            self.plan()

    def _end_backward(self) -> None:
        if self._accounting is not None:
            self._accounting.end_of_pass()
        self._owner.backward_ended(self)

    def ran_in_backward(self, out: Iterable[Tensor]) -> None:
        for tensor in out:
            self.meter.add(self._engine.memory(tensor))
        if self._kernel_workspace:
            self.meter.note_peak(self._kernel_workspace)
            self._kernel_workspace = 0

    def replaying(self, values: Mapping[Value, Tensor]) -> None:
        for value in reversed(list(values)):  # the last ones are new
            if not self.meter.add(self._engine.memory(values[value])):
                break
        if self._accounting is not None:
            self._accounting.replaying(values)

    def replayed(self, ops: list[NeededOp], seconds: float) -> None:
        self.recompute_seconds += seconds
        self.recomputed_ops += len(ops)
        if self._accounting is not None:
            self._accounting.replayed(ops, seconds)

    def filled(self, saved: SavedTensor, tensor: Tensor) -> None:
        if self._accounting is not None:
            self._accounting.filled(saved, tensor)

    def emptied(self, saved: SavedTensor) -> None:
        if self._accounting is not None:
            self._accounting.emptied(saved)

    def handed_over(self) -> None:
        if self._accounting is not None:
            self._accounting.handed_over()

    def end_of_pass(self) -> None: ...


def _saved_in(region: Region) -> dict[Value, bool]:
    """Return the values that a region saves for backward, and whether it holds them."""
    found: dict[Value, bool] = {}
    for saved in region.living():
        value = saved.value
        is_held = saved.tensor is not None or value.held is not None
        found[value] = is_held or found.get(value, False)
    return found


def _is_to_decide(value: Value) -> bool:
    """Return whether it is for a policy to say if a value is held."""
    return value.op is not None and value.held is None and not value.must_recompute
