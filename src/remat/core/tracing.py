"""The tracer: writes down what a pass or region does, as a `plans.Trace`.

One tracer serves budgets, profilers, `memory_report`, `frontier` and reports. It numbers ops and
values and holds none of them. Views that are replayed like other ops are no values of their own:
what reads a view reads the value whose memory it is in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

from ..plans.trace import Kind, Trace
from ..plans.trace import Op as TracedOp
from ..plans.trace import Value as TracedValue
from .engine import Engine
from .records import Made, Op, Origin, Value, memory_of, value_of

__all__ = ["BackwardCost", "Key", "OpFacts", "PlainOperand", "Tracer", "key_of"]

Tensor = Any  # an array of the engine
Key = tuple[Any, ...]  # what makes two ops equal
_MOST_TRACERS = 8  # whose number of a value is known
_tracers = itertools.count()


class BackwardCost(NamedTuple):
    """What the backward of a kind of op takes."""

    workspace: int = 0  # bytes at its peak, without the gradients that it returns
    returns_view: bool = False  # its one gradient is a view of fewer bytes, as that of `sum`


class PlainOperand(Protocol):
    """An array that is no value, and that an op holds for its replay."""

    @property
    def nbytes(self) -> int: ...

    @property
    def is_alone(self) -> bool:
        """Whether only the recording holds it: what the program holds, too, belongs to that."""


class OpFacts(Protocol):
    """What an engine knows of ops and their derivatives."""

    saves_when_done: bool  # an op saves what it reads after it has run, like what it makes

    def name(self, func: Any) -> str: ...

    def place(self, location: Any) -> str:
        """Return the line of the program that called an op."""

    def module(self, op: Op, known: dict[int, str]) -> str:
        """Return the path of the module that runs; `known` are paths by id, and added to."""

    def saves_its_output(self, func: Any) -> bool:
        """Return whether the backward of an op needs what the op has made."""

    def kernel_workspace(self, op: Op, result: Tensor, *, needs_gradient: bool) -> int:
        """Return the bytes that the kernel of the backward allocates and no tensor shows."""

    def note_call(self, op: Op, key: Hashable) -> None:
        """Note a call of an op, for `measure`."""

    def measure(self) -> None:
        """Find out what the backward of the ops takes that were noted."""

    def backward(self, key: Hashable) -> BackwardCost:
        """Return what the backward of a kind of op takes, as far as it is known."""

    def reads_shapes_only(self, func: Any) -> bool:
        """Return whether an op has no gradient whatever it reads."""

    def has_gradient(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether what an op makes of these arguments has a gradient."""

    def reads_results(self, args: tuple[Any, ...]) -> bool:
        """Return whether an op certainly reads what was computed, not only leaves and views."""

    def is_function(self, func: Any) -> bool:
        """Return whether an op stands for code of the program, as a custom Function."""

    def just_runs(self, func: Any) -> bool:
        """Return whether a call of an op changes nothing that a recording keeps track of."""

    def plain_operands(self, op: Op) -> Iterable[PlainOperand]:
        """Return the arrays among the operands that are no values."""

    def joins(self, func: Any) -> bool:
        """Return whether the gradients of what an op reads are views of that of its result."""

    def is_differentiable(self, tensor: Tensor) -> bool: ...

    def requires_grad(self, tensor: Tensor) -> bool: ...


