"""What generated code calls: loops that run in their own code at first, and then as steps.

Before each of its first turns a loop checks whether the rest of it can run as steps: something that
goes from turn to turn is being differentiated, enough turns are left, and its variables hold the
same kinds of values as in the turn before. Until then, and if that never happens, its own code
runs.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .. import trees
from ..errors import LoopTransformError, RematWarning
from .analysis import LoopSpec
from .frames import (
    BareFrame,
    Frame,
    LoopOutputs,
    StoreLog,
    held_arrays,
    is_object,
    loses_gradients,
)
from .identity import UNBOUND, Layout, LoopResults, StepObjects, take_apart
from .iterables import items_of, lazy
from .protocols import LoopSite, Options, Runner, Values

__all__ = ["Runtime"]

_CHECKS = 16  # turns with a check before each; after that only some have one
_FIRST_STRETCH = 16
_CHANGEABLE = (list, dict, set, bytearray, deque, StoreLog)
_FIXED = (bool, int, float, complex, str, bytes, tuple, frozenset, range, type(None))


class Runtime:
    """What the generated code of one function knows of the library."""

    def __init__(
        self,
        specs: Mapping[int, LoopSpec],
        filename: str,
        options: Options,
        values: Values,
        runner: Runner,
        *,
        strict: bool,
    ) -> None:
        self.unbound = UNBOUND
        self.specs = specs
        self.filename = filename
        self.options = options
        self.values = values
        self.runner = runner
        self.strict = strict
        self.refused: set[int] = set()

    def for_loop(self, number: int, iterable: Any) -> ForLoop | CompiledLoop:
        if self.values.is_compiling():
            return CompiledLoop(iterable)
        return ForLoop(self, self.specs[number], iterable)

    def while_loop(self, number: int) -> WhileLoop | CompiledLoop:
        return CompiledLoop() if self.values.is_compiling() else WhileLoop(self, self.specs[number])

    def lazy(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self.values.is_compiling():
            return function(*args, **kwargs)
        return lazy(self.values, function, *args, **kwargs)


class CompiledLoop:
    """A loop in code that a compiler traces: it decides itself what to recompute."""

    check_now = False
    is_running = True

    def __init__(self, iterable: Any = None) -> None:
        self._iterable = iterable

    def items(self) -> Any:
        return self._iterable


class _RunningLoop:
    """One run of a loop."""

    def __init__(self, runtime: Runtime, spec: LoopSpec, options: Options) -> None:
        self._runtime = runtime
        self._spec = spec
        self._options = options
        self._api = runtime.values
        self._at = LoopSite(runtime.filename, spec.line)
        self._items: Any = None
        self._turn = 0  # that comes next
        self._is_open_ended = True  # it may end before its last turn
        self._never = False  # it stays in its own code
        self.is_running = True
        self._layout: Layout | None = None  # of the values, at the last check
        self._lengths: tuple[int, list[int]] | None = None  # of lists; with the turn of the check
        self._examples: list[list[Any]] = [[] for _ in spec.outputs]  # what a turn adds to lists
        self._delays = 0  # checks that found something to wait for
        self._like: Any = None  # an array that is tracked
        self._taken: tuple[tuple[Any, ...], Sequence[Any]] = (), ()

    @property
    def _left(self) -> float:
        """The number of turns that are left, infinite if it is not known."""
        raise NotImplementedError

    def _is_time(self, since: int = 0) -> bool:
        """Say whether to check before this turn; `since`: the turn with the first check."""
        age = self._turn - since
        return not self._never and age >= 0 and (age <= _CHECKS or not age & (age - 1))

    # -- whether the rest can run as steps -----------------------------------------------------

    def take(self, given: tuple[Any, ...]) -> bool:
        """Decide whether the rest of the loop runs as steps.

        The values are in a tuple: how many references a call holds to its arguments depends on the
        version of Python, on the instruction that loads them, and on whether TorchDynamo runs.
        """
        if self._left < max(2, self._options.min_steps // 2):
            self._never = True
            return False
        shared = self._shared(given)  # first of all: it counts references
        count = len(self._spec.state)
        values, targets = given[:count], given[count:]
        self._note_additions(targets)
        if not self._is_tracked(values, targets):
            return False
        reason = shared or next(filter(None, self._reasons(values, targets)), None)
        if reason is None:
            for output, target in zip(self._spec.outputs, targets, strict=True):
                values += tuple(target[-output.window :]) if output.window else ()
            delay = self._reason_to_wait(values, targets)
            if delay is None:
                self._taken = values, targets
                return True
            self._delays += 1
            reason = delay if self._delays > _CHECKS else None
        if reason is not None:
            self._never = True
            self._refuse(reason)
        return False

    def _refuse(self, reason: str) -> None:
        """Say, once, that a loop stays as it is."""
        runtime, words = self._runtime, self._at.words(reason)
        if runtime.strict:
            raise LoopTransformError(words)
        if self._spec.number not in runtime.refused:
            runtime.refused.add(self._spec.number)
            words += "; it runs without checkpoints"
            warnings.warn_explicit(words, RematWarning, *self._at)

    def _is_tracked(self, values: tuple[Any, ...], targets: Sequence[Any]) -> bool:
        newest = [each[-1] for each in targets if type(each) is list and each]
        leaves = _leaves((values, newest, list(filter(self._is_array, targets))))
        self._like = next(filter(self._api.is_tracked, leaves), None)
        return self._like is not None

    def _note_additions(self, targets: Sequence[Any]) -> None:
        """Note what the last turn has added to lists: examples of its outputs."""
        before, lengths = self._lengths, [_length(each) for each in targets]
        if before is not None and before[0] == self._turn - 1:
            for place, length in enumerate(before[1]):
                if lengths[place] - length > len(self._examples[place]):
                    self._examples[place] = targets[place][length:]
        self._lengths = self._turn, lengths

    def _reason_to_wait(self, values: tuple[Any, ...], targets: Sequence[Any]) -> str | None:
        """Look for what is not known yet: what a turn adds to a list, what variables hold."""
        for each, target, example in zip(self._spec.outputs, targets, self._examples, strict=True):
            if each.kind == "list" and (len(target) < each.window or not example):
                return f"its first turns did not add to {each.name}: add to it in each turn"
        layout, _, others = take_apart(values, self._api)
        before, self._layout = self._layout, layout
        is_known = before is not None and before[:3] == layout[:3]
        if is_known or (not others and layout.structure is None):
            return None
        words = "what its variables hold is of another structure in every turn"
        return f"{words}: append to a list instead"

    def _shared(self, given: Sequence[Any]) -> str | None:
        """Name an object that changes in place and that something else refers to, too."""
        spec = self._spec
        names = [*spec.state, *(each.name for each in spec.outputs)]
        changed = spec.changed.union(each.name for each in spec.outputs) - spec.unbound
        for place, name in enumerate(names):
            if name not in changed or isinstance(given[place], _FIXED):
                continue
            if not (self._is_array(given[place]) or type(given[place]) in _CHANGEABLE):
                continue
            is_shared = sys.getrefcount(given[place]) > _ONE_VARIABLE
            if is_shared or self._api.is_seen_elsewhere(given[place]):
                words = f"its body changes {name} in place, and something else refers to it, too"
                return f"{words}: change a copy"
        return None

    def _is_array(self, value: Any) -> bool:
        return self._api.is_array_type(type(value))

    def _reasons(self, values: Sequence[Any], targets: Sequence[Any]) -> Iterator[str | None]:
        """Look for what steps cannot iterate over, change, add to, or differentiate."""
        spec = self._spec
        if self._items is not None and self._items.length is None:
            words = f"it iterates over a {self._items.what}, whose items cannot be asked for again"
            yield f"{words}: iterate over list(…)"
        named = [*zip(spec.state, values, strict=True)]
        for name, value in named:
            if name in spec.changed and not (isinstance(value, _FIXED) or value is UNBOUND):
                yield self._reason_of_change(name, value)
            if any(map(self._api.is_traced_number, _leaves(value))):
                yield f"{name} is a Python number that is differentiated: use np.float64(…)"
        for output, target in zip(spec.outputs, targets, strict=True):
            kinds = (list,) if output.kind == "list" else (list, dict, StoreLog)
            is_array = output.kind == "store" and self._is_array(target)
            if not (is_array or type(target) in kinds):
                words = f"its body changes {output.name} in place, a {type(target).__name__}"
                yield f"{words}: use a list"
        outputs = (each.name for each in spec.outputs)
        for name, value in [*named, *zip(outputs, self._examples, strict=True)]:
            if any(loses_gradients(leaf, self._api) for leaf in _leaves(value)):
                words = f"{name} holds an object with arrays, or that makes some: a state or a "
                yield f"{words}result is an array or a tuple, list, dict or dataclass of them"
        if self._is_open_ended:
            yield self._runtime.runner.can_run_while(self._options)

    def _reason_of_change(self, name: str, value: Any) -> str | None:
        words = f"its body changes {name} in place, "
        if name in self._spec.unbound:
            return f"{words}which may have no value before it: assign it before the loop"
        is_kind = type(value) in _CHANGEABLE and name not in self._spec.deeply
        if is_kind or self._is_array(value):
            return None
        return f"{words}a {type(value).__name__}: assign a new one"

    # -- running as steps ----------------------------------------------------------------------

    def run(self, make: Callable[..., Any], *reads: Any) -> tuple[Any, ...]:
        """Run the rest of the loop; return how it was left and the values of its variables."""
        spec, api, at, items = self._spec, self._api, self._at, self._items
        (values, targets), self._taken = self._taken, ((), ())
        sources: list[Any] = []
        scanned: list[Any] = []
        if items is not None and spec.needs_item:
            items.prepare(self._turn, sources, scanned, api)
        views_matter = spec.is_exposed or bool(spec.changed)
        objects = StepObjects(api, at, views_matter=views_matter)
        outputs = None
        if spec.outputs:
            examples = [
                None if each.kind == "store" else seen + seen[-1:] * ((each.most or 0) - len(seen))
                for each, seen in zip(spec.outputs, self._examples, strict=True)
            ]
            outputs = LoopOutputs(spec, examples, objects)
        needs_step = items is not None and spec.needs_item and items.needs_step
        is_bare = spec.is_bare and not needs_step and self._is_array(values[0])
        frame = (BareFrame if is_bare else Frame)(
            *(spec, objects, items, outputs),
            last=None if math.isinf(self._left) else self._turn + int(self._left),
            scans=bool(scanned) or (outputs is not None and outputs.has_arrays),
        )
        state, before = frame.initial(values, self._turn, self._like)
        if spec.is_written_later:  # and the runner holds the state until then
            state = trees.map_leaves(lambda v: api.copied(v) if self._is_array(v) else v, state)
        kept = _Reads(zip(spec.reads, reads, strict=True), spec.volatile, api)
        entry = None if items is None else items.entry
        results = LoopResults(objects, before, reads, entry)
        step = make(frame, tuple(sources), *kept.copies)
        del values, make, reads, before
        final = self._run(step, frame, state, outputs, scanned)
        changed = kept.changed()
        if changed is not None:
            raise at.error(f"a function that it calls changes {changed}, a list, dict or object")
        volatile = [i for i, name in enumerate(spec.state) if name in spec.volatile]
        exit_number, found = frame.final(final, results, volatile, targets)
        self._never, self.is_running = True, False
        self._examples, self._layout, self._like = [], None, None
        return exit_number, *found

    def _run(
        self, step: Any, frame: Frame, state: Any, outputs: LoopOutputs | None, scanned: list[Any]
    ) -> Any:
        runner, options, first = self._runtime.runner, self._options, self._turn
        if not frame.scans:
            if self._is_open_ended:
                longest = None if math.isinf(self._left) else int(self._left)
                state = runner.loop_while(frame.goes_on, step, state, longest, options)
            else:
                state = runner.loop(step, state, int(self._left), options)
            if outputs is not None:
                outputs.take_stacks((), first)
            return state
        length = _FIRST_STRETCH if self._is_open_ended else self._left
        while True:
            count, begin = int(min(length, self._left)), self._turn - first
            xs = [each[begin : begin + count] for each in scanned]
            xs = xs or [self._api.numbered(count, state if frame.is_bare else state[0])]
            state, stacks = runner.scan(step, state, xs, options)
            if outputs is not None:
                outputs.take_stacks(stacks, self._turn)
            self._turn += count
            length *= 2
            if not self._is_open_ended or not frame.goes_on(state):
                return state


class ForLoop(_RunningLoop):
    """A run of a `for` loop."""

    def __init__(self, runtime: Runtime, spec: LoopSpec, iterable: Any) -> None:
        items, given = items_of(iterable, runtime.values)
        super().__init__(runtime, spec, runtime.options.merged(given) if given else runtime.options)
        self._items = items
        self._is_open_ended = spec.has_exits
        self.check_now = False

    @property
    def _left(self) -> float:
        return math.inf if self._items.length is None else self._items.length - self._turn

    def items(self) -> Iterable[Any]:
        """Return what the loop iterates over, as long as it runs in its own code."""
        native: Iterable[Any] = self._items.native()
        is_short = self._left < self._options.min_steps
        return native if is_short or not self._api.is_differentiating() else self._counted(native)

    def _counted(self, native: Iterable[Any]) -> Iterator[Any]:
        # What cannot be counted may have few turns, and is nothing to warn of then.
        is_counted = self._items.length is not None or self._runtime.strict
        since = 0 if is_counted else self._options.min_steps
        for self._turn, item in enumerate(native):
            self.check_now = self._is_time(since)
            yield item
            if not self.is_running:
                return


class WhileLoop(_RunningLoop):
    """A run of a `while` loop."""

    def __init__(self, runtime: Runtime, spec: LoopSpec) -> None:
        super().__init__(runtime, spec, runtime.options)
        self._turn = -1
        self._never = not self._api.is_differentiating()

    @property
    def _left(self) -> float:
        return math.inf

    @property
    def check_now(self) -> bool:
        """Count a turn, and say whether to check before it."""
        if self._never:
            return False
        self._turn += 1
        return self._is_time(self._options.min_steps)


class _Reads:
    """What steps read and do not bind, as it is now: lists and dicts may change after the loop.

    So may arrays that the function writes into elsewhere, which are `volatile`.
    """

    def __init__(
        self, named: Iterable[tuple[str, Any]], volatile: Container[str], api: Values
    ) -> None:
        named = list(named)
        self._api = api
        self._trees: list[tuple[str, Any, list[Any], trees.Structure]] = []
        self._objects = [(name, value) for name, value in named if is_object(value, api)]
        self._held = {id(array): array for _, v in self._objects for array in held_arrays(v, api)}
        self.copies = [self._copy(name, value, name in volatile) for name, value in named]

    def _copy(self, name: str, value: Any, is_volatile: bool) -> Any:
        if type(value) in (list, dict):
            leaves, structure = trees.flatten(value)
            tree = trees.unflatten(structure, leaves)
            self._trees.append((name, tree, leaves, structure))
            return tree
        if type(value) in (set, bytearray, deque):
            return copy.copy(value)
        is_array = self._api.is_array_type(type(value))
        return self._api.copied(value) if is_volatile and is_array else value

    def changed(self) -> str | None:
        """Name a list, dict or object that a function has changed which the loop calls."""
        for name, tree, leaves, structure in self._trees:
            now, new = trees.flatten(tree)
            if new != structure or not all(a is b for a, b in zip(now, leaves, strict=True)):
                return name
        for name, value in self._objects:
            if any(id(array) not in self._held for array in held_arrays(value, self._api)):
                return name
        return None


def _leaves(values: Any) -> list[Any]:
    return trees.flatten(values)[0]


def _length(value: Any) -> int:
    return len(value) if type(value) is list else 0


def _references_of_a_variable() -> int:
    """Count the references to an object in one variable and in a tuple, as `take` counts them."""
    value: list[Any] = []
    given = (value,)
    return sys.getrefcount(given[0])


_ONE_VARIABLE = _references_of_a_variable()
