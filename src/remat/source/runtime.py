"""What generated code calls: loops that run plainly at first, and then as steps.

A loop is *due* for a look before each of its first turns. It is taken over when something that goes
from turn to turn is being differentiated, enough turns are left, and its variables hold the same
kinds of values as in the turn before. Until then, and if that never happens, its own code runs.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .. import trees
from ..errors import LoopTransformError, RematWarning
from .analysis import LoopPlan
from .frames import BareFrame, Frame
from .identity import Origins
from .iterables import Items, items_of, lazy
from .kept import Kept, loses_gradients
from .layouts import UNBOUND, Layout, spare_room, take_apart
from .outputs import Outputs, StoreLog
from .protocols import Options, Place, Runner, Values

__all__ = ["Runtime"]

_TRIES = 16  # turns with a look before each; after that only some have one
_UNSTABLE = 8  # looks that find other kinds of values than the one before
_FIRST_STRETCH = 16
_CHANGEABLE = (list, dict, set, bytearray, deque, StoreLog)
_FIXED = (bool, int, float, complex, str, bytes, tuple, frozenset, range, type(None))


class Runtime:
    """What the generated code of one function knows of the library."""

    def __init__(
        self,
        plans: Mapping[int, LoopPlan],
        filename: str,
        options: Options,
        values: Values,
        runner: Runner,
        *,
        strict: bool,
    ) -> None:
        self.unbound = UNBOUND
        self.plans = plans
        self.options = options
        self.values = values
        self.runner = runner
        self._filename = filename
        self.is_strict = strict
        self._refused: set[int] = set()

    def for_loop(self, number: int, iterable: Any) -> ForLoop | CompiledFor:
        if self.values.is_compiling():
            return CompiledFor(iterable)
        return ForLoop(self, self.plans[number], iterable)

    def while_loop(self, number: int) -> WhileLoop | CompiledWhile:
        if self.values.is_compiling():
            return CompiledWhile()
        return WhileLoop(self, self.plans[number])

    def lazy(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self.values.is_compiling():
            return function(*args, **kwargs)
        return lazy(self.values, function, *args, **kwargs)

    def place(self, plan: LoopPlan) -> Place:
        return Place(self._filename, plan.line)

    def refuse(self, plan: LoopPlan, reason: str) -> None:
        """Say, once, that a loop stays as it is."""
        words = self.place(plan).words(reason)
        if self.is_strict:
            raise LoopTransformError(words)
        if plan.number not in self._refused:
            self._refused.add(plan.number)
            words += "; it runs without checkpoints"
            warnings.warn_explicit(words, RematWarning, self._filename, plan.line)


class _Loop:
    """One run of a loop."""

    def __init__(self, runtime: Runtime, plan: LoopPlan, options: Options) -> None:
        self._runtime = runtime
        self._plan = plan
        self._options = options
        self._turn = 0  # that comes next
        self._items: Items | None = None
        self._seen: Layout | None = None  # kinds of the values, at the last look
        self._lengths: list[int] | None = None  # of lists, at the last look
        self._first_lengths: list[int] | None = None
        self._examples: list[list[Any]] = [[] for _ in plan.outputs]
        self._age = 0  # looks since the first one
        self._changes = 0  # looks that found values of other kinds
        self._like: Any = None  # an array that is tracked
        self._is_waiting = False  # for a list to be added to
        self._never = False
        self._taken: tuple[tuple[Any, ...], Sequence[Any]] | None = None
        self._is_closed = False

    # -- whether to take over ------------------------------------------------------------------

    def take(self, given: tuple[Any, ...]) -> bool:
        """Decide whether the rest of the loop runs as steps.

        The values are in a tuple: how many references a call holds to its arguments depends on the
        version of Python, on the instruction that loads them, and on whether TorchDynamo runs.
        """
        if self._left < max(2, self._options.min_steps // 2):
            self._never = True
            return False
        shared = self._shared(given)  # first of all: it counts references
        count = len(self._plan.state)
        values, targets = given[:count], given[count:]
        self._track(targets)
        if not self._is_tracked(values, targets):
            return False
        reason = shared or self._unsuitable(values, targets) or self._with_objects(values)
        reason = reason or self._without_example(targets)
        if reason is not None:
            self._never = True
            self._runtime.refuse(self._plan, reason)
            return False
        values += self._windows(targets)
        if self._is_waiting or not self._is_settled(values):
            return False
        self._taken = values, targets
        return True

    @property
    def _left(self) -> float:
        """The number of turns that are left, infinite if it is not known."""
        raise NotImplementedError

    @property
    def _is_open_ended(self) -> bool:
        """Whether the loop may end before its last turn."""
        raise NotImplementedError

    def _is_time(self, since: int = 0) -> bool:
        """Say whether to have a look before this turn; `since`: the turn with the first one."""
        age = self._turn - since
        return not self._never and age >= 0 and (age <= _TRIES or not age & (age - 1))

    def _is_tracked(self, values: tuple[Any, ...], targets: Sequence[Any]) -> bool:
        newest = tuple(each[-1] for each in targets if type(each) is list and each)
        leaves = _leaves((values, newest, tuple(filter(self._is_array, targets))))
        self._like = next(filter(self._runtime.values.is_tracked, leaves), None)
        return self._like is not None

    def _is_array(self, value: Any) -> bool:
        return self._runtime.values.is_array_type(type(value))

    def _track(self, targets: Sequence[Any]) -> None:
        """Note what turns add to lists: examples of their outputs."""
        lengths = [len(each) if type(each) is list else 0 for each in targets]
        self._age = 0 if self._lengths is None else self._age + 1
        if self._first_lengths is None:
            self._first_lengths = lengths
        if self._lengths is not None and self._age <= _TRIES:
            for place, before in enumerate(self._lengths):
                if lengths[place] - before > len(self._examples[place]):
                    self._examples[place] = targets[place][before:]
        self._lengths = lengths

    def _without_example(self, targets: Sequence[Any]) -> str | None:
        """Look for a list whose items are not known yet, or are too few to look back on."""
        self._is_waiting = False
        for output, target, example in zip(
            self._plan.outputs, targets, self._examples, strict=True
        ):
            if output.kind == "list" and (len(target) < output.window or not example):
                self._is_waiting = True
                if self._age > _TRIES:
                    return f"its first {_TRIES} turns did not add to {output.name}"
        return None

    def _windows(self, targets: Sequence[Any]) -> tuple[Any, ...]:
        """Return the last items of lists that turns look back on."""
        found: list[Any] = []
        for output, target in zip(self._plan.outputs, targets, strict=True):
            if output.window:
                found += target[-output.window :]
        return tuple(found)

    def _shared(self, given: Sequence[Any]) -> str | None:
        """Name an object that changes in place and that something else refers to, too."""
        plan, api = self._plan, self._runtime.values
        names = [*plan.state, *(each.name for each in plan.outputs)]
        changed = plan.changed | {each.name for each in plan.outputs}
        for place, name in enumerate(names):
            if name not in changed or name in plan.unbound:
                continue
            is_fixed = isinstance(given[place], _FIXED)
            if is_fixed or not _is_changeable(given[place], api):
                continue
            references = sys.getrefcount(given[place])
            if references > _ONE_VARIABLE:  # (those that lists of outputs hold are followed)
                references -= self._times_stored(place, given)
            if references > _ONE_VARIABLE or api.is_seen_elsewhere(given[place]):
                return (
                    f"its body changes {name} in place, and something else refers to it, too: "
                    "change a copy"
                )
        return None

    def _times_stored(self, place: int, given: Sequence[Any]) -> int:
        """Count the references to a value that turns have put into lists of outputs."""
        count = sum(item is given[place] for items in self._examples for item in items)
        for at, before in enumerate(self._first_lengths or (), len(self._plan.state)):
            if type(given[at]) is list:
                count += sum(item is given[place] for item in given[at][before:])
        return count

    def _unsuitable(self, values: Sequence[Any], targets: Sequence[Any]) -> str | None:
        plan, api = self._plan, self._runtime.values
        if self._items is not None and self._items.length is None:
            return (
                f"it iterates over a {self._items.what}, whose items cannot be asked for again: "
                "iterate over list(…)"
            )
        for name, value in zip(plan.state, values, strict=True):
            if name not in plan.changed or isinstance(value, _FIXED) or value is UNBOUND:
                continue
            if name in plan.unbound:
                return f"its body changes {name} in place, which may have no value before it"
            is_array = api.is_array_type(type(value))
            if not is_array and (name in plan.deeply or type(value) not in _CHANGEABLE):
                return f"its body changes {name} in place, a {type(value).__name__}"
        for output, target in zip(plan.outputs, targets, strict=True):
            if not self._can_collect(output.kind, target):
                return f"its body changes {output.name} in place, a {type(target).__name__}"
        if self._is_open_ended:
            return self._runtime.runner.can_run_while(self._options)
        return None

    def _with_objects(self, values: Sequence[Any]) -> str | None:
        """Name a variable or a list with an object that gradients would not flow through."""
        named = [*zip(self._plan.state, values, strict=True)]
        named += zip((each.name for each in self._plan.outputs), self._examples, strict=True)
        for name, value in named:
            if any(loses_gradients(leaf, self._runtime.values) for leaf in _leaves(value)):
                return (
                    f"{name} holds an object with arrays, or that makes some: a state or a result "
                    "is an array or a tuple, list, dict or dataclass of them"
                )
        return None

    def _can_collect(self, kind: str, target: Any) -> bool:
        if kind == "list":
            return type(target) is list
        is_array = self._runtime.values.is_array_type(type(target))
        return is_array or type(target) in (list, dict, StoreLog)

    def _is_settled(self, values: tuple[Any, ...]) -> bool:
        """Say whether the values are of the kinds that they were of at the last look."""
        layout, _, others = take_apart(values, self._runtime.values, numbers=False)
        before, self._seen = self._seen, layout
        is_known = before is not None and before[:3] == layout[:3]
        if is_known or (not others and layout.structure is None):
            return True
        self._changes += 1
        if self._changes > _UNSTABLE:
            self._never = True
            self._runtime.refuse(
                self._plan, "what its variables hold is of another structure in every turn"
            )
        return False

    # -- running as steps ----------------------------------------------------------------------

    def run(self, make: Callable[..., Any], *reads: Any) -> tuple[Any, ...]:
        """Run the rest of the loop; return how it was left and the values of its variables."""
        assert self._taken is not None
        (values, targets), self._taken = self._taken, None
        sources: list[Any] = []
        scanned: list[Any] = []
        if self._items is not None and self._plan.needs_item:
            self._items.prepare(self._turn, sources, scanned, self._runtime.values)
        place, plan = self._runtime.place(self._plan), self._plan
        views_matter = plan.is_exposed or bool(plan.changed)
        origins = Origins(self._runtime.values, place, views_matter=views_matter)
        frame, outputs, state = self._frame(values, targets, scanned, origins)
        kept = Kept(
            zip(self._plan.reads, reads, strict=True), self._plan.volatile, self._runtime.values
        )
        origins.read(reads)
        if self._items is not None:
            origins.iterates(self._items.entry)
        step = make(frame, tuple(sources), *kept.copies)
        del values, targets, make, reads
        final = self._run(step, frame, state, outputs, scanned)
        changed = kept.changed()
        if changed is not None:
            raise self._runtime.place(self._plan).error(
                f"a function that it calls changes {changed}, a list, dict or object"
            )
        volatile = [i for i, n in enumerate(self._plan.state) if n in self._plan.volatile]
        leaves_by, found = frame.final(final, volatile)
        origins.forget()
        self._close()
        return leaves_by, *found

    def _close(self) -> None:
        self._never = self._is_closed = True
        self._examples, self._seen, self._like = [], None, None

    def _frame(
        self,
        values: tuple[Any, ...],
        targets: Sequence[Any],
        scanned: list[Any],
        origins: Origins,
    ) -> tuple[Frame, Outputs | None, Any]:
        plan, api = self._plan, self._runtime.values
        numbers = any(map(api.is_traced_number, _leaves(values)))
        layout, arrays, others = take_apart(values, api, numbers)
        outputs = self._outputs(targets, numbers, origins)
        has_arrays = outputs is not None and outputs.has_arrays
        is_bare = self._may_be_bare and len(values) == len(arrays) == 1 and not layout.structure
        needs_one = not any(map(api.is_tracked, arrays))  # outputs are differentiated, then
        frame = (BareFrame if is_bare else Frame)(
            api,
            room=len(arrays) + spare_room(values, others) + needs_one,
            numbers=numbers,
            changed=tuple(i for i, name in enumerate(plan.state) if name in plan.changed),
            last=None if math.isinf(self._left) else self._turn + int(self._left),
            items=self._items,
            outputs=outputs,
            scans=bool(scanned) or has_arrays,
            owns_reads=plan.owns_reads,
            origins=origins,
            at=self._runtime.place(plan),
        )
        state = frame.initial(values, self._turn)
        if plan.is_written_later:  # and the runner holds the state until then
            is_array = api.is_array_type
            state = trees.map_leaves(lambda v: api.copied(v) if is_array(type(v)) else v, state)
        if needs_one:  # a runner plans by what the first step is given
            place = len(arrays)
            state = (*state[:place], api.tracked_zero(self._like), *state[place + 1 :])
        return frame, outputs, state

    @property
    def _may_be_bare(self) -> bool:
        """Whether steps need to know nothing but the arrays."""
        if self._is_open_ended or self._plan.outputs or not self._plan.is_steady:
            return False
        return self._items is None or not self._plan.needs_item or not self._items.needs_step

    def _outputs(self, targets: Sequence[Any], numbers: bool, origins: Origins) -> Outputs | None:
        plan = self._plan
        if not plan.outputs:
            return None
        examples = [
            None
            if output.is_steady
            else example + example[-1:] * ((output.most or 0) - len(example))
            for output, example in zip(plan.outputs, self._examples, strict=True)
        ]
        return Outputs(
            plan.outputs,
            targets,
            len(plan.state),
            examples,
            self._runtime.values,
            numbers,
            origins,
            self._runtime.place(plan),
            owned=plan.is_exposed,
        )

    def _run(
        self, step: Any, frame: Frame, state: Any, outputs: Outputs | None, scanned: list[Any]
    ) -> Any:
        runner, options, first = self._runtime.runner, self._options, self._turn
        if not frame.scans:
            if self._is_open_ended:
                longest = None if math.isinf(self._left) else int(self._left)
                state = runner.loop_while(frame.goes_on, step, state, longest, options)
            else:
                state = runner.loop(step, state, int(self._left), options)
            if outputs is not None:
                outputs.hand_over((), first, sys.maxsize)
            return state
        if not self._is_open_ended:
            return self._stretch(step, frame, state, int(self._left), outputs, scanned)
        length = _FIRST_STRETCH
        while frame.goes_on(state):
            count = int(min(length, self._left))
            begin = self._turn - first
            part = [each[begin : begin + count] for each in scanned]
            state = self._stretch(step, frame, state, count, outputs, part)
            length *= 2
        return state

    def _stretch(
        self,
        step: Any,
        frame: Frame,
        state: Any,
        count: int,
        outputs: Outputs | None,
        scanned: list[Any],
    ) -> Any:
        """Run so many steps with outputs, or with inputs, of their own."""
        runtime = self._runtime
        xs = scanned or [runtime.values.numbered(count, frame.example(state))]
        state, stacks = runtime.runner.scan(step, state, xs, self._options)
        if outputs is not None:
            outputs.hand_over(stacks, self._turn, count)
        self._turn += count
        return state


class ForLoop(_Loop):
    """A run of a `for` loop."""

    def __init__(self, runtime: Runtime, plan: LoopPlan, iterable: Any) -> None:
        items, given = items_of(iterable, runtime.values)
        super().__init__(runtime, plan, runtime.options.merged(given) if given else runtime.options)
        self._items: Items = items
        self.due = False

    @property
    def _left(self) -> float:
        return math.inf if self._items.length is None else self._items.length - self._turn

    @property
    def _is_open_ended(self) -> bool:
        return self._plan.has_exits

    def items(self) -> Iterable[Any]:
        """Return what the loop iterates over, as long as it runs in its own code."""
        native = self._items.native()
        is_short = self._left < self._options.min_steps
        if is_short or not self._runtime.values.is_differentiating():
            return native
        return self._counted(native)

    def _counted(self, native: Iterable[Any]) -> Iterator[Any]:
        # What cannot be counted may have few turns, and is nothing to warn of then.
        is_counted = self._items.length is not None or self._runtime.is_strict
        since = 0 if is_counted else self._options.min_steps
        for self._turn, item in enumerate(native):
            self.due = self._is_time(since)
            yield item
            if self._is_closed:
                return


class WhileLoop(_Loop):
    """A run of a `while` loop."""

    def __init__(self, runtime: Runtime, plan: LoopPlan) -> None:
        super().__init__(runtime, plan, runtime.options)
        self.open = True
        self._turn = -1
        self._never = not runtime.values.is_differentiating()

    @property
    def _left(self) -> float:
        return math.inf

    @property
    def _is_open_ended(self) -> bool:
        return True

    def due(self) -> bool:
        if self._never:
            return False
        self._turn += 1
        return self._is_time(self._options.min_steps)

    def _close(self) -> None:
        super()._close()
        self.open = False


class CompiledFor:
    """A `for` loop in code that a compiler traces: it decides itself what to recompute."""

    due = False

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable

    def items(self) -> Any:
        return self._iterable


class CompiledWhile:
    """A `while` loop in such code."""

    open = True

    def due(self) -> bool:
        return False


def _leaves(values: Any) -> list[Any]:
    return trees.flatten(values)[0]


def _lengthened(example: list[Any], most: int) -> list[Any]:
    """Take it that more items of a turn would be like its last one."""
    return example + example[-1:] * (most - len(example))


def _is_changeable(value: Any, api: Values) -> bool:
    return api.is_array_type(type(value)) or type(value) in _CHANGEABLE


def _references_of_a_variable() -> int:
    """Count the references to an object in one variable and in a tuple, as `take` counts them."""
    value: list[Any] = []
    given = (value,)
    return sys.getrefcount(given[0])


_ONE_VARIABLE = _references_of_a_variable()
