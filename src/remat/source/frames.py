"""What goes from step to step, and what steps add to lists and store into objects.

A loop runner wants a state of arrays whose structure stays the same. So the state of a `Frame` is a
flat tuple: the arrays, empty places for more of them, and one `Static` leaf with all the rest,
which also says where each array belongs. If all that has to be known is one array, the state of a
`BareFrame` is this array.

While a step runs, a list of its own (or a log of stores) stands for the list that the loop appends
to. The arrays in it are outputs of the step, stacked by the loop runner; everything else is noted,
once, when the step runs for the first time. After the loop the items are put together again and
added to the list, in their order, so that gradients flow through them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

from .. import trees
from ..introspect import Walk, find_within, is_lazy, is_library_object
from .analysis import LoopSpec
from .identity import ATOMS, UNBOUND, Contents, LoopResults, StepObjects, Token, parts, take_apart
from .iterables import Items
from .protocols import Values

__all__ = [
    "BareFrame",
    "Frame",
    "LoopOutputs",
    "StoreLog",
    "held_arrays",
    "is_object",
    "loses_gradients",
]

_EMPTY = 0  # in the place of an array
_SPARE = 4  # places for arrays that variables without one may come to hold
_LIMIT = 20_000  # objects
_PLAIN = (bool, int, float, complex, str, bytes, range, type, FunctionType, ModuleType, type(None))
_NEW: Token = ("new",)
_EARLIER_ITEM: Token = ("earlier item",)
_ENDED = -1  # the exit of a loop that ends by itself


class Static:
    """All of a state that is no array."""

    __slots__ = ("contents", "exit", "step")

    def __init__(self, step: int, exit_number: int, contents: Contents) -> None:
        self.step = step  # the number of the turn that comes next
        self.exit = exit_number  # 0: the loop goes on
        self.contents = contents

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        mine, theirs = self.contents, other.contents
        return (
            (self.step, self.exit) == (other.step, other.exit)
            and mine.layout[:3] == theirs.layout[:3]  # (how a step is run shows in is_plain)
            and all(map(_is_same, mine.others, theirs.others))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<turn {self.step}, exit {self.exit}, {self.contents.others!r}>"


def _is_same(one: Any, other: Any) -> bool:
    """Compare leaves that are no arrays: what is no number or text proves nothing."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    return type(one) not in ATOMS or one == other or repr(one) == repr(other)  # NaN


