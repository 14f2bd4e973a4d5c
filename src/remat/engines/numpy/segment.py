"""A checkpointed call: its inputs are kept, its activations are recomputed in backward."""

from __future__ import annotations

import functools
import operator
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from autograd.tracer import isbox, trace_stack

from ... import trees
from ...errors import RecomputeMismatchError, UnsupportedError
from ...loops import Account, is_inside_a_region
from ...observers import warn_once
from ...plans.policy import as_policy
from ...segments import SegmentOptions
from .boxes import OpLog, TracedArray, as_view
from .captures import capture, objects_among
from .custom_vjp import run_custom_vjp
from .fingerprints import fingerprint
from .memory_measure import held_elsewhere, memories, traced_memory
from .nodes import memory_of
from .randomness import GENERATORS, Randomness
from .recording.region import Region, close_region, threads
from .steps import is_inconclusive, read_only
from .tape import (
    Recording,
    is_differentiable,
    is_made,
    plain,
    record,
    refuse_boxes,
    refuse_changed,
    zeros_like,
)

__all__ = ["Segment", "name_of", "run_segment"]


def run_segment(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SegmentOptions,
) -> Any:
    """Call `function` without keeping its activations."""
    if trace_stack.top < 0:
        return function(*args, **kwargs)
    segment = Segment(function, args, kwargs, options)
    if not any(map(isbox, segment.values)):
        # (In the forward pass of a region nothing is traced; it is recorded in backward.)
        if not is_inside_a_region():
            _warn_of_no_effect(segment.display_name)
        return function(*args, **kwargs)
    if options.policy is not None:
        return _run_as_region(function, args, kwargs, options)
    return segment.run()


def _run_as_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SegmentOptions,
) -> Any:
    """Run it once, and its ops again in backward: a policy decides about results of ops."""
    region = Region(options.name or name_of(function), as_policy(options.policy))
    threads.region = region
    try:
        return function(*args, **kwargs)
    finally:
        close_region(region)


def _warn_of_no_effect(name: str) -> None:
    warn_once(
        ("numpy", "not traced", name),
        f"checkpointing {name} has no effect: nothing that goes in or that it closes over depends "
        "on what is differentiated, so nothing would be held; call it without checkpoint",
    )


