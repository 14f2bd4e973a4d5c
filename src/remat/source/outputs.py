"""What steps add to lists and store into objects: collected step by step, handed over at the end.

While a step runs, a list of its own (or a log of stores) stands for the list that the loop appends
to. The arrays in it are outputs of the step, stacked by the loop runner; everything else is noted
here, once, when the step runs for the first time. After the loop the items are put together again
and added to the list, in their order, so that gradients flow through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .analysis import Output
from .identity import Origins, Tokens
from .layouts import Layout, take_apart
from .protocols import Place, Values

__all__ = ["Outputs", "StoreLog"]


class StoreLog:
    """Notes stores into an object: `log[index] = value`."""

    __slots__ = ("stores",)

    def __init__(self) -> None:
        self.stores: list[tuple[Any, Any]] = []

    def __setitem__(self, index: Any, value: Any) -> None:
        self.stores.append((_frozen(index), value))


class _Slice(NamedTuple):
    """A slice in a place where it has to be a leaf."""

    start: Any
    stop: Any
    step: Any


def _frozen(index: Any) -> Any:
    """Write an index so that it is a tree: arrays in it are outputs, too."""
    if isinstance(index, slice):
        return _Slice(index.start, index.stop, index.step)
    return tuple(map(_frozen, index)) if isinstance(index, tuple) else index


def _thawed(index: Any) -> Any:
    if isinstance(index, _Slice):
        return slice(*index)
    return tuple(map(_thawed, index)) if isinstance(index, tuple) else index


class _Made(NamedTuple):
    """What a step has made, but for its arrays."""

    layout: Layout
    others: tuple[Any, ...]
    tokens: Tokens


class Outputs:
    """The outputs of one run of a loop."""

    __slots__ = (
        *("_api", "_at", "_examples", "_made", "_numbers", "_origins", "_outputs", "_owned"),
        *("_rows", "_targets", "_variables"),
    )

    def __init__(
        self,
        outputs: Sequence[Output],
        targets: Sequence[Any],
        variables: int,
        examples: Sequence[list[Any] | None],
        api: Values,
        numbers: bool,
        origins: Origins,
        at: Place,
        *,
        owned: bool,
    ) -> None:
        self._outputs = outputs
        self._owned = owned  # the function may write to the items
        self._origins = origins
        self._targets = targets
        self._variables = variables
        self._api = api
        self._numbers = numbers
        self._at = at
        self._made: dict[int, list[_Made]] | None = {}  # None: it is handed over
        self._rows: list[tuple[int, list[_Made], list[Any]]] = []  # of steps, with their arrays
        # Zeros like the arrays of a step; None: not known before a step has run.
        self._examples = [None if e is None else self._zeros(e) for e in examples]

    @property
    def first_window(self) -> int:
        """Where the last items of lists stand among the values of a state: after the variables."""
        return self._variables

    @property
    def has_windows(self) -> bool:
        return any(each.window for each in self._outputs)

    @property
    def has_arrays(self) -> bool:
        """Whether steps have, or may have, arrays among their outputs."""
        return any(each is None or len(each) > 0 for each in self._examples)

    # -- in a step -----------------------------------------------------------------------------

    def collector(self, place: int, windows: Sequence[Any]) -> Any:
        output = self._outputs[place]
        if output.kind == "store":
            return StoreLog()
        begin = sum(each.window for each in self._outputs[:place])
        return list(windows[begin : begin + output.window])

    def windows(self, collectors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the last items of each list, for the next step."""
        found: list[Any] = []
        for output, collector in zip(self._outputs, collectors, strict=True):
            if output.window:
                found += collector[-output.window :]
        return tuple(found)

    def made_by(
        self,
        step: int,
        collectors: tuple[Any, ...],
        check: Callable[[Sequence[Any]], None],
    ) -> list[Any]:
        """Return the arrays that a step has made, in the places that they have in every step."""
        arrays: list[Any] = []
        notes: list[_Made] = []
        for place, (output, collector) in enumerate(zip(self._outputs, collectors, strict=True)):
            items = collector.stores if output.kind == "store" else collector[output.window :]
            layout, found, others = take_apart(tuple(items), self._api, self._numbers)
            check(others)
            tokens = self._origins.tokens(tuple(items), found, step, place)
            notes.append(_Made(layout, others, tokens))
            arrays += self._filled(place, list(found))
        if self._made is not None:
            self._made.setdefault(step, notes)
        return arrays

    def placeholders(self) -> list[Any]:
        """Return what stands for the arrays of a step that is not run."""
        return [leaf for example in self._examples for leaf in example or ()]

    def _filled(self, place: int, arrays: list[Any]) -> list[Any]:
        example = self._examples[place]
        if example is None:
            example = self._examples[place] = self._zeros(arrays)
        name = self._outputs[place].name
        if len(arrays) > len(example):
            raise self._at.error(
                f"a turn adds {len(arrays)} arrays to {name}, turns before it {len(example)}"
            )
        for leaf, zeros in zip(arrays, example, strict=False):
            if self._api.kind(leaf) != self._api.kind(zeros):
                raise self._at.error(
                    f"a turn adds an array of {_words(self._api.kind(leaf))} to {name}, turns "
                    f"before it one of {_words(self._api.kind(zeros))}"
                )
        return arrays + example[len(arrays) :]

    def _zeros(self, items: list[Any]) -> list[Any]:
        _, arrays, _ = take_apart(tuple(items), self._api, self._numbers)
        return [self._api.zeros_like(leaf) for leaf in arrays]

    # -- after the loop ------------------------------------------------------------------------

    def hand_over(self, stacks: Sequence[Any], first: int, steps: int) -> None:
        """Take what the steps from `first` on have made."""
        assert self._made is not None
        columns = [self._api.entries(stack, owned=self._owned) for stack in stacks]
        for row in range(steps):
            notes = self._made.pop(first + row, None)
            if notes is None:
                return  # the loop had ended
            self._rows.append((first + row, notes, [column[row] for column in columns]))

    def deliver(self, origins: Origins) -> None:
        """Add what the steps have made to the lists and objects that it is meant for."""
        rows, self._rows, self._made = self._rows, [], None
        for step, notes, given in rows:
            at = 0
            for place, made in enumerate(notes):
                name = self._outputs[place].name
                arrays = [
                    origins.output(array, token, step, name)
                    for token, array in zip(made.tokens.arrays, given[at:], strict=False)
                ]
                at += len(self._examples[place] or ())
                items = made.layout.put_together(arrays, made.others)
                self._deliver(place, origins.containers(items, made.tokens))

    def _deliver(self, place: int, items: Sequence[Any]) -> None:
        target = self._targets[place]
        if self._outputs[place].kind == "list":
            target.extend(items)
            return
        for index, value in items:
            target[_thawed(index)] = value


def _words(kind: tuple[Any, Any]) -> str:
    return f"{kind[1]} of shape {kind[0]}"
