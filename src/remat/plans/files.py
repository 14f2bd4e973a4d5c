"""Traces as JSON files: rows of numbers, and one table of the texts that they refer to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .check import check_trace
from .trace import Kind, Op, Trace, Value

__all__ = ["load_trace", "save_trace"]

_FORMAT = "remat.trace"
_VERSION = 1
_COLUMNS = {
    "ops": [
        "name",
        "reads",
        "makes",
        "seconds",
        "place",
        "module",
        "saves",
        "backward_seconds",
        "workspace_bytes",
    ],
    "values": [
        "nbytes",
        "made_by",
        "overwrites",
        "kind",
        "requires_grad",
        "freed_after",
        "name",
    ],
}


class _Texts:
    """Gives every text a number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace to a file."""
    Path(path).write_text(json.dumps(_to_json(trace), separators=(",", ":")), encoding="utf-8")


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from a file, and check it."""
    try:
        trace = _from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        check_trace(trace)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)} does not hold a trace of remat: {error}") from error
    return trace


def _to_json(trace: Trace) -> dict[str, Any]:
    texts = _Texts()
    ops = [
        [
            texts.number(op.name),
            op.reads,
            op.makes,
            op.seconds,
            texts.number(op.place),
            texts.number(op.module),
            op.saves,
            op.backward_seconds,
            op.workspace_bytes,
        ]
        for op in trace.ops
    ]
    values = [
        [
            value.nbytes,
            value.made_by,
            value.overwrites,
            value.kind.value,
            int(value.requires_grad),
            value.freed_after,
            texts.number(value.name),
        ]
        for value in trace.values
    ]
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "columns": _COLUMNS,
        "texts": texts.all(),
        "ops": ops,
        "values": values,
        "used": trace.used,
    }


def _from_json(data: Any) -> Trace:
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f'its "format" is not "{_FORMAT}"')
    if data["version"] != _VERSION:
        raise ValueError(f"its version is {data['version']!r}; this remat reads {_VERSION}")
    texts = data["texts"]
    ops = tuple(_op(row, texts) for row in data["ops"])
    values = tuple(_value(row, texts) for row in data["values"])
    return Trace(ops, values, _numbers(data["used"]))


def _op(row: list[Any], texts: list[str]) -> Op:
    name, reads, makes, seconds, place, module, saves, backward_seconds, workspace = row
    return Op(
        texts[name],
        _numbers(reads),
        _numbers(makes),
        float(seconds),
        texts[place],
        texts[module],
        _numbers(saves),
        float(backward_seconds),
        int(workspace),
    )


def _value(row: list[Any], texts: list[str]) -> Value:
    nbytes, made_by, overwrites, kind, requires_grad, freed_after, name = row
    return Value(
        int(nbytes),
        _number(made_by),
        _number(overwrites),
        Kind(kind),
        bool(requires_grad),
        _number(freed_after),
        texts[name],
    )


def _numbers(row: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in row)


def _number(entry: Any) -> int | None:
    return None if entry is None else int(entry)
