"""Making a program that fails smaller, as long as it fails in the same way."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .programs import Block, Item, Line, Program, made_in, names_in, walk

__all__ = ["shrink"]


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 20.0) -> Program:
    """Return the smallest program that was found in the time, and that still fails."""
    end = time.monotonic() + seconds
    program = _fewer_lines(program, fails, end)
    single = replace(program, items=_one_by_one(program.items))
    if fails(single):
        program = _fewer_lines(single, fails, end)
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                return program
            if fails(smaller):
                program, progress = smaller, True
                break
    return program


def _fewer_lines(program: Program, fails: Callable[[Program], bool], end: float) -> Program:
    """Drop lines, at any depth: many at a time, then fewer; from the last to the first."""
    lines = [item for item in walk(program.items) if isinstance(item, Line)]
    size = len(lines) // 2
    while size and time.monotonic() < end:
        for start in range(len(lines) - size, -1, -size):
            dropped = {id(line) for line in lines[start : start + size]}
            smaller = replace(program, items=_without(program.items, dropped))
            if fails(smaller):
                program = smaller
                del lines[start : start + size]
        size //= 2
    return program


def _without(items: tuple[Item, ...], dropped: set[int]) -> tuple[Item, ...]:
    kept: list[Item] = []
    for item in items:
        if isinstance(item, Block):
            inner = _without(item.items, dropped)
            kept += [replace(item, items=inner)] if inner else []
        elif id(item) not in dropped:
            kept.append(item)
    return tuple(kept)


def _one_by_one(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Return the items with one line in each, and blocks for what is indented."""
    single: list[Item] = []
    for item in items:
        if isinstance(item, Block):
            single.append(replace(item, items=_one_by_one(item.items)))
        else:
            single += _parsed(item.text.splitlines())
    return tuple(single)


def _parsed(lines: list[str]) -> list[Item]:
    items: list[Item] = []
    while lines:
        first, *lines = lines
        body = list(itertools.takewhile(lambda line: line.startswith("    "), lines))
        lines = lines[len(body) :]
        if body:
            inner = tuple(_parsed([line[4:] for line in body]))
            items.append(Block("with", first, inner, is_region="Scope" in first))
        else:
            bound = _BOUND.match(first)
            items.append(Line(first, tuple(bound[1].split(", ")) if bound else ()))
    return items


_BOUND = re.compile(r"(v\d+(?:, v\d+)*) =")


def _smaller(program: Program) -> Iterator[Program]:
    """Yield simpler programs, those that have lost most first."""
    for items in _without_some(program.items):
        yield replace(program, items=items)
    made = made_in(program.items)
    last = max((made.index(name) for name in program.outputs if name in made), default=0)
    for name in made[:last]:
        yield replace(program, outputs=(name,))
    for name in program.outputs:
        if len(program.outputs) > 1:
            rest = tuple(other for other in program.outputs if other != name)
            yield replace(program, outputs=rest)
    for option in ("autocast", "backward_autocast", "backward_scope", "profiled", "in_thread"):
        if getattr(program, option):
            yield replace(program, **{option: False})
    if program.mode != "backward":
        yield replace(program, mode="backward", backward=("torch.autograd.backward(ys, gs)",))
    for items in _simpler(program.items):
        yield replace(program, items=items)
    yield from _shorter(program)


def _shorter(program: Program) -> Iterator[Program]:
    """Yield the program with a value in the place of what a line makes of it."""
    for line in walk(program.items):
        if isinstance(line, Line) and len(line.makes) == 1:
            (made,) = line.makes
            for name in sorted(names_in([line]) - {made}):
                if name[0] in "vx":
                    yield _renamed(program, line, made, name)


def _renamed(program: Program, without: Line, old: str, new: str) -> Program:
    def rename(items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple(one(item) for item in items if item is not without)

    def one(item: Item) -> Item:
        text = re.sub(rf"\b{old}\b", new, item.text)
        if isinstance(item, Line):
            makes = tuple(new if name == old else name for name in item.makes)
            return replace(item, text=text, makes=makes)
        passed = tuple(dict.fromkeys(new if name == old else name for name in item.passed))
        return replace(item, text=text, items=rename(item.items), passed=passed)

    outputs = tuple(dict.fromkeys(new if name == old else name for name in program.outputs))
    return replace(program, items=rename(program.items), outputs=outputs)


def _without_some(items: tuple[Item, ...]) -> Iterator[tuple[Item, ...]]:
    """Yield the items without some of them, at any depth; the last ones go first."""
    size = len(items) // 2
    while size:
        for start in range(len(items) - size, -1, -size):
            yield items[:start] + items[start + size :]
        size //= 2
    for number, item in enumerate(items):
        if isinstance(item, Block):
            yield items[:number] + item.items + items[number + 1 :]
            for inner in _without_some(item.items):
                yield (*items[:number], replace(item, items=inner), *items[number + 1 :])
    if len(items) == 1:
        yield ()


def _simpler(items: tuple[Item, ...]) -> Iterator[tuple[Item, ...]]:
    """Yield the items with one of the blocks written in a more usual way."""
    for number, item in enumerate(items):
        if not isinstance(item, Block):
            continue
        for block in _simpler_block(item):
            yield (*items[:number], block, *items[number + 1 :])


def _simpler_block(block: Block) -> Iterator[Block]:
    scope = 'with remat.CheckpointScope("part"):'
    if block.is_region and (block.kind, block.text) != ("with", scope):
        yield replace(block, kind="with", text=scope)
        call = "remat.checkpoint({fn}, {args})"
        if block.kind == "call" and (block.text, block.packing) != (call, "tuple"):
            yield replace(block, text=call, packing="tuple")
    for inner in _simpler(block.items):
        yield replace(block, items=inner)