class Frame:
    """The variables of one run of a loop: as the state of a runner, and back."""

    is_bare = False

    # (Not a dataclass: engines look into those for tensors that a step closes over.)
    def __init__(
        self,
        spec: LoopSpec,
        objects: StepObjects,
        items: Items | None,
        outputs: LoopOutputs | None,
        *,
        last: int | None,
        scans: bool,
    ) -> None:
        self.unbound = UNBOUND
        self.scans = scans  # steps have outputs, or inputs, of their own
        self._objects = objects
        self._items = items
        self._outputs = outputs
        self._api = objects.api
        self._at = objects.at
        self._last = last  # the number of turns, if it is known
        self._changed = [i for i, name in enumerate(spec.state) if name in spec.changed]
        self._count = len(spec.state)
        self._owns_reads = spec.owns_reads  # and items
        self._room = 0  # for arrays
        self._known: dict[int, Any] = {}  # objects that hold no arrays

    # -- for generated code --------------------------------------------------------------------

    def open(self, state: Any) -> Any:
        """Return the values of the variables; what a step changes in place is its own."""
        values = self._objects.begin(state, state[-1].contents, self._changed)
        return values[: self._count]

    def close(self, state: Any, exit_number: int, outputs: Any, reads: Any, *values: Any) -> Any:
        """Return the state after a step, and its outputs if it has any."""
        step = state[-1].step
        self._objects.ran(step, reads)
        made: Any = ()
        if self._outputs is not None:
            made = self._outputs.made_by(step, outputs, self)
            values += self._outputs.windows(outputs)
        if not exit_number and step + 1 == self._last:
            exit_number = _ENDED
        new = self._state(step + 1, exit_number, *self._objects.pack(values, step))
        self._objects.end()
        return (new, made) if self.scans else new

    def collect(self, place: int, state: Any) -> Any:
        """Return what takes the place of an output while a step runs."""
        contents = state[-1].contents
        values = contents.layout.values(state, contents.others)
        return self._outputs.collector(place, values[self._count :])  # type: ignore[union-attr]

    def item(self, state: Any, sources: tuple[Any, ...], x: Any) -> Any:
        """Return the item of a `for` loop that belongs to this turn."""
        step = state[-1].step
        item = self._items.get(step, sources, x)  # type: ignore[union-attr]
        item = self._aliased(item) if self._owns_reads else item
        self._objects.note("item", step, item)
        return item

    def own(self, *values: Any) -> list[Any]:
        """Return values from outside as parts of the graph of this step.

        A loop inside of the step refers to them, and its gradients have to end in the step.
        """
        return list(map(self._aliased, values))

    def _aliased(self, value: Any) -> Any:
        if type(value) not in (list, tuple, dict):
            return self._api.aliased(value)
        leaves, structure = trees.flatten(value)
        aliases = [self._api.aliased(leaf) for leaf in leaves]
        is_same = all(alias is leaf for alias, leaf in zip(aliases, leaves, strict=True))
        return value if is_same else trees.unflatten(structure, aliases)

    def has_ended(self, state: Any) -> bool:
        return bool(state[-1].exit)

    def after_end(self, state: Any) -> Any:
        """Return what a step gives that comes after the end of the loop."""
        if not self.scans:
            return state
        return state, () if self._outputs is None else self._outputs.placeholders()

    # -- around the steps ----------------------------------------------------------------------

    def goes_on(self, state: Any) -> bool:
        return not state[-1].exit

    def initial(self, values: tuple[Any, ...], step: int, like: Any) -> tuple[Any, list[Any]]:
        """Return the state before the first turn, and the objects in it, by token.

        A state without a tracked array gets one, `like` one of the loop: runners plan by it.
        """
        contents, arrays, objects = self._objects.before(values)
        is_open_ended = any(leaf is UNBOUND or leaf is None for leaf in values)
        spare = min(len(contents.others), 8) + (_SPARE if is_open_ended else 0)
        needs_one = not any(map(self._api.is_tracked, arrays))
        self._room = len(arrays) + (spare if contents.others else 0) + needs_one
        state = self._state(step, 0, contents, arrays)
        if needs_one:
            place = len(arrays)
            state = (*state[:place], self._api.tracked_zero(like), *state[place + 1 :])
        return state, objects

    def _state(self, step: int, exit_number: int, contents: Contents, arrays: Any) -> Any:
        """Return the state before a turn."""
        if not contents.layout.is_plain:
            self._refuse_numbers(arrays)
        if contents.others:
            self.refuse_objects(contents.others)
        empty = self._room - len(arrays)
        if empty < 0:
            raise self._at.error(
                f"its variables hold {len(arrays)} arrays after this turn, with room for "
                f"{self._room}: they held fewer before"
            )
        return *arrays, *([_EMPTY] * empty), Static(step, exit_number, contents)

    def final(self, state: Any, results: LoopResults, volatile: list[int], targets: Any) -> Any:
        """Return how the loop was left, and the values of its variables; add to the outputs."""
        values = results.values(state, state[-1].contents, volatile)
        if self._outputs is not None:
            self._outputs.add_to(targets, results)
        return state[-1].exit, values[: self._count]

    def refuse_objects(self, others: Sequence[Any]) -> None:
        """Refuse new objects that hold arrays: no gradient would flow through them."""
        for leaf in others:
            if type(leaf) in ATOMS or self._known.get(id(leaf), self) is leaf:
                continue
            if loses_gradients(leaf, self._api):
                raise self._at.error(
                    f"a turn gives a {type(leaf).__name__} that holds arrays, or makes some; give "
                    "an array or a tuple, list, dict or dataclass of them"
                )
            self._known[id(leaf)] = leaf

    def _refuse_numbers(self, arrays: Sequence[Any]) -> None:
        if any(map(self._api.is_traced_number, arrays)):
            raise self._at.error(
                "a variable holds a Python number that has come to depend on what is "
                "differentiated; begin with np.float64(…) instead"
            )


