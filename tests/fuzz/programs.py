"""A random program as plain data, and as the text that is run and printed.

A program is a list of lines and blocks over named values: `x0` inputs, `p0` parameters, `b0`
buffers, `i0` integers, `m0` modules, `g0` generators, `c0` counters, `s0` scopes, `q0` groups, and
`v0` what is computed. It is run as it is printed; in the plain run the name `remat` stands for
something that does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Block", "Item", "Line", "Program", "made_in", "names_in", "text_of", "walk"]

_NAME = re.compile(r"\b[bcgimpqsvx]\d+\b")


@dataclass(frozen=True)
class Line:
    """A statement, the names that it binds, and the name of the op that it was made from."""

    text: str
    makes: tuple[str, ...] = ()
    op: str = ""


@dataclass(frozen=True)
class Block:
    """Items under a header, or in a function that is called in one of many ways.

    A `with` block is a header and what is indented below. A `leave` block is the same, left by an
    exception. A `call` block is a function: `text` says how it is called, `{fn}` and `{args}`
    stand for it and for what is `passed`; all else that it reads it closes over.
    """

    kind: Literal["with", "leave", "call"]
    text: str
    items: tuple[Item, ...]
    name: str = ""
    passed: tuple[str, ...] = ()
    packing: Literal["tuple", "list", "dict", "object"] = "tuple"  # of what the function returns
    is_region: bool = True


Item = Line | Block


@dataclass(frozen=True)
class Program:
    """What is there before, what is computed, which of it is returned, and what autograd does."""

    seed: int
    head: tuple[Line, ...]
    items: tuple[Item, ...]
    outputs: tuple[str, ...]
    mode: str
    backward: tuple[str, ...]
    autocast: bool = False  # around the forward pass
    backward_autocast: bool = False
    backward_scope: bool = False  # a scope is open around the backward pass
    profiled: bool = False  # a profiler looks on
    in_thread: bool = False  # the forward pass runs in a thread of its own

    def forward_text(self) -> str:
        body = [*_render(self.items, frozenset(self.outputs)), f"return {_tuple(self.outputs)}"]
        call = ["outs = in_thread(program)" if self.in_thread else "outs = program()"]
        if self.autocast:
            call = [_AUTOCAST, *_indented(call)]
        if self.profiled:
            call = ["profiler = remat.CheckpointProfiler()", "with profiler:", *_indented(call)]
        head = [line.text for line in self.head if self._is_used(line)]
        return "\n".join(
            [
                f"torch.manual_seed({self.seed})",
                *head,
                "",
                "def program():",
                *_indented(body),
                "",
                *call,
            ]
        )

    def backward_text(self) -> str:
        lines = [
            f"inputs = [{', '.join(self.leaves())}]",
            "ys, gs = seeded(outs)",
            *self.backward,
        ]
        if self.backward_scope:
            lines = ['with remat.CheckpointScope("back"):', *_indented(lines)]
        if self.backward_autocast:
            lines = [_AUTOCAST, *_indented(lines)]
        if self.profiled:
            lines += ["profiler.report()"]
        return "\n".join(["found = []", *lines])

    def leaves(self) -> list[str]:
        """Return the names of inputs and parameters that have a gradient."""
        return [
            line.makes[0]
            for line in self.head
            if self._is_used(line) and "leaf(" in line.text and "grad=False" not in line.text
        ]

    def _is_used(self, line: Line) -> bool:
        return bool(self._used().intersection(line.makes))

    def _used(self) -> set[str]:
        used = names_in(self.items) | set(self.outputs)
        for text in self.backward:
            used |= set(_NAME.findall(text))
        return used


_AUTOCAST = 'with torch.autocast("cpu", dtype=torch.bfloat16):'
_PREAMBLE = """\
import torch
import torch.nn.functional as F
import remat
from tests.fuzz.kit import *
"""


def text_of(program: Program) -> str:
    """Return a program as a script."""
    return f"{_PREAMBLE}\n{program.forward_text()}\n\n{program.backward_text()}\n"


def walk(items: Iterable[Item]) -> Iterator[Item]:
    """Yield all lines and blocks, inner ones too."""
    for item in items:
        yield item
        if isinstance(item, Block):
            yield from walk(item.items)


def names_in(items: Iterable[Item]) -> set[str]:
    """Return all names that lines and blocks mention."""
    found: set[str] = set()
    for item in walk(items):
        found |= set(_NAME.findall(item.text))
    return found


def made_in(items: Iterable[Item]) -> list[str]:
    """Return the names that lines and blocks bind, in order."""
    return list(
        dict.fromkeys(name for item in walk(items) if isinstance(item, Line) for name in item.makes)
    )


def _render(items: tuple[Item, ...], later: frozenset[str]) -> list[str]:
    lines: list[str] = []
    for number, item in enumerate(items):
        if isinstance(item, Line):
            lines += item.text.splitlines()
        else:
            needed = later | names_in(items[number + 1 :])
            lines += _render_block(item, needed)
    return lines


def _render_block(block: Block, later: frozenset[str]) -> list[str]:
    if block.kind == "call":
        return _render_call(block, later)
    body = _indented(_render(block.items, later) or ["pass"])
    if block.kind == "with":
        return [block.text, *body]
    inner = [block.text, *body, "    raise Leave"]
    return ["try:", *_indented(inner), "except Leave:", "    pass"]


def _render_call(block: Block, later: frozenset[str]) -> list[str]:
    made = [name for name in made_in(block.items) if name in later]
    read = names_in(block.items)
    passed = [name for name in block.passed if name in read]
    body = [
        *_unpacking(block, passed),
        *_render(block.items, frozenset(made)),
        f"return {_packed(block, made)}",
    ]
    parameters = ", ".join(passed)
    keywords = ", ".join(f"{name}={name}" for name in passed)
    call = block.text.replace("**{args}", keywords).replace("{args}", parameters)
    call = call.replace("{fn}", block.name)
    if not passed:  # without arguments, `checkpoint` returns a function
        call = f"remat.checkpoint({block.name})()"
    elif "[{args}]" in block.text:
        parameters = "given"
    prefix = ["@remat.checkpoint"] if block.text == "{fn}({args})" and passed else []
    return [
        *prefix,
        f"def {block.name}({parameters}):",
        *_indented(body),
        *_results(block, made, call),
    ]


def _unpacking(block: Block, passed: list[str]) -> list[str]:
    return [f"{_tuple(passed)} = given"] if "[{args}]" in block.text and passed else []


def _packed(block: Block, made: list[str]) -> str:
    match block.packing:
        case "list":
            return f"[{', '.join(made)}]"
        case "dict":
            return "{" + ", ".join(f'"{name}": {name}' for name in made) + "}"
        case "object":
            return f"SimpleNamespace({', '.join(f'{name}={name}' for name in made)})"
        case _:
            return _tuple(made) if len(made) != 1 else made[0]


def _results(block: Block, made: list[str], call: str) -> list[str]:
    if not made:
        return [call]
    if block.packing == "dict":
        return [f"{block.name}_out = {call}"] + [
            f'{name} = {block.name}_out["{name}"]' for name in made
        ]
    if block.packing == "object":
        return [f"{block.name}_out = {call}"] + [
            f"{name} = {block.name}_out.{name}" for name in made
        ]
    target = made[0] if block.packing == "tuple" and len(made) == 1 else _tuple(made)
    return [f"{target} = {call}"]


def _tuple(names: Iterable[str]) -> str:
    names = list(names)
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]
