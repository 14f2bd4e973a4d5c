"""Where memory goes: what is alive at a peak, by module and by line of the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .simulate import Alive, Simulation
from .trace import Op, Trace

__all__ = ["Share", "by_module", "by_place"]


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