class BareFrame(Frame):
    """The only variable of a loop, an array, where no step needs to know anything else.

    Small steps are run by the thousand.
    """

    is_bare = True
    _parts: Sequence[Any] = ()  # of the item of this turn
    _token: Token = ("before", 0)  # of the object that the last step gave

    def open(self, state: Any) -> Any:
        return (state,)

    def close(self, state: Any, exit_number: int, outputs: Any, reads: Any, *values: Any) -> Any:
        (value,) = values
        if value is not state:
            self._token = _NEW
            for number, each in enumerate(reads):
                if each is value:
                    self._token = ("read", number, 0)
            for place, each in enumerate(self._parts):
                if each is value:
                    self._token = ("item", (self._last or 1) - 1, place)
        elif self._token[0] == "item":
            self._token = _EARLIER_ITEM
        self._parts = ()
        if not self._api.is_plain_array_type(type(value)):
            if not self._api.is_array_type(type(value)):
                raise self._at.error("a variable that held an array holds none after this turn")
            self._refuse_numbers(values)
        return (value, ()) if self.scans else value

    def item(self, state: Any, sources: tuple[Any, ...], x: Any) -> Any:
        item = self._items.get(0, sources, x)  # type: ignore[union-attr]
        self._parts = list(parts(item, self._api))
        return item

    def initial(self, values: tuple[Any, ...], step: int, like: Any) -> tuple[Any, list[Any]]:
        self._refuse_numbers(values)
        return values[0], list(values)

    def final(self, state: Any, results: LoopResults, volatile: list[int], targets: Any) -> Any:
        if self._token is _EARLIER_ITEM:
            raise self._at.error("a turn hands on what the loop iterates over; hand on a copy")
        if self._token is not _NEW:
            return 0, [results.outside(self._token)]
        return 0, [self._api.copied(state) if volatile else state]


# -- outputs -----------------------------------------------------------------------------------


class StoreLog:
    """Notes stores into an object: `log[index] = value`."""

    def __init__(self) -> None:
        self.stores: list[tuple[Any, Any]] = []

    def __setitem__(self, index: Any, value: Any) -> None:
        self.stores.append((index, value))


