"""Traces as JSON files: rows of numbers, and one table of the texts that they refer to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .check import check_trace
from .trace import Kind, Op, Trace, Value

__all__ = ["load_trace", "save_trace"]

_FORMAT = "remat.trace"
_VERSION = 1
# The columns of ops and values, and how an entry is read; a text is a number in a table of texts.
_COLUMNS = {
    "ops": {
        "name": "text",
        "reads": "numbers",
        "makes": "numbers",
        "seconds": "float",
        "place": "text",
        "module": "text",
        "saves": "numbers",
        "backward_seconds": "float",
        "workspace_bytes": "number",
    },
    "values": {
        "nbytes": "number",
        "made_by": "number",
        "overwrites": "number",
        "kind": "kind",
        "requires_grad": "flag",
        "freed_after": "number",
        "name": "text",
    },
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

    def entry(thing: Op | Value, name: str, kind: str) -> Any:
        found = getattr(thing, name)
        if kind == "text":
            return texts.number(found)
        return found.value if kind == "kind" else int(found) if kind == "flag" else found

    def rows(things: Iterable[Op | Value], columns: dict[str, str]) -> list[list[Any]]:
        return [[entry(thing, *column) for column in columns.items()] for thing in things]

    return {
        "format": _FORMAT,
        "version": _VERSION,
        "columns": {name: list(columns) for name, columns in _COLUMNS.items()},
        "ops": rows(trace.ops, _COLUMNS["ops"]),
        "values": rows(trace.values, _COLUMNS["values"]),
        "texts": texts.all(),
        "used": trace.used,
    }


def _from_json(data: Any) -> Trace:
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f'its "format" is not "{_FORMAT}"')
    if data["version"] != _VERSION:
        raise ValueError(f"its version is {data['version']!r}; this remat reads {_VERSION}")
    readers: dict[str, Callable[[Any], Any]] = {
        "text": data["texts"].__getitem__,
        "numbers": _numbers,
        "number": lambda entry: None if entry is None else int(entry),
        "float": float,
        "flag": bool,
        "kind": Kind,
    }

    def fields(row: list[Any], columns: dict[str, str]) -> dict[str, Any]:
        if len(row) != len(columns):
            problem = "too many" if len(row) > len(columns) else "not enough"
            raise ValueError(f"{problem} values in a row: {len(row)}, not {len(columns)}")
        entries = zip(columns.items(), row, strict=True)
        return {name: readers[kind](entry) for (name, kind), entry in entries}

    ops = tuple(Op(**fields(row, _COLUMNS["ops"])) for row in data["ops"])
    values = tuple(Value(**fields(row, _COLUMNS["values"])) for row in data["values"])
    return Trace(ops, values, _numbers(data["used"]))


def _numbers(row: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in row)
