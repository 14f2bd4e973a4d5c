"""Where memory goes: what is alive at a peak, by module and by line of the program.

Modules that repeat, such as the layers of a transformer, go by one name together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from .simulate import Alive, Simulation
from .trace import Op, Trace

__all__ = ["Repeated", "Share", "by_module", "by_place", "repeated_modules"]

_MOST_RUNS = 3  # of numbers, in the name of modules that repeat


@dataclass(frozen=True, slots=True)
class Share:
    """What one module or line holds at a peak."""

    name: str
    nbytes: int
    values: int  # bytes of activations
    gradients: int
    workspace: int


def by_module(trace: Trace, simulation: Simulation) -> list[Share]:
    """Return what is alive at the peak by the module that made it, the most bytes first.

    >>> from remat.plans import Kind, Op, Trace, Value
    >>> from remat.plans.simulate import simulate_plain
    >>> x, y, z = Value(8, kind=Kind.INPUT), Value(8, made_by=0, freed_after=1), Value(4, made_by=1)
    >>> ops = (Op("exp", (0,), (1,), 1.0, module="a", saves=(1,)), Op("sum", (1,), (2,), 1.0))
    >>> trace = Trace(ops, (x, y, z))
    >>> [(share.name, share.nbytes) for share in by_module(trace, simulate_plain(trace))]
    [('a', 8), ('', 4)]
    """
    return _shares(trace, simulation, lambda op: op.module)


def by_place(trace: Trace, simulation: Simulation) -> list[Share]:
    """Return what is alive at the peak by the line that made it, the most bytes first."""
    return _shares(trace, simulation, lambda op: op.place)


def _shares(trace: Trace, simulation: Simulation, name: Callable[[Op], str]) -> list[Share]:
    totals: dict[str, dict[str, int]] = {}
    for thing in simulation.alive:
        maker = _maker(trace, thing)
        key = "" if maker is None else name(maker)
        kinds = totals.setdefault(key, {"value": 0, "gradient": 0, "workspace": 0})
        kinds[thing.what] += thing.nbytes
    shares = [
        Share(key, sum(kinds.values()), kinds["value"], kinds["gradient"], kinds["workspace"])
        for key, kinds in totals.items()
    ]
    return sorted(shares, key=lambda share: (-share.nbytes, share.name))


def _maker(trace: Trace, thing: Alive) -> Op | None:
    number = thing.number if thing.what == "workspace" else trace.values[thing.number].made_by
    return None if number is None else trace.ops[number]


class Repeated(NamedTuple):
    """Modules that do the same, as one."""

    name: str  # h.*.mlp, or h.{0-3,6}.mlp if there are others beside them
    times: int

    def __str__(self) -> str:
        return f"{self.name} x {self.times}" if self.times > 1 else self.name


@dataclass(slots=True)
class _Module:
    """What runs in a module: its own ops, and the modules in it."""

    ops: list[object] = field(default_factory=list)
    parts: dict[str, _Module] = field(default_factory=dict)

    def sameness(self) -> object:
        """Return what is equal for modules that do the same."""
        return self.ops, [(name, part.sameness()) for name, part in self.parts.items()]


def repeated_modules(trace: Trace, dropped: Collection[int] = ()) -> dict[str, Repeated]:
    """Return by path what modules are called together with those that do the same.

    They do the same if their ops make as many bytes, and the same of that is among the values
    `dropped`.

    >>> from remat.plans import Op, Trace
    >>> paths = ["h.0.act", "h.1.act", "h.2.act", "head"]
    >>> trace = Trace(tuple(Op("exp", (), (), 0.0, module=path) for path in paths), ())
    >>> [str(name) for name in repeated_modules(trace).values()]
    ['h.*.act x 3', 'h.*.act x 3', 'h.*.act x 3', 'head']
    """
    root = _Module()
    for op in trace.ops:
        module = root
        for name in op.module.split("."):
            module = module.parts.setdefault(name, _Module())
        module.ops.append(
            (op.name, [(trace.values[made].nbytes, made in dropped) for made in op.makes])
        )
    return dict(_names(root, "", Repeated("", 1)))


def _names(module: _Module, path: str, own: Repeated) -> Iterator[tuple[str, Repeated]]:
    if module.ops:
        yield path, own
    numbered = [name for name in module.parts if name.isdecimal()]
    same: list[tuple[object, list[str]]] = []
    for name in numbered:
        sameness = module.parts[name].sameness()
        group = next((names for other, names in same if other == sameness), None)
        if group is None:
            same.append((sameness, [name]))
        else:
            group.append(name)
    together = {name: names for _, names in same for name in names}
    for name, part in module.parts.items():
        names = together.get(name, [name])
        shown = name
        if len(names) > 1:
            shown = "*" if len(names) == len(numbered) else _braces(map(int, names))
        before = f"{own.name}." if own.name else ""
        repeated = Repeated(f"{before}{shown}", own.times * len(names))
        yield from _names(part, f"{path}.{name}" if path else name, repeated)


def _braces(numbers: Iterable[int]) -> str:
    """Return numbers as {0-3,6}."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        first, *_, last = [number for _, number in run] * 2
        runs.append(str(first) if first == last else f"{first}-{last}")
    return "{" + ",".join([*runs[:_MOST_RUNS], *[".."] * (len(runs) > _MOST_RUNS)]) + "}"
