"""What others do with the same trace: plans to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable

from remat.plans import Plan, Stage, Trace

_MATMULS = ("linear", "conv", "attention", "mm")  # in names of ops, written or recorded


def module_starts(trace: Trace) -> list[int]:
    """The first ops of outermost blocks: "blocks.3" of "blocks.3.conv"."""
    starts, before = [0], None
    for number, op in enumerate(trace.ops):
        block = ".".join(op.module.split(".")[:2])
        if number and block != before:
            starts.append(number)
        before = block
    return starts


def _inputs(trace: Trace, starts: list[int]) -> frozenset[int]:
    """What is read behind a cut, or saved, and was made before it."""
    keep: set[int] = set()
    for first in starts:
        for op in trace.ops[first:]:
            used = (*op.reads, *op.saves)
            keep.update(v for v in used if (trace.values[v].made_by or 0) < first)
    return frozenset(keep)


def _plan(trace: Trace, starts: list[int], more: set[int] | frozenset[int] = frozenset()) -> Plan:
    return Plan(_inputs(trace, starts) | more, tuple(Stage(first) for first in starts))


def per_block(trace: Trace) -> Plan:
    """`torch.utils.checkpoint` around every block."""
    return _plan(trace, module_starts(trace))


def segments(trace: Trace, count: int) -> Plan:
    """`checkpoint_sequential`: blocks in so many segments; the last one keeps all."""
    starts = module_starts(trace)
    size = math.ceil(len(starts) / count)
    chosen = starts[::size]
    last = {v for op in trace.ops[chosen[-1] :] for v in op.saves}
    return _plan(trace, chosen, last)


def root_of_n(trace: Trace) -> Plan:
    return segments(trace, math.isqrt(len(module_starts(trace))))


def save_matmuls(trace: Trace) -> Plan:
    """Selective checkpointing of every block, with a policy that keeps matmuls and attention."""
    matmuls = [op for op in trace.ops if any(part in op.name for part in _MATMULS)]
    kept = {v for op in matmuls for v in op.makes}
    return _plan(trace, module_starts(trace), kept)


def byte_ratio(trace: Trace, ratio: float) -> Plan:
    """A knapsack: keep what costs most seconds per byte, up to a ratio of the saved bytes.

    Nothing is recomputed twice, and everything as late as it can be, as in a compiled graph; the
    peak is what it is.
    """
    room = ratio * trace.saved_bytes
    keep: set[int] = set()

    def worth(value: int) -> float:
        made_by = trace.values[value].made_by
        assert made_by is not None
        return -trace.ops[made_by].seconds / trace.values[value].nbytes

    own = [v for v in trace.saved if trace.values[v].made_by is not None]
    for value in sorted(own, key=worth):
        if trace.values[value].nbytes <= room:
            room -= trace.values[value].nbytes
            keep.add(value)
    hold = frozenset(v for v, value in enumerate(trace.values) if value.made_by is not None)
    return Plan(frozenset(keep), tuple(Stage(op, hold) for op in range(len(trace.ops))))


PEERS: dict[str, Callable[[Trace], Plan]] = {
    "per block": per_block,
    "root of n": root_of_n,
    "2 segments": lambda trace: segments(trace, 2),
    "4 segments": lambda trace: segments(trace, 4),
    "8 segments": lambda trace: segments(trace, 8),
    "save matmuls": save_matmuls,
    "bytes 0.75": lambda trace: byte_ratio(trace, 0.75),
    "bytes 0.5": lambda trace: byte_ratio(trace, 0.5),
    "bytes 0.3": lambda trace: byte_ratio(trace, 0.3),
    "bytes 0.15": lambda trace: byte_ratio(trace, 0.15),
}
