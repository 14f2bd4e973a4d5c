"""One call with and one without checkpointing, compared bit for bit.

Both runs start from the same numbers: random sources and closed-over numbers are set back in
between. Afterwards they are as the run without checkpointing has left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ... import trees
from ...errors import RecomputeMismatchError
from ...segments import SegmentOptions
from ...verification import Verification
from .captures import capture, objects_among
from .comparing import difference_of
from .fingerprints import fingerprint
from .randomness import GENERATORS, GeneratorStates, Randomness
from .segment import name_of, run_segment
from .source_location import location_of_caller
from .tape import is_differentiable, plain, record, refuse_boxes, refuse_changed, zeros_like

__all__ = ["verify"]


def verify(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SegmentOptions,
) -> Verification:
    """Run with and without checkpointing; return how much was compared, or raise."""
    return _Trial(function, args, kwargs, options).verdict()


class _LoggedOp(NamedTuple):
    name: str
    mark: Any
    place: str


class _OpLogger(list[_LoggedOp]):
    """What ops gave, in the order that they ran."""

    def __call__(self, name: str, value: Any) -> None:
        self.append(_LoggedOp(name, fingerprint(plain(value)), location_of_caller()))


class _TrialResult(NamedTuple):
    output: Any
    gradients: list[Any]  # None for what is not differentiable
    numbers: dict[Any, Any]  # by place
    buffers: list[Any]
    random_state: GeneratorStates


class _Trial:
    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: SegmentOptions,
    ) -> None:
        self.name = name_of(function)
        self.options = options
        self.holder = [function]
        self.leaves, self.structure = trees.flatten((args, kwargs))
        self.captures = capture([self.holder, *objects_among(self.leaves).values()], arrays=True)
        self.inputs = [plain(value) for value in (*self.leaves, *self.captures.boxes)]
        self.wanted = [is_differentiable(value) for value in self.inputs]
        if not any(self.wanted):
            raise TypeError(
                f"{self.name} gets no floating-point number and closes over no array of them: "
                "there is no gradient to compare"
            )
        given = [leaf for leaf in self.leaves if isinstance(leaf, GENERATORS)]
        self.randomness = Randomness([*self.captures.generators, *given])
        self.ops, self.ops_again = _OpLogger(), _OpLogger()

    def verdict(self) -> Verification:
        random_state = self.randomness.snapshot()
        numbers, buffers = self.captures.numbers.values(), [b.copy() for b in self.captures.buffers]
        without = self._outcome(self._plainly, self.ops)
        self._restore(numbers, buffers, random_state)
        try:
            with_checkpoint = self._outcome(self._checkpointed, self.ops_again)
        except RecomputeMismatchError as error:
            raise RecomputeMismatchError(f"{error}{self._first_op()}") from error
        finally:
            self._restore(without.numbers, without.buffers, without.random_state)
        for difference in self._differences(without, with_checkpoint):
            raise RecomputeMismatchError(
                f"{self.name} is not the same with checkpointing: {difference}{self._first_op()}"
            )
        return Verification(
            self.name,
            outputs=len(trees.flatten(without.output)[0]),
            gradients=sum(self.wanted),
            buffers=len(numbers) + len(buffers),
            ops=len(self.ops),
            random_state=self.options.preserve_rng_state,
        )

    # -- two runs --------------------------------------------------------------------------------

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.holder[0](*args, **kwargs)

    def _checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_segment(self.holder[0], args, kwargs, self.options)

    def _outcome(self, call: Callable[..., Any], log: _OpLogger | None = None) -> _TrialResult:
        structures: list[trees.Structure] = []

        def run(boxes: list[Any]) -> list[Any]:
            leaves, closed_over = boxes[: len(self.leaves)], boxes[len(self.leaves) :]
            # Copies of what is not traced, in case the function works in place.
            own = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
            with self.captures.filled(closed_over):
                args, kwargs = trees.unflatten(self.structure, own)
                results, structure = trees.flatten(call(args, kwargs))
            refuse_changed(closed_over, self.inputs[len(self.leaves) :])
            structures.append(structure)
            return results

        recording = record(run, self.inputs, self.wanted, log)
        refuse_boxes(recording.results)
        gathered = recording.go_back(_seeds(recording.results))
        gradients = [
            None if not want else zeros_like(value) if total is None else total[0]
            for value, want, total in zip(self.inputs, self.wanted, gathered, strict=True)
        ]
        output = trees.unflatten(structures[0], recording.results)
        numbers, buffers = self.captures.numbers.values(), [b.copy() for b in self.captures.buffers]
        return _TrialResult(output, gradients, numbers, buffers, self.randomness.snapshot())

    def _restore(
        self, numbers: dict[Any, Any], buffers: list[Any], random_state: GeneratorStates
    ) -> None:
        self.captures.numbers.put(numbers)
        for buffer, content in zip(self.captures.buffers, buffers, strict=True):
            buffer[...] = content
        self.randomness.restore(random_state)

    # -- what differs ----------------------------------------------------------------------------

    def _differences(self, one: _TrialResult, other: _TrialResult) -> Iterator[str]:
        yield from _of_trees("output", other.output, one.output)
        gradients = zip(self._names_of_inputs(), other.gradients, one.gradients, strict=True)
        for name, found, expected in gradients:
            words = difference_of(found, expected) if expected is not None else None
            if words:
                yield f"the gradient with respect to {name} {words}"
        for key, expected in one.numbers.items():
            if repr(other.numbers[key]) != repr(expected):  # NaN is written alike
                yield (
                    f"{self.captures.numbers.name(key)}, which it closes over, is "
                    f"{other.numbers[key]!r} afterwards instead of {expected!r}"
                )
        for found, expected in zip(other.buffers, one.buffers, strict=True):
            words = difference_of(found, expected)
            if words:
                yield f"an array that it closes over {words}"
        source = self.randomness.difference(other.random_state, one.random_state)
        if source and self.options.preserve_rng_state:
            yield f"the random state of {source} is another one afterwards"

    def _names_of_inputs(self) -> list[str]:
        args, kwargs = trees.unflatten(self.structure, self.inputs[: len(self.leaves)])
        given = {f"input {i}": arg for i, arg in enumerate(args)} | kwargs
        names = [name + way for name, tree in given.items() for way in trees.paths(tree)]
        return names + self.captures.names()

    def _first_op(self) -> str:
        """Say which op was the first to give another result when it was run again."""
        for i, (op, again) in enumerate(zip(self.ops, self.ops_again, strict=False)):
            if (op.name, op.mark) != (again.name, again.mark):
                what = "gave another result" if op.name == again.name else f"was {again.name}"
                return f". The first op to differ is op {i}, {op.name} at {op.place}: it {what}"
        if self.ops_again and len(self.ops) != len(self.ops_again):
            return f". It ran {len(self.ops)} ops, and {len(self.ops_again)} when it was run again"
        return ""


def _of_trees(what: str, found: Any, expected: Any) -> Iterator[str]:
    (leaves, structure), (others, expected_structure) = (
        trees.flatten(found),
        trees.flatten(expected),
    )
    if structure != expected_structure:
        yield f"the {what} has the structure {structure} instead of {expected_structure}"
        return
    for way, one, other in zip(trees.paths(expected), leaves, others, strict=True):
        words = difference_of(one, other)
        if words:
            yield f"the {what}{way} {words}"


def _seeds(results: list[Any]) -> list[Any]:
    """Gradients to go back with: no two entries alike, and the same every time."""
    generator = np.random.default_rng(0)
    return [_seed(result, generator) if is_differentiable(result) else None for result in results]


def _seed(result: Any, generator: np.random.Generator) -> Any:
    value = np.asarray(result)
    noise = generator.standard_normal(value.shape)
    if value.dtype.kind == "c":
        noise = noise + 1j * generator.standard_normal(value.shape)
    return noise.astype(value.dtype)[()] if value.ndim == 0 else noise.astype(value.dtype)
