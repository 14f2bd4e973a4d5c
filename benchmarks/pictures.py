"""Draws docs/images/memory.svg, memory over one training step: `python -m benchmarks.pictures`.

The step is the recorded trace of a GPT (benchmarks/traces/gpt.json). `remat.plans.simulate` says
how many bytes are held while each op runs, forward, recomputed and backward; the seconds are those
of the trace. The plan of the budget is kept in benchmarks/plans/, because planning takes a while:
`python -m benchmarks.pictures --plan` plans anew.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

from remat.plans import Plan, Simulation, Stage, Trace, plan_trace, simulate

__all__ = ["block_plan", "memory_picture", "write_pictures", "write_plan"]

_ROOT = Path(__file__).resolve().parents[1]
PICTURE = _ROOT / "docs" / "images" / "memory.svg"
TRACE = _ROOT / "benchmarks" / "traces" / "gpt.json"
PLAN = _ROOT / "benchmarks" / "plans" / "gpt.json"
_BUDGET = 0.5  # of the plain peak

Curve = list[tuple[float, float]]  # seconds, bytes

_WIDTH, _HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 744, 92, 296  # of the plot; title and legend are above it
_COLORS = ("#8a8f98", "#d9822b", "#1f6feb", "#2da44e")


def memory_picture() -> str:
    """Return the picture as SVG."""
    trace = Trace.load(TRACE)
    curves = {}
    for name, plan in _plans(trace).items():
        simulation = simulate(trace, plan)
        curves[_label(name, trace, simulation)] = _curve(trace, simulation)
    return _draw("GPT, 24 blocks: memory during one training step", curves)


def _plans(trace: Trace) -> dict[str, Plan]:
    return {
        "plain autograd": Plan(frozenset(trace.saved)),
        f"remat.auto_checkpoint(model, memory_budget={_BUDGET})": _stored_plan(trace),
        "remat.checkpoint around each block": block_plan(trace),
    }


def _stored_plan(trace: Trace) -> Plan:
    plan = Plan.from_json(json.loads(PLAN.read_text()))
    if plan.signature != trace.signature:
        raise ValueError(f"{PLAN.name} is for another trace; run benchmarks.pictures --plan")
    return plan


def block_plan(trace: Trace) -> Plan:
    """Return the plan of a checkpoint around every block: the inputs of the blocks are kept."""
    blocks = [_block_of(op.module) for op in trace.ops]
    starts = [n for n, block in enumerate(blocks) if not n or block != blocks[n - 1]]
    outside = [
        value
        for op, block in zip(trace.ops, blocks, strict=True)
        for value in op.saves
        if not block
    ]
    inputs = {value for start in starts for value in trace.ops[start].reads}
    keep = {n for n in inputs.union(outside) if not trace.values[n].kind.is_external}
    return Plan(frozenset(keep), tuple(Stage(start) for start in starts))


def _block_of(module: str) -> str:
    return ".".join(module.split(".")[:2]) if module.startswith("blocks.") else ""


def _label(name: str, trace: Trace, simulation: Simulation) -> str:
    plain = trace.seconds + trace.backward_seconds
    slower = 1 + simulation.extra_seconds / plain
    return f"{name}: peak {simulation.peak_bytes / 1e6:.0f} MB, time {slower:.2f} x"


def _curve(trace: Trace, simulation: Simulation) -> Curve:
    """Return the bytes held while every op runs, over the seconds of the pass."""
    curve, now = [(0.0, 0.0)], 0.0
    for moment in simulation.memory:
        op = trace.ops[moment.op]
        curve.append((now, moment.nbytes))
        now += op.backward_seconds if moment.phase == "backward" else op.seconds
        curve.append((now, moment.nbytes))
    return [*curve, (now, 0.0)]


# -- drawing ---------------------------------------------------------------------------------------


def _draw(title: str, curves: dict[str, Curve]) -> str:
    longest = max(x for curve in curves.values() for x, _ in curve)
    highest = max(y for curve in curves.values() for _, y in curve)
    parts = [_text(_LEFT, 22, title, size=15, weight="bold"), *_axes(longest, highest)]
    for number, (label, curve) in enumerate(curves.items()):
        color = _COLORS[number]
        parts.append(_line(curve, longest, highest, color))
        y = 42 + 16 * number
        parts.append(f'<rect x="{_LEFT}" y="{y - 8}" width="14" height="8" fill="{color}"/>')
        parts.append(_text(_LEFT + 20, y, label, size=12))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif">\n<title>{title}</title>\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _axes(longest: float, highest: float) -> list[str]:
    parts = []
    for megabytes in range(0, int(highest / 1e6) + 1, 200):
        y = _y(megabytes * 1e6, highest)
        parts.append(f'<path d="M{_LEFT} {y}H{_RIGHT}" stroke="#e3e5e8"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{megabytes} MB", size=11, anchor="end"))
    for second in range(int(longest) + 1):
        x = _x(second, longest)
        parts.append(_text(x, _BOTTOM + 17, f"{second} s", size=11, anchor="middle"))
    return [*parts, f'<path d="M{_LEFT} {_BOTTOM}H{_RIGHT}" stroke="#57606a"/>']


def _line(curve: Curve, longest: float, highest: float, color: str) -> str:
    """Return a curve as steps, each corner once."""
    corners = [(_x(x, longest), _y(y, highest)) for x, y in curve]
    path = [f"M{corners[0][0]} {corners[0][1]}"]
    for (x, y), (next_x, next_y) in pairwise(corners):
        if next_x != x and next_y == y:
            path.append(f"H{next_x}")
        elif next_y != y:
            path.append(f"V{next_y}" if next_x == x else f"L{next_x} {next_y}")
    return f'<path d="{"".join(path)}" fill="none" stroke="{color}" stroke-width="1.6"/>'


def _x(seconds: float, longest: float) -> float:
    return round(_LEFT + (_RIGHT - _LEFT) * seconds / longest, 1)


def _y(nbytes: float, highest: float) -> float:
    return round(_BOTTOM - (_BOTTOM - _TOP) * nbytes / highest, 1)


def _text(
    x: float, y: float, text: str, *, size: int, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="#24292f">{text}</text>'
    )


def write_plan() -> None:
    """Plan the step within its budget."""
    PLAN.parent.mkdir(exist_ok=True)
    PLAN.write_text(json.dumps(plan_trace(Trace.load(TRACE), _BUDGET).to_json()) + "\n")


def write_pictures() -> None:
    """Write the pictures of the docs."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(memory_picture())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="plan anew before drawing")
    if parser.parse_args().plan:
        write_plan()
    write_pictures()