class Tracer:
    """Numbers the ops and values of a pass; holds none of the values."""

    def __init__(self, engine: Engine, facts: OpFacts) -> None:
        self._engine = engine
        self._facts = facts
        self._id = next(_tracers)
        self._ops: list[_Noted] = []
        self._seconds: list[float] = []
        self._saves: list[dict[int, None]] = []
        self._workspace: dict[int, int] = {}
        self.kernel_workspace: dict[int, int] = {}  # that no tensor shows, by op
        self._values: list[TracedValue] = []
        self._names: dict[int, str] = {}
        self._freed: dict[int, int] = {}
        self._deaths: list[Any] = []  # what waits for them
        self._used: dict[int, None] = {}
        self._is_forward = True
        self._pinned: set[int] = set()
        # Of what is saved, by op and value: weak references to saved tensors.
        self._holders: dict[tuple[int, int], list[Callable[[], object]]] = {}
        self._plain: dict[int, tuple[int, ref[PlainOperand]]] = {}  # by id, with the first reader
        self._paths: dict[int, str] = {}  # of modules, by id
        self._saved: set[int] = set()
        self.plain_bytes = 0  # that the pass would hold by now without checkpointing
        self.is_new = True  # the ops were not planned before: what their backward takes is unknown

    def __len__(self) -> int:
        return len(self._ops)

    # -- forward -----------------------------------------------------------------------------------

    def ran(self, op: Op, made: Made, seconds: float, key: Key, *, has_grad: bool) -> None:
        """Note an op, what it made, what `key_of` returned for it, and if it is differentiated."""
        number = len(self._ops)
        reads = tuple(dict.fromkeys(self.number(value) for value in op.reads))
        for value, tensor in made:
            before = _overwritten(op, value)
            nbytes = self._engine.nbytes(tensor)
            if value.origin is Origin.EXTERNAL:
                # A write to memory that was there before takes no more.
                nbytes = 0 if before is None else self.nbytes(before)
            self._add(
                value,
                TracedValue(
                    nbytes=nbytes,
                    made_by=number,
                    overwrites=None if before is None else self.number(before),
                    kind=Kind.COMPUTED if value.op is not None else Kind.FIXED,
                    requires_grad=has_grad and self._facts.is_differentiable(tensor),
                    name=value.name,
                ),
            )
            self._await_death(value, tensor, len(self._values) - 1)
            if before is None:
                self.plain_bytes += self._values[-1].nbytes
        makes = tuple(self.number(value) for value, _ in made)
        if has_grad and made:
            first_has_grad = bool(reads) and self._values[reads[0]].requires_grad
            first = made[0][1]
            nbytes = self._facts.kernel_workspace(op, first, needs_gradient=first_has_grad)
            if nbytes:
                self.kernel_workspace[number] = nbytes
                self.needs_workspace(number, nbytes)
        module = self._facts.module(op, self._paths)
        is_whole = len(op.reads) == 1 and bool(op.args) and type(op.args[0]) is Value
        noted = _Noted(op.traits.func, op.location, module, key, reads, makes, is_whole)
        self._ops.append(noted)
        self._seconds.append(seconds)
        if self.is_new and has_grad:
            self._facts.note_call(op, self._workspace_key(noted))
        if len(self._saves) < len(self._ops):
            self._saves.append({})
        for operand in self._facts.plain_operands(op):
            self._plain.setdefault(id(operand), (number, ref(operand)))

    def _await_death(self, value: Value, tensor: Tensor, number: int) -> None:
        died = partial(_died, ref(self), number)
        self._deaths.append(self._engine.await_release(value, tensor, died))

    def _workspace_key(self, op: _Noted) -> Any:
        return op.key, tuple(self._values[read].requires_grad for read in op.reads)

    def number(self, value: Value) -> int:
        """Return the number of a value; one that is new is an input of the pass."""
        value = memory_of(value)
        for tracer, number in value.traced:
            if tracer == self._id:
                return number
        made, held = value.tensor(), value.held
        tensor = made if made is not None or held is None else held.tensor
        if value.part_of is not None and tensor is not None and self._ops:
            return self._add_part(value, tensor)
        is_parameter = value.origin is Origin.PARAMETER
        needs_grad = is_parameter or (made is not None and self._facts.requires_grad(made))
        self._add(
            value,
            TracedValue(
                nbytes=0 if tensor is None else self._engine.nbytes(tensor),
                kind=Kind.PARAMETER if is_parameter else Kind.INPUT,
                requires_grad=needs_grad,
                name=value.name,
            ),
        )
        return len(self._values) - 1

    def _add_part(self, value: Value, tensor: Tensor) -> int:
        """Add a part of memory that the pass has made before: its gradient does not stay.

        Its bytes count unless the whole is saved, which counts them.
        """
        whole = None if value.part_of is None else value.part_of()
        is_whole_saved = whole is not None and next(whole.living_holders(), None) is not None
        nbytes = 0 if is_whole_saved else tensor.nbytes
        last, number = len(self._ops) - 1, len(self._values)
        needs_grad = self._facts.requires_grad(tensor)
        self._add(
            value,
            TracedValue(nbytes, made_by=last, kind=Kind.FIXED, requires_grad=needs_grad),
        )
        self._ops[last] = self._ops[last]._replace(makes=(*self._ops[last].makes, number))
        self.plain_bytes += nbytes
        return number

    def _add(self, value: Value, traced: TracedValue) -> None:
        value.traced = ((self._id, len(self._values)), *value.traced[: _MOST_TRACERS - 1])
        self._values.append(traced)

    def saved_for(self, value: Value) -> int:
        """Return the op for whose backward autograd saves a value at this moment.

        Inputs are saved before an op runs, outputs after it.
        """
        number = self.number(value)
        last = len(self._ops) - 1
        if self._facts.saves_when_done:
            return last
        if self._values[number].made_by != last:
            return last + 1
        op = self._ops[last]
        is_own = number != op.makes[0] or self._facts.saves_its_output(op.func)  # or a by-product
        # An op saves its output once. If it is saved again, then for the next op.
        return last if is_own and number not in self._saves[last] else last + 1

    def saved(self, value: Value, node: int, holder: object = None) -> None:
        """Note that a value is saved for the backward of op `node`, which may be the next.

        It counts if its holder, a saved tensor, is alive when the forward part is over.
        """
        while len(self._saves) <= node:
            self._saves.append({})
        number = self.number(value)
        self._saves[node][number] = None
        self._saved.add(number)
        holders = self._holders.setdefault((node, number), [])
        holders.append(_nothing if holder is None else ref(holder))

    def needs_workspace(self, node: int, nbytes: int) -> None:
        """Note that the backward of an op takes more memory: what an inner region recomputes."""
        self._workspace[node] = self._workspace.get(node, 0) + nbytes

    def nbytes(self, value: Value) -> int:
        return self._values[self.number(value)].nbytes

    def pin(self, value: Value) -> None:
        """Note that a value is kept whatever the plan: the program has marked it."""
        self._pinned.add(self.number(value))

    def keeps(self, value: Value) -> None:
        """Note that a region inside holds a value until its own backward is over."""
        made_by = self._values[self.number(value)].made_by
        if made_by is not None:
            self.saved(value, made_by)
            self.pin(value)

    # -- backward ----------------------------------------------------------------------------------

    def end_forward(self) -> None:
        self._is_forward = False
        for (node, number), holders in self._holders.items():
            if all(holder() is None for holder in holders):  # of a branch that is gone
                self._saves[node].pop(number, None)
        self._holders.clear()
        self._drop_last_ops()

    def _drop_last_ops(self) -> None:
        """Drop ops at the end that backward has nothing to do with: metrics, what is printed.

        A program is the same whether or not they run in a step.
        """
        count = len(self._ops)
        while self._ops and not self._matters(len(self._ops) - 1):
            self._ops.pop()
        if len(self._ops) < count:
            del self._seconds[len(self._ops) :], self._saves[len(self._ops) :]
        if len(self._ops) < count and self._ops:
            known = max(max((*op.reads, *op.makes), default=-1) for op in self._ops)
            del self._values[1 + max(known, *(n for saves in self._saves for n in saves), 0) :]

    def _matters(self, number: int) -> bool:
        """Return whether an op has a backward, wrote to what is there, or made what is saved."""
        if any(self._saves[number:]) or number in self._workspace:
            return True
        return any(
            value.requires_grad
            or made in self._saved
            or (value.overwrites is not None and value.nbytes)  # not of what was there before
            for made in self._ops[number].makes
            for value in (self._values[made],)
        )

    @property
    def has_backward(self) -> bool:
        """Whether an op has a gradient, or saves something for it."""
        return any(self._saves) or any(
            v.requires_grad and v.made_by is not None for v in self._values
        )

    def used(self, node: int) -> None:
        """Note that the backward of an op asked for what it saved."""
        self._used.setdefault(node)

    # -- the result --------------------------------------------------------------------------------

    def trace(self, seconds: list[float] | None = None) -> Trace:
        """Return the trace, with seconds of several passes if given; equal ops get equal ones."""
        self._assign_late_saves()
        smoothed = _smoothed([op.key for op in self._ops], seconds or self._seconds)
        self._facts.measure()
        views = self._bytes_of_gradient_views()
        ops = tuple(
            TracedOp(
                name=self._facts.name(op.func),
                reads=op.reads,
                makes=op.makes,
                seconds=smoothed[number],
                place=self._facts.place(op.location),
                module=op.module,
                saves=tuple(self._saves[number]),
                workspace_bytes=self._workspace.get(number, 0)
                + views.get(number, 0)
                + self._facts.backward(self._workspace_key(op)).workspace,
            )
            for number, op in enumerate(self._ops)
        )
        used = tuple(node for node in self._used if node < len(ops))
        trace = Trace(ops, tuple(self._finished()), used=used)
        return self._with_plain_operands(trace) if self._plain else trace

    def _with_plain_operands(self, trace: Trace) -> Trace:
        """Add the arrays that only the recording holds: as if the op that reads them made them."""
        ops, values = list(trace.ops), list(trace.values)
        for number, reference in self._plain.values():
            operand = reference()
            if operand is not None and operand.is_alone and number < len(ops):
                op, new = ops[number], len(values)
                ops[number] = replace(op, makes=(*op.makes, new), saves=(*op.saves, new))
                values.append(
                    TracedValue(operand.nbytes, number, kind=Kind.FIXED, freed_after=number)
                )
        return replace(trace, ops=tuple(ops), values=tuple(values))

    def _assign_late_saves(self) -> None:
        """Let what was saved for an op that never came be saved for the op that made it."""
        count = len(self._ops)
        for number in dict.fromkeys(n for saves in self._saves[count:] for n in saves):
            made_by = self._values[number].made_by
            if made_by is not None:
                self._saves[made_by][number] = None
        del self._saves[count:]

    @property
    def seconds(self) -> list[float]:
        """The seconds of every op."""
        return self._seconds

    @property
    def keys(self) -> list[Key]:
        """What every op is known by: the op, the shapes that it read, the bytes that it made."""
        return [op.key for op in self._ops]

    def _bytes_of_gradient_views(self) -> dict[int, int]:
        """Return the bytes that gradients hold beyond their own in the backward of each op.

        The gradients of what `cat` reads are views of the gradient of its result: its storage lives
        until the last of them is used.
        """
        extra: dict[int, int] = {}
        for number, op in enumerate(self._ops):
            if not self._facts.joins(op.func):
                continue
            ends = {r: self._gradient_used(r, number) for r in op.reads if self._has_gradient(r)}
            for read, end in ends.items():
                for between in range(min(ends.values()) + 1, end):
                    extra[between] = extra.get(between, 0) + self._values[read].nbytes
        return extra

    def _with_gradient_views(self) -> set[int]:
        """Return the values whose gradients are views of a few bytes, as of what `sum` reads."""
        readers: dict[int, list[_Noted]] = {}
        for op in self._ops:
            if any(self._values[made].requires_grad for made in op.makes):
                for read in op.reads:
                    readers.setdefault(read, []).append(op)
        return {
            number
            for number, ops in readers.items()
            if len(ops) == 1
            and ops[0].reads_one_whole
            and self._facts.backward(self._workspace_key(ops[0])).returns_view
            and (made_by := self._values[number].made_by) is not None
            and self._saves[made_by]  # or its maker would have no backward any more
        }

    def _has_gradient(self, number: int) -> bool:
        value = self._values[number]
        return value.requires_grad and value.made_by is not None

    def _gradient_used(self, value: int, reader: int) -> int:
        """Return the op whose backward is the first to use the gradient that a reader gives."""
        made_by = self._values[value].made_by
        assert made_by is not None
        others = (n for n in range(made_by + 1, reader) if value in self._ops[n].reads)
        return max(others, default=made_by)

    def _finished(self) -> Iterable[TracedValue]:
        last = len(self._ops) - 1
        viewed = self._with_gradient_views()
        for number, value in enumerate(self._values):
            freed = self._freed.get(number)
            is_pinned = number in self._pinned and value.kind is Kind.COMPUTED
            yield TracedValue(
                value.nbytes,
                value.made_by,
                value.overwrites,
                Kind.FIXED if is_pinned else value.kind,
                value.requires_grad and number not in viewed,
                None if freed is None else min(freed, last),
                value.name,
            )

    def died(self, number: int) -> None:
        if self._is_forward and number < len(self._values):
            self._freed[number] = max(len(self._ops) - 1, 0)
            if number not in self._saved and self._values[number].overwrites is None:
                self.plain_bytes -= self._values[number].nbytes