class LoopOutputs:
    """What the steps of one run of a loop add to lists and store into objects."""

    def __init__(self, spec: LoopSpec, examples: list[Any], objects: StepObjects) -> None:
        self._outputs = spec.outputs
        self._owned = spec.owns_items
        self._objects = objects
        self._api = objects.api
        self._at = objects.at
        # Zeros like the arrays of a step; None: not known before a step has run.
        self._examples: list[list[Any] | None] = [
            None if each is None else self._zeros(take_apart(tuple(each), self._api)[1])
            for each in examples
        ]
        # By step; None: all steps have run. (A flag would be a closed-over number that changes.)
        self._made: dict[int, list[Contents]] | None = {}
        self._rows: list[tuple[int, list[Contents], list[Any]]] = []  # of steps, with their arrays

    @property
    def has_arrays(self) -> bool:
        """Whether steps have, or may have, arrays among their outputs."""
        return any(each is None or len(each) > 0 for each in self._examples)

    # -- in a step -----------------------------------------------------------------------------

    def collector(self, place: int, windows: Sequence[Any]) -> Any:
        if self._outputs[place].kind == "store":
            return StoreLog()
        begin = sum(each.window for each in self._outputs[:place])
        return list(windows[begin : begin + self._outputs[place].window])

    def windows(self, lists: Sequence[Any]) -> tuple[Any, ...]:
        """Return the last items of lists that turns look back on, for the next step."""
        pairs = zip(self._outputs, lists, strict=True)
        return tuple(item for each, items in pairs if each.window for item in items[-each.window :])

    def made_by(self, step: int, collectors: tuple[Any, ...], frame: Frame) -> list[Any]:
        """Return the arrays that a step has made, in the places that they have in every step."""
        arrays: list[Any] = []
        made: list[Contents] = []
        for place, (output, collector) in enumerate(zip(self._outputs, collectors, strict=True)):
            items = collector.stores if output.kind == "store" else collector[output.window :]
            contents, found = self._objects.pack(tuple(items), step, place)
            frame.refuse_objects(contents.others)
            made.append(contents)
            arrays += self._filled(place, list(found))
        if self._made is not None:
            self._made.setdefault(step, made)
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
        for one, other in zip(arrays, example, strict=False):
            (shape, dtype), (before, dtype_before) = self._api.kind(one), self._api.kind(other)
            if (shape, dtype) != (before, dtype_before):
                raise self._at.error(
                    f"a turn adds an array of {dtype} of shape {shape} to {name}, turns before it "
                    f"one of {dtype_before} of shape {before}"
                )
        return arrays + example[len(arrays) :]

    def _zeros(self, arrays: Sequence[Any]) -> list[Any]:
        return [self._api.zeros_like(each) for each in arrays]

    # -- after the loop ------------------------------------------------------------------------

    def take_stacks(self, stacks: Sequence[Any], first: int) -> None:
        """Take what the steps from `first` on have made."""
        assert self._made is not None
        columns = [self._api.entries(stack, owned=self._owned) for stack in stacks]
        for row in itertools.count():
            made = self._made.pop(first + row, None)
            if made is None:
                return  # the loop, or this stretch of it, has ended
            self._rows.append((first + row, made, [column[row] for column in columns]))

    def add_to(self, targets: Sequence[Any], results: LoopResults) -> None:
        """Add what the steps have made to the lists and objects that it is meant for."""
        rows, self._rows, self._made = self._rows, [], None
        for step, made, arrays in rows:
            begin = 0
            for output, target, contents, example in zip(
                self._outputs, targets, made, self._examples, strict=True
            ):
                items = results.items(arrays[begin:], contents, step, output.name)
                begin += len(example or ())
                if output.kind == "list":
                    target.extend(items)
                    continue
                for index, value in items:
                    target[index] = value


# -- objects that hold arrays ------------------------------------------------------------------


def held_arrays(value: Any, api: Values) -> list[Any]:
    """Return the arrays in an object that gradients may flow through."""
    walk = Walk([value], _is_opaque, limit=_LIMIT)
    return [each for each, _ in walk if api.is_array_type(type(each)) and api.is_made(each)]


def _is_opaque(value: Any) -> bool:
    return isinstance(value, type | FunctionType) or is_library_object(value)


def loses_gradients(value: Any, api: Values) -> bool:
    """Say whether a value that is no tree holds arrays, or makes them later."""
    if isinstance(value, ATOMS) or api.is_array_type(type(value)):
        return False
    return is_lazy(value) or bool(
        find_within(value, lambda part: api.is_array_type(type(part)) and api.is_made(part))
    )


def is_object(value: Any, api: Values) -> bool:
    """Say whether a value is neither an array nor a tree of them, nor plain data or a module."""
    if isinstance(value, _PLAIN) or api.is_array_type(type(value)):
        return False
    is_tree = type(value) in (list, tuple, dict, set, frozenset)
    return not is_tree and not (is_library_object(value) and not isinstance(value, Iterator))