class Segment:
    """A checkpointed call: forward once, and backward as often as autograd asks."""

    name = "checkpointed call"

    def __init__(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        options: SegmentOptions,
        log: OpLog | None = None,
    ) -> None:
        self.holder = [function]
        self.log = log  # of what is run again
        self.display_name = options.name or name_of(function)
        self.threshold = options.threshold
        self.leaves, self.structure = trees.flatten((args, kwargs))
        # (What is no array may refer to some: a function, an object.)
        self.objects = objects_among(self.leaves)
        self.captures = capture([self.holder, *self.objects.values()])
        self.values = [*self.leaves, *self.captures.boxes]
        self.inputs = [plain(value) for value in self.values]
        self.captured = [read_only(value) for value in self.inputs[len(self.leaves) :]]
        self.wanted = [is_differentiable(value) for value in self.inputs]
        self.randomness: Randomness | None = None
        if options.preserve_rng_state:
            given = [leaf for leaf in self.leaves if isinstance(leaf, GENERATORS)]
            self.randomness = Randomness([*self.captures.generators, *given])
        self.random_state = self.randomness.last_snapshot if self.randomness else {}
        self.results: list[Any] = []
        self.written: list[int] = []  # arguments that the function writes to: it gives them, too
        self.finals: list[Any] = []  # what they are after the call
        self.given: list[Any] = []  # the arrays that the first run got
        self.has_run = False
        self.result_structure: trees.Structure | None = None
        self.traced_results: list[bool] = []
        self.marks: list[Any] = []
        self.account = Account()
        self.tape_bytes = 0  # if it was measured
        self.tape_key = object()
        self.kept: Recording | None = None

    def run(self) -> Any:
        values = iter(run_custom_vjp(self, self.values))
        results = [next(values) if is_differentiable(r) else r for r in self.results]
        for i, final in zip(self.written, values, strict=True):
            self.leaves[i]._become(final)
        results = [self._alias(*pair) for pair in zip(self.results, results, strict=True)]
        self.results, self.finals, self.given = [], [], []  # they belong to the caller now
        assert self.result_structure is not None
        return trees.unflatten(self.result_structure, results)

    def _alias(self, value: Any, result: Any) -> Any:
        """Return the argument itself, or a view of it, where the function has returned that."""
        if not isbox(result) or not isinstance(value, np.ndarray):
            return result
        for leaf, array in zip(self.leaves, self.given, strict=False):
            if array is value and isbox(leaf):
                return leaf
        memory = memory_of(value)
        for i, final in zip(self.written, self.finals, strict=True):
            if memory_of(final) is memory:
                return as_view(result, self.leaves[i])
        return result

    def forward(self) -> tuple[Any, ...]:
        self.account.begin(self.display_name)
        records = self.threshold is not None or self.account.must_measure
        if records or not self._has_run_plainly():
            self._run_recorded()
        if self.randomness:
            # A state is some 30 KB: not worth holding for a function that draws no numbers.
            self.random_state = self.randomness.ignore_unused(self.random_state)
        self.has_run = True
        self.captures.refuse_leftovers()
        self.captures.refuse_hidden(self.results)
        refuse_boxes(self.results)
        self._refuse_writes_that_are_lost()
        results = [*self.results, *self.finals]
        self.traced_results = [is_differentiable(result) for result in results]
        if self.kept is None:
            self.marks = [fingerprint(result) for result in results]
        return tuple(result for result in results if is_differentiable(result))

    def backward(self, gradients: Any) -> list[Any]:
        recording = self.kept or self._recorded_again()
        parts = iter(gradients)
        seeds = [next(parts) if traced else None for traced in self.traced_results]
        once = self.kept is None
        gathered = recording.go_back(seeds, [None] * len(self.inputs), once=once)
        self.account.frees(self.tape_key)
        return [
            total[0] if total is not None else zeros_like(value) if want else None
            for value, total, want in zip(self.inputs, gathered, self.wanted, strict=True)
        ]

    def _has_run_plainly(self) -> bool:
        """Run without a tape, unless the function writes to plain arrays in its reach.

        Only a run with a tape shows whether it writes traced values to them. Other writes are
        found by read-only arrays. Why not by comparing contents? That nothing was written has to be
        certain: a write that leaves all bits as they were (x *= w, with w = 1) has a gradient.
        """
        code = _code(self.holder[0])
        for known, run in (
            (_writers, self._run_read_only),
            (_outside_writers, self._run_on_copies),
        ):
            if code in known:
                continue
            try:
                with (
                    self.account.inside(),
                    self.captures.filled(self.captured),
                    self.captures.constants_read_only(),
                ):
                    self.results = run()
                return True
            except ValueError as error:
                if not _is_about_read_only(error):
                    raise
            known.add(code)
            self._restore()
        return False

    def _run_read_only(self) -> list[Any]:
        self.given = [read_only(value) for value in self.inputs[: len(self.leaves)]]
        return self._call(self.given)

    def _run_on_copies(self) -> list[Any]:
        """Run on copies of the arguments, which cost memory."""
        copies: dict[int, Any] = {}
        self.given, self.written = [], []
        for i, leaf in enumerate(self.leaves):
            value = self.inputs[i]
            if not isinstance(value, np.ndarray):
                self.given.append(value)
            elif isinstance(leaf, TracedArray):
                if id(leaf) not in copies:
                    copies[id(leaf)] = value.copy(order="K")
                    self.written.append(i)
                self.given.append(copies[id(leaf)])
            elif self.wanted[i]:
                self.given.append(read_only(value))
            else:  # whole numbers have no gradient: written at once, and kept as they were
                self.inputs[i] = value.copy(order="K")
                self.given.append(value)
        results = self._call(self.given)
        self.finals = [self.given[i] for i in self.written]
        return results

    def _restore(self) -> None:
        """Undo what a run that did not come to its end has done to random and other numbers."""
        if self.randomness:
            self.randomness.restore(self.random_state)
        self.captures.restore_numbers()

    def _refuse_writes_that_are_lost(self) -> None:
        """What is written to an array has to be seen by all that look at its memory."""
        if any(not isinstance(self.leaves[i], TracedArray) for i in self.written):
            raise _lost_write()
        arrays = [(i, v) for i, v in enumerate(self.inputs) if isinstance(v, np.ndarray)]
        for i in self.written:
            for j, other in arrays:
                same = j < len(self.leaves) and self.leaves[i] is self.leaves[j]
                if not same and np.may_share_memory(self.inputs[i], other):
                    raise UnsupportedError(
                        f"{self.display_name} writes to its argument {i}, whose memory another "
                        "value that it gets or closes over shares; pass a copy of one of them"
                    )

    def _run_recorded(self) -> None:
        """Run with a tape and measure it; keep it if it is small enough."""
        account = self.account
        with traced_memory() as used, account.inside(measuring=self.threshold is None):
            base = used()
            recording = record(self._recorded, self.inputs, self.wanted)
            self.tape_bytes = used() - base
        count = len(recording.results) - len(self.written)
        self.results, self.finals = recording.results[:count], recording.results[count:]
        recording.results = []
        self.given = self.inputs[: len(self.leaves)]
        for i, final in zip(self.written, self.finals, strict=True):
            self.given[i] = final
        brought = memories(self.inputs)
        # (Not a list of its own where that is not needed: references are counted below.)
        results = self.results + self.finals if self.finals else self.results
        made = {k: size for k, size in memories(results).items() if k not in brought}
        pairs = zip(results, held_elsewhere(results), strict=True)
        on_tape = {k: made[k] for k in memories(r for r, held in pairs if held) if k in made}
        between = max(0, self.tape_bytes - sum(made.values()))
        self.tape_bytes = between + sum(on_tape.values())
        inputs = memories(p for p, v in zip(self.inputs, self.values, strict=True) if is_made(v))
        account.add_measured(between + account.inner_excess, inputs | on_tape)
        account.keeps_arrays(inputs)
        if self.threshold is not None and self.tape_bytes <= self.threshold:
            self.kept = recording
            account.keeps_arrays(on_tape)
            account.keeps(object(), between)

    def _recorded_again(self) -> Recording:
        started = time.perf_counter()
        with self._replayed(), self.account.inside():
            recording = record(self._recorded, self.inputs, self.wanted, self.log)
        self.account.recomputed(1, time.perf_counter() - started)
        refuse_boxes(recording.results)
        self._refuse_another(recording)
        recording.results = []
        self.account.holds(self.tape_key, self.tape_bytes)
        return recording

    def _refuse_another(self, recording: Recording) -> None:
        """Refuse a second run that gave other results, or could have without showing it."""
        again = [fingerprint(result) for result in recording.results]
        name = name_of(self.holder[0])
        if again != self.marks:
            number = next(
                (i for i, (a, b) in enumerate(zip(again, self.marks, strict=False)) if a != b), 0
            )
            raise RecomputeMismatchError(
                f"{name} was run again in backward and its result {number} differs from the "
                "first time. Likely causes: it reads something that changes between calls (a "
                "counter, a clock, a file, a global), its inputs or what it closes over were "
                "changed in place since, or it draws from a random generator that remat cannot "
                "see (or preserve_rng_state=False); make it a function of its inputs"
            )
        pairs = zip(self.inputs, self.values[: len(self.leaves)], strict=False)
        start = [value for value, leaf in pairs if isbox(leaf)]
        ends = zip(recording.results, recording.ends, strict=True)
        if is_inconclusive(start, [result for result, node in ends if node is not None]):
            self.captures.refuse_changed_number(
                name, "Pass the number in as an argument, or call the function without checkpoint"
            )

    def _recorded(self, boxes: list[Any]) -> list[Any]:
        count = len(self.leaves)
        # An array that is passed twice is one box: a write to it is seen twice.
        first = {id(leaf): i for i, leaf in reversed(list(enumerate(self.leaves)))}
        own = [
            boxes[first[id(leaf)]] if isbox(leaf) else boxes[i]
            for i, leaf in enumerate(self.leaves)
        ]
        leaves = [box.copy() if isinstance(box, np.ndarray) else box for box in own]
        with self.captures.filled(boxes[count:]):
            results = self._call(leaves)
        refuse_changed(boxes[count:], self.inputs[count:])
        written = [
            i
            for i, box in enumerate(boxes[:count])
            if isbox(box) and box._value is not self.inputs[i]
        ]
        if not self.has_run:
            self.written = written
        elif not set(written) <= set(self.written):
            raise _lost_write()
        return results + [boxes[i] for i in self.written]

    def _call(self, leaves: list[Any]) -> list[Any]:
        given = [self.objects[i][0] if i in self.objects else x for i, x in enumerate(leaves)]
        args, kwargs = trees.unflatten(self.structure, given)
        results, self.result_structure = trees.flatten(self.holder[0](*args, **kwargs))
        after, structure = trees.flatten((args, kwargs))
        if structure != self.structure or not all(map(operator.is_, after, given)):
            raise UnsupportedError(
                f"{self.display_name} stores into a list, dict or dataclass that it gets, and the "
                "caller's would stay as it was; let it store into a copy, and return that"
            )
        return results

    def _replayed(self) -> AbstractContextManager[None]:
        randomness = self.randomness
        if randomness is None:
            return nullcontext()

        @contextmanager
        def replayed() -> Any:
            now = randomness.snapshot()
            randomness.restore(self.random_state)
            try:
                yield
            finally:
                randomness.restore(now)

        return replayed()


# The code of functions that write to their arguments: they are run on copies at once.
_writers: weakref.WeakSet[Any] = weakref.WeakSet()
# Those that write to other arrays: to what they close over, or to arguments that are not traced.
_outside_writers: weakref.WeakSet[Any] = weakref.WeakSet()


def _code(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", type(function))


def _is_about_read_only(error: ValueError) -> bool:
    return "read-only" in str(error)


def _lost_write() -> UnsupportedError:
    return UnsupportedError(
        "a checkpointed function writes to an array whose gradient would be lost: to an argument "
        "that is not traced by remat while others are, or to what it closes over; let it write to "
        "a copy (x = x.copy()), and return what it has made"
    )


def name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