def _overwritten(op: Op, made: Value) -> Value | None:
    """Return the value of the pass that an op has overwritten with another one."""
    if made.argument is not None:
        return op.overwritten(made.argument)
    if made.part_of is None:
        return None
    targets = map(value_of, op.targets())
    return next((target for target in targets if target.part_of is made.part_of), None)


def _died(tracer: ref[Tracer], number: int, _: Any) -> None:
    tracing = tracer()
    if tracing is not None:
        tracing.died(number)


def _nothing() -> object:
    """Stand for a holder that lives as long as the pass."""
    return _nothing


class _Noted(NamedTuple):
    """An op without its operands, which it would keep alive."""

    func: Any
    location: Any
    module: str
    key: Key
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    reads_one_whole: bool  # value, and not a part of one


def key_of(op: Op, made: Made, engine: Engine) -> Key:
    """Return what an op is known by when the same program runs again.

    A parameter that was frozen since, or trains again, makes it another program.
    """
    shapes = tuple((*read.size, read.origin is Origin.PARAMETER) for read in op.reads)
    return op.traits.func, shapes, tuple(engine.nbytes(tensor) for _, tensor in made)


def _smoothed(keys: list[Key], seconds: list[float]) -> list[float]:
    """Return the lower median of the seconds of all ops with the same key, for each op."""
    groups: dict[Key, list[float]] = {}
    for key, taken in zip(keys, seconds, strict=True):
        groups.setdefault(key, []).append(taken)
    medians = {key: sorted(taken)[(len(taken) - 1) // 2] for key, taken in groups.items()}
    return [medians[key] for key in keys]
