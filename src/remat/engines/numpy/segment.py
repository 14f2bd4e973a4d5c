"""A checkpointed call: its inputs are kept, what lies between is computed again on the way back."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from autograd.tracer import isbox, trace_stack

from ... import trees
from ...errors import RecomputeMismatchError, UnsupportedError
from ...loops import Account, is_inside_a_region
from ...segments import SegmentOptions
from ...watching import warn_once
from .boxes import OpLog
from .captures import capture
from .randomness import GENERATORS, Randomness
from .steps import proves_nothing, read_only
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
from .weighing import held_elsewhere, memories, traced_memory
from .whole import run_as_one

__all__ = ["Segment", "checkpoint_tensor", "fingerprint", "name_of", "run_segment"]


def run_segment(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SegmentOptions,
) -> Any:
    """Call `function`, and forget what it computes on the way."""
    if trace_stack.top < 0:
        return function(*args, **kwargs)
    segment = Segment(function, args, kwargs, options)
    if not any(map(isbox, segment.values)):
        # (Inside a region that runs ahead nothing is traced: only its way back is recorded.)
        if not is_inside_a_region():
            _warn_of_no_effect(segment.shown_name)
        return function(*args, **kwargs)
    return segment.run()


def checkpoint_tensor(tensor: Any, threshold: int | None) -> Any:
    raise UnsupportedError(
        "a single NumPy array cannot be checkpointed: who made it is not known any more. Pass the "
        "function that computes it: remat.checkpoint(fn, x), or for a loop "
        "remat.checkpointed_loop(step, x, n)"
    )


def _warn_of_no_effect(name: str) -> None:
    warn_once(
        ("numpy", "not traced", name),
        f"checkpointing {name} has no effect: nothing that goes in or that it closes over depends "
        "on what is differentiated, so nothing would be held; call it without checkpoint",
    )


class Segment:
    """A checkpointed call: ahead once, and back as often as autograd asks."""

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
        self.shown_name = options.name or name_of(function)
        self.threshold = options.threshold
        self.leaves, self.structure = trees.flatten((args, kwargs))
        self.captures = capture([self.holder])
        self.values = [*self.leaves, *self.captures.boxes]
        self.inputs = [plain(value) for value in self.values]
        self.captured = [read_only(value) for value in self.inputs[len(self.leaves) :]]
        self.wanted = [is_differentiable(value) for value in self.inputs]
        self.randomness: Randomness | None = None
        if options.preserve_rng_state:
            given = [leaf for leaf in self.leaves if isinstance(leaf, GENERATORS)]
            self.randomness = Randomness([*self.captures.generators, *given])
        self.moment = self.randomness.last_snapshot if self.randomness else ()
        self.results: list[Any] = []
        self.result_structure: trees.Structure | None = None
        self.traced_results: list[bool] = []
        self.marks: list[Any] = []
        self.account = Account()
        self.tape_bytes = 0  # if it was weighed
        self.tape_key = object()
        self.kept: Recording | None = None

    def run(self) -> Any:
        values = iter(run_as_one(self, self.values))
        results = [next(values) if is_differentiable(r) else r for r in self.results]
        self.results = []  # they belong to the caller now
        assert self.result_structure is not None
        return trees.unflatten(self.result_structure, results)

    def ahead(self) -> tuple[Any, ...]:
        self.account.begin(self.shown_name)
        if self.threshold is None and not self.account.must_weigh:
            self.results = self._run_plainly()
        else:
            self._rehearse()
        if self.randomness:
            # A state is some 30 KB: not worth holding for a function that draws no numbers.
            now = self.randomness.snapshot()
            self.moment = self.randomness.watch_only_used(self.moment, now)
        self.captures.refuse_leftovers()
        refuse_boxes(self.results)
        self.traced_results = [is_differentiable(result) for result in self.results]
        if self.kept is None:
            self.marks = [fingerprint(result) for result in self.results]
        return tuple(result for result in self.results if is_differentiable(result))

    def back(self, gradients: Any) -> list[Any]:
        recording = self.kept or self._recorded_again()
        parts = iter(gradients)
        seeds = [next(parts) if traced else None for traced in self.traced_results]
        gathered = recording.go_back(seeds, [None] * len(self.inputs))
        self.account.frees(self.tape_key)
        return [
            total[0] if total is not None else zeros_like(value) if want else None
            for value, total, want in zip(self.inputs, gathered, self.wanted, strict=True)
        ]

    def _run_plainly(self) -> list[Any]:
        # Copies, in case the function works in place: the inputs are kept for the way back.
        own = [v.copy() if isinstance(v, np.ndarray) else v for v in self.inputs]
        with self.account.inside(), self.captures.filled(self.captured):
            return self._call(own[: len(self.leaves)])

    def _rehearse(self) -> None:
        """Run with a tape and weigh it; keep it if it is light enough."""
        account = self.account
        with traced_memory() as used, account.inside(rehearsing=self.threshold is None):
            base = used()
            recording = record(self._recorded, self.inputs, self.wanted)
            self.tape_bytes = used() - base
        self.results, recording.results = recording.results, []
        brought = memories(self.inputs)
        made = {k: size for k, size in memories(self.results).items() if k not in brought}
        pairs = zip(self.results, held_elsewhere(self.results), strict=True)
        on_tape = {k: made[k] for k in memories(r for r, held in pairs if held) if k in made}
        between = max(0, self.tape_bytes - sum(made.values()))
        self.tape_bytes = between + sum(on_tape.values())
        inputs = memories(p for p, v in zip(self.inputs, self.values, strict=True) if is_made(v))
        account.weighed(between + account.inner_excess, inputs | on_tape)
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
                f"{name} was run again on the way back and its result {number} differs from the "
                "first time. Likely causes: it reads something that changes between calls (a "
                "counter, a clock, a file, a global), its inputs or what it closes over were "
                "changed in place since, or it draws from a random generator that remat cannot "
                "see (or preserve_rng_state=False); make it a function of its inputs"
            )
        pairs = zip(self.inputs, self.values[: len(self.leaves)], strict=False)
        start = [value for value, leaf in pairs if isbox(leaf)]
        ends = zip(recording.results, recording.ends, strict=True)
        if proves_nothing(start, [result for result, node in ends if node is not None]):
            self.captures.refuse_changed_number(
                name, "Pass the number in as an argument, or call the function without checkpoint"
            )

    def _recorded(self, boxes: list[Any]) -> list[Any]:
        leaves = [
            box.copy() if isinstance(box, np.ndarray) else box for box in boxes[: len(self.leaves)]
        ]
        closed_over = boxes[len(self.leaves) :]
        with self.captures.filled(closed_over):
            results = self._call(leaves)
        refuse_changed(closed_over, self.inputs[len(self.leaves) :])
        return results

    def _call(self, leaves: list[Any]) -> list[Any]:
        args, kwargs = trees.unflatten(self.structure, leaves)
        results, self.result_structure = trees.flatten(self.holder[0](*args, **kwargs))
        return results

    def _replayed(self) -> AbstractContextManager[None]:
        randomness = self.randomness
        if randomness is None:
            return nullcontext()

        @contextmanager
        def replayed() -> Any:
            now = randomness.snapshot()
            randomness.restore(self.moment)
            try:
                yield
            finally:
                randomness.restore(now)

        return replayed()


def name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def fingerprint(value: Any) -> Any:
    """Return a few bytes that change if any bit of a result changes."""
    if isinstance(value, tuple):
        return tuple(map(fingerprint, value))
    if isinstance(value, float | complex | np.inexact):
        value = np.asarray(value)  # what is a Python number in a call is NumPy's in a recorded one
    if not isinstance(value, np.ndarray):
        return repr(value)  # NaN is not equal to itself, but written alike
    # Copies of long doubles have other bytes where none are in use.
    data = value.astype(np.complex128) if value.dtype == np.clongdouble else value
    data = data.astype(np.float64) if data.dtype == np.longdouble else data
    digest = hashlib.blake2b(np.ascontiguousarray(data).data, digest_size=16).digest()
    return value.shape, value.dtype.str, digest
