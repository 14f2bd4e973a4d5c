"""The dynamic programme over cuts: the best way to checkpoint a chain of unlike layers.

Beaumont, Herrmann, Pallez, Shilova 2019 ("rotor"): a dynamic programme over the first layer, the
end and the bytes that are free. The first layer of a range is either run with its tape, which is
held until its backward; or it begins a segment that is run without tapes: its result is held, what
comes after it is dealt with, and then the segment is run again, by a plan of its own.

A plan is a row of layers and segments, and a segment is a row of the same kind: checkpointed calls
inside of checkpointed calls. In the outermost row, several layers may also be one `Part`, which
keeps some of their tapes and recomputes the others together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..errors import BudgetTooSmallError
from ..sizes import format_bytes, parse_bytes

__all__ = [
    "ChainLayer",
    "ChainPlan",
    "Part",
    "Segment",
    "Step",
    "plan_chain",
    "plan_chains",
    "smallest_chain",
]

_BUCKETS = 500


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """A layer: the seconds of its forward, and its bytes."""

    seconds: float
    output_bytes: int
    tape_bytes: int  # all that its backward needs besides its input; its result included
    input_gradient_bytes: int | None = None  # None: as many as the result of the layer before
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers that are run without tapes, and in backward once more, as `steps` say."""

    steps: tuple[int | Segment, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of its layers."""
        return tuple(
            layer
            for step in self.steps
            for layer in (step.layers if isinstance(step, Segment) else (step,))
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Layers from `first` up to `stop` that are run with a part of their tapes.

    The rest is recomputed when backward comes to them.
    """

    first: int
    stop: int
    seconds: float  # of what is recomputed
    kept_bytes: int
    forward_bytes: int  # while they run forward
    backward_bytes: int  # while they run backward, with gradients and what is recomputed
    keep: frozenset[int] = frozenset()  # the values that are kept


Step = int | Segment | Part


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """What to do layer by layer: a number is a layer that is run with its tape."""

    steps: tuple[Step, ...]
    peak_bytes: int
    extra_seconds: float


def plan_chain(layers: Sequence[ChainLayer], memory_budget: int | str) -> ChainPlan:
    """Return the plan with the least recomputation whose peak stays within a budget.

    The input of the chain belongs to the caller and is not counted. Optimal for bytes in units of
    one five-hundredth of the budget; exact where all bytes are multiples of a unit.

    Raises:
        BudgetTooSmallError: No plan fits; the message has the smallest budget that works.

    >>> layers = [ChainLayer(1.0, 10, 10) for _ in range(4)]
    >>> plan_chain(layers, 60)
    ChainPlan(steps=(0, 1, 2, 3), peak_bytes=60, extra_seconds=0.0)
    >>> plan_chain(layers, 50)
    ChainPlan(steps=(0, Segment(steps=(1, 2)), 3), peak_bytes=50, extra_seconds=2.0)
    """
    budget = parse_bytes(memory_budget, name="memory_budget")
    if not layers:
        return ChainPlan((), 0, 0.0)
    chain = _Chain(layers)
    least = _Least(chain)
    if least.need(0) > budget:
        need = least.need(0)
        raise BudgetTooSmallError(
            f"this chain of {len(layers)} layers needs at least {need} bytes "
            f"({format_bytes(need)}) whatever is recomputed, got memory_budget={memory_budget!r}",
            smallest=need,
        )
    steps = _ChainProgramme(chain, budget).steps(budget)
    if steps is None:  # it fits, but not in whole buckets
        steps = least.steps()
    return chain.plan(steps)


def plan_chains(
    layers: Sequence[ChainLayer], budgets: Sequence[int], parts: Iterable[Part]
) -> list[ChainPlan]:
    """Return the best plans for some budgets, for which one table is made, as far as they fit.

    >>> layers = [ChainLayer(1.0, 10, 10) for _ in range(4)]
    >>> part = Part(1, 4, 0.5, 20, 30, 40)
    >>> [plan.extra_seconds for plan in plan_chains(layers, [60, 50, 40, 30], [part])]
    [0.0, 0.5, 5.0]
    """
    chain = _Chain(layers)
    programme = _ChainProgramme(chain, max(budgets), parts)
    found = (programme.steps(budget) for budget in budgets)
    return [chain.plan(steps) for steps in found if steps is not None]


def smallest_chain(layers: Sequence[ChainLayer]) -> ChainPlan:
    """Return the plan with the smallest peak, whatever is recomputed.

    >>> smallest_chain([ChainLayer(1.0, 10, 10) for _ in range(4)]).peak_bytes
    40
    """
    chain = _Chain(layers)
    return chain.plan(_Least(chain).steps())


class _Chain:
    """The bytes and seconds of layers, by number; `result[i]` is what layer i reads."""

    def __init__(self, layers: Sequence[ChainLayer]) -> None:
        self.count = len(layers)
        self.seconds = [layer.seconds for layer in layers]
        self.until = [0.0, *accumulate(self.seconds)]
        self.result = [0, *(layer.output_bytes for layer in layers)]
        self.tape = [layer.tape_bytes for layer in layers]
        self.gradient = [
            before if layer.input_gradient_bytes is None else layer.input_gradient_bytes
            for before, layer in zip(self.result, layers, strict=False)
        ] + [layers[-1].output_bytes]
        self.forward_workspace = [layer.forward_workspace_bytes for layer in layers]
        self.backward_workspace = [layer.backward_workspace_bytes for layer in layers]

    def passing(self, first: int, stop: int) -> int:
        """Return the bytes to run layers without tapes; the input of the first is held anyway."""
        result, most = self.result, 0
        for layer in range(first, stop):
            before = result[layer] if layer > first else 0
            most = max(most, before + result[layer + 1] + self.forward_workspace[layer])
        return most

    def taping(self, layer: int, arriving: int) -> int:
        """Return the bytes of a layer's own forward and backward; its tape included."""
        forward = self.tape[layer] + self.forward_workspace[layer] + arriving
        gradients = self.gradient[layer] + self.gradient[layer + 1]
        return max(forward, self.tape[layer] + gradients + self.backward_workspace[layer])

    def plan(self, steps: tuple[Step, ...]) -> ChainPlan:
        return ChainPlan(steps, self.peak(steps), self.extra_seconds(steps))

    def peak(self, steps: tuple[Step, ...], arriving: int = 0) -> int:
        """Return the peak of a row of steps, while a gradient of so many bytes waits."""
        held = most = 0
        for step in steps:
            if isinstance(step, Segment):
                own = step.layers
                first, stop = own[0], own[-1] + 1
                most = max(most, held + self.passing(first, stop) + arriving)
                most = max(most, held + self.peak(step.steps, self.gradient[stop]))
                held += self.result[stop]
            elif isinstance(step, Part):
                most = max(most, held + step.forward_bytes, held + step.backward_bytes)
                held += step.kept_bytes
            else:
                most = max(most, held + self.taping(step, arriving))
                held += self.tape[step]
        return most

    def extra_seconds(self, steps: tuple[Step, ...]) -> float:
        """Return the seconds of all that runs again."""
        again = [step for step in steps if isinstance(step, Segment)]
        own = [self.seconds[layer] for step in again for layer in step.layers]
        own += [step.seconds for step in steps if isinstance(step, Part)]
        return math.fsum([*own, *(self.extra_seconds(step.steps) for step in again)])


class _Choice(NamedTuple):
    need: int
    cut: int  # the end of the segment that comes first; -1 if the first layer is run with its tape


class _Least:
    """The fewest bytes of each range of layers."""

    def __init__(self, chain: _Chain) -> None:
        self._chain = chain
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._tops: dict[int, _Choice] = {chain.count: _Choice(0, -1)}
        for size in range(1, chain.count):
            for first in range(chain.count - size):
                stop = first + size
                gradient = chain.gradient[stop]
                self._choices[first, stop] = self._best(first, stop, gradient)
        for first in reversed(range(chain.count)):
            self._tops[first] = self._best(first, chain.count, 0)

    def _best(self, first: int, stop: int, arriving: int) -> _Choice:
        chain = self._chain
        rest = self._rest(first + 1, stop)
        best = _Choice(max(chain.taping(first, arriving), chain.tape[first] + rest), -1)
        passing = 0
        for cut in range(first + 1, stop):
            before = chain.result[cut - 1] if cut - 1 > first else 0
            run = before + chain.result[cut] + chain.forward_workspace[cut - 1]
            passing = max(passing, run)
            rest = self._rest(cut, stop)
            own = self._choices[first, cut].need
            best = min(best, _Choice(max(passing + arriving, chain.result[cut] + rest, own), cut))
        return best

    def _rest(self, first: int, stop: int) -> int:
        if stop == self._chain.count:  # only the whole chain goes so far: it is not in a segment
            return self._tops[first].need
        return self._choices[first, stop].need if first < stop else 0

    def need(self, first: int) -> int:
        """Return the fewest bytes for the chain from a layer on."""
        return self._tops[first].need

    def steps(self) -> tuple[int | Segment, ...]:
        """Return the plan that needs the fewest bytes."""
        return self._row(0, self._chain.count, is_top=True)

    def _row(self, first: int, stop: int, *, is_top: bool) -> tuple[int | Segment, ...]:
        steps: list[int | Segment] = []
        while first < stop:
            cut = (self._tops[first] if is_top else self._choices[first, stop]).cut
            if cut < 0:
                steps.append(first)
                first += 1
            else:
                steps.append(Segment(self._row(first, cut, is_top=False)))
                first = cut
        return tuple(steps)


class _ChainProgramme:
    """The least extra seconds of each range of layers, for every number of free buckets."""

    def __init__(self, chain: _Chain, budget: int, parts: Iterable[Part] = ()) -> None:
        self._chain = chain
        self._parts: list[list[Part]] = [[] for _ in range(chain.count)]
        for part in parts:
            self._parts[part.first].append(part)
        units = math.gcd(*chain.result, *chain.tape, *chain.gradient, *chain.forward_workspace)
        units = math.gcd(units, *chain.backward_workspace) or 1
        self._unit = max(units, units * math.ceil(budget / units / _BUCKETS))
        self._size = budget // self._unit + 1
        count = chain.count
        # By first layer, length and free buckets; and by stop and first layer: with its input held.
        # Single precision: planning takes memory where there is little.
        self._costs = [self._full(count - first + 1) for first in range(count + 1)]
        self._after = [self._full(stop) for stop in range(count + 1)]
        self._passing = self._find_passing()
        for size in range(1, count):
            for first in range(count - size):
                self._fill(first, first + size)
        self._tops = self._full(count + 1)
        self._tops_after = self._full(count + 1)
        self._tops[count] = 0.0
        for first in reversed(range(count)):
            self._tops[first] = np.min(self._options_of(first, count, is_top=True), axis=0)
            self._tops_after[first] = self._shifted(self._tops[first], chain.result[first])

    def _full(self, rows: int) -> Any:
        return np.full((rows, self._size), np.inf, dtype=np.float32)

    def _buckets(self, nbytes: int) -> int:
        return -(-nbytes // self._unit)

    def _find_passing(self) -> list[Any]:
        """Return for each first layer the bytes to pass up to each later one."""
        chain, found = self._chain, []
        for first in range(chain.count):
            runs = [chain.result[first + 1] + chain.forward_workspace[first]]
            for layer in range(first + 1, chain.count):
                both = chain.result[layer] + chain.result[layer + 1]
                runs.append(both + chain.forward_workspace[layer])
            found.append(np.maximum.accumulate(runs))
        return found

    def _shifted(self, costs: Any, nbytes: int) -> Any:
        """Return the costs if so many bytes are held besides."""
        by, shifted = self._buckets(nbytes), self._full(1)[0]
        if by < self._size:
            shifted[by:] = costs[: self._size - by]
        return shifted

    def _fill(self, first: int, stop: int) -> None:
        chain = self._chain
        rest = (
            self._costs[first + 1][stop - first - 1] if first + 1 < stop else np.zeros(self._size)
        )
        options = self._options(first, stop, chain.gradient[stop], rest, self._after[stop])
        self._costs[first][stop - first] = np.min(options, axis=0)
        held = self._shifted(self._costs[first][stop - first], chain.result[first])
        self._after[stop][first] = held

    def _options(self, first: int, stop: int, arriving: int, rest: Any, after: Any) -> Any:
        """Return the costs of all ways to begin: with a tape, or with a segment to each cut."""
        chain = self._chain
        costs = self._full(stop - first)
        costs[0] = self._shifted(rest, chain.tape[first])
        costs[0, : self._buckets(chain.taping(first, arriving))] = np.inf
        if stop > first + 1:
            again = np.array(chain.until[first + 1 : stop]) - chain.until[first]
            costs[1:] = after[first + 1 : stop] + self._costs[first][1 : stop - first]
            costs[1:] += again[:, None]
            least = -(-(self._passing[first][: stop - first - 1] + arriving) // self._unit)
            costs[1:][np.arange(self._size)[None, :] < least[:, None]] = np.inf
        return costs

    def _parted(self, part: Part) -> Any:
        """Return the costs to begin with a part."""
        costs = self._shifted(self._tops[part.stop], part.kept_bytes)
        costs[: self._buckets(max(part.forward_bytes, part.backward_bytes))] = np.inf
        return costs + part.seconds

    def steps(self, budget: int) -> tuple[Step, ...] | None:
        """Return the best plan within a budget, or None if there is none in whole buckets."""
        free = budget // self._unit
        if not np.isfinite(self._tops[0, free]):
            return None
        return self._row(0, self._chain.count, free, is_top=True)

    def _row(self, first: int, stop: int, free: int, *, is_top: bool) -> tuple[Any, ...]:
        chain = self._chain
        steps: list[Step] = []
        while first < stop:
            options = self._options_of(first, stop, is_top=is_top)[:, free]
            choice = int(np.argmin(options))
            if choice == 0:
                steps.append(first)
                free -= self._buckets(chain.tape[first])
                first += 1
            elif first + choice >= stop:
                steps.append(part := self._parts[first][first + choice - stop])
                free -= self._buckets(part.kept_bytes)
                first = part.stop
            else:
                cut = first + choice
                steps.append(Segment(self._row(first, cut, free, is_top=False)))
                free -= self._buckets(chain.result[cut])
                first = cut
        return tuple(steps)

    def _options_of(self, first: int, stop: int, *, is_top: bool) -> Any:
        if is_top:
            options = self._options(first, stop, 0, self._tops[first + 1], self._tops_after)
            return np.vstack([options, *map(self._parted, self._parts[first])])
        rest = (
            self._costs[first + 1][stop - first - 1] if first + 1 < stop else np.zeros(self._size)
        )
        gradient = self._chain.gradient[stop]
        return self._options(first, stop, gradient, rest, self._after[stop])
