"""Why a loop has to stay as it is: whatever a step function could not do in its place."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .mutations import find_mutations
from .names import FUNCTIONS, LOOPS, bound_names, free_names, walk_scope

__all__ = ["FunctionFacts", "Refusal", "function_facts", "refusal_of"]

Loop = ast.For | ast.While | ast.AsyncFor
_FRAME_READERS = frozenset({"locals", "vars", "eval", "exec", "dir"})


class Refusal(NamedTuple):
    """A reason, and the line that it comes from."""

    line: int
    reason: str


class FunctionFacts(NamedTuple):
    """What holds for all loops of a function."""

    shared: frozenset[str]  # names declared global or nonlocal
    rebound: frozenset[str]  # names that a nested function declares nonlocal
    variables: frozenset[str]  # local names but parameters that keep their value
    closures: tuple[ast.AST, ...]  # nested functions that outlive the statement they are in
    frame_reader: ast.Call | None  # a call of locals() and the like
    outermost: dict[ast.AST, Loop]  # for each loop inside of loops, the first of them


def function_facts(function: ast.FunctionDef | ast.AsyncFunctionDef) -> FunctionFacts:
    """Find out what holds for all loops of a function."""
    everything = list(ast.walk(function))
    own = list(walk_scope(function.body))
    changes = find_mutations(function.body)
    shared = _declared(own, ast.Global) | _declared(own, ast.Nonlocal)
    return FunctionFacts(
        frozenset(shared),
        frozenset(_declared(everything, ast.Nonlocal) - _declared(own, ast.Nonlocal)),
        frozenset(bound_names(function.body) | {each.name for each in changes if each.name}),
        tuple(n for n in own if isinstance(n, (*FUNCTIONS, ast.ClassDef, ast.GeneratorExp))),
        next((n for n in own if isinstance(n, ast.Call) and _reads_frame(n)), None),
        _outermost_loops(function.body),
    )


def refusal_of(loop: Loop, facts: FunctionFacts) -> Refusal | None:
    """Return the first reason to leave a loop as it is, from its syntax alone."""
    return next(_refusals(loop, facts), None)


def _refusals(loop: Loop, facts: FunctionFacts) -> Iterator[Refusal]:
    if isinstance(loop, ast.AsyncFor):
        yield Refusal(loop.lineno, "async for: a step cannot wait")
    if facts.frame_reader is not None:
        name = ast.unparse(facts.frame_reader.func)
        yield Refusal(
            facts.frame_reader.lineno, f"the function calls {name}(), which sees its frame"
        )
    if isinstance(loop, ast.For):
        yield from _of_target(loop.target)
    for node in walk_scope([*loop.body, *_head(loop)]):
        yield from _of_node(node)
    yield from _of_names(loop, facts)
    yield from _of_closures(loop, facts)
    yield from _of_jumps(loop.body)


def _head(loop: Loop) -> list[ast.AST]:
    return [loop.test] if isinstance(loop, ast.While) else []


def _of_target(target: ast.expr) -> Iterator[Refusal]:
    for node in ast.walk(target):
        if isinstance(node, ast.Attribute | ast.Subscript):
            yield Refusal(target.lineno, f"the loop variable is {ast.unparse(target)}, not a name")


def _of_node(node: ast.AST) -> Iterator[Refusal]:
    line = getattr(node, "lineno", 0)
    match node:
        case ast.Yield() | ast.YieldFrom():
            yield Refusal(line, "yield in its body")
        case ast.Await() | ast.AsyncFor() | ast.AsyncWith():
            yield Refusal(line, "await in its body")
        case ast.comprehension(is_async=1):
            yield Refusal(node.iter.lineno, "await in its body")
        case ast.Delete():
            yield Refusal(line, f"{ast.unparse(node)} in its body")
        case ast.ClassDef(name=name):
            yield Refusal(line, f"its body defines the class {name}")
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            yield Refusal(line, f"its body declares {', '.join(names)} global or nonlocal")


def _of_names(loop: Loop, facts: FunctionFacts) -> Iterator[Refusal]:
    bound = bound_names([loop])
    for name in sorted(bound & facts.shared):
        yield Refusal(loop.lineno, f"its body writes to {name}, which is global or nonlocal")
    used = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
    for name in sorted(used & facts.rebound):
        yield Refusal(loop.lineno, f"a nested function rebinds {name} (nonlocal), which it uses")


def _of_closures(loop: Loop, facts: FunctionFacts) -> Iterator[Refusal]:
    """Nested functions see variables as they change; a step has variables of its own."""
    bound = bound_names([loop])
    inside = set(map(id, ast.walk(loop)))
    passed = _passed_on(loop)
    for closure in facts.closures:
        is_kept = id(closure) in inside and id(closure) not in passed
        # One that is kept sees what any variable holds when it is called.
        shared = sorted(free_names(closure) & (facts.variables if is_kept else bound))
        if not shared:
            continue
        line, what = getattr(closure, "lineno", 0), _name_of(closure)
        if id(closure) not in inside:
            # One that is made after the loop sees what the loop has left.
            around = facts.outermost.get(loop, loop)
            if isinstance(closure, ast.GeneratorExp) or line > (around.end_lineno or 0):
                continue
            yield Refusal(line, f"{what} refers to {shared[0]}, which the loop binds")
        elif is_kept:
            yield Refusal(line, f"{what} in its body refers to {shared[0]} and may be kept")


def _passed_on(loop: Loop) -> set[int]:
    """Nested functions that are just called, or handed to a call: they end with the step."""
    parents = {id(child): node for node in ast.walk(loop) for child in ast.iter_child_nodes(node)}
    kept: set[str] = set()
    for node in ast.walk(loop):
        is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if is_read and not _is_of_call(node, parents):
            kept.add(node.id)  # type: ignore[attr-defined]
    found: set[int] = set()
    for node in walk_scope(loop.body):
        match node:
            case ast.FunctionDef(name=name) if name not in kept and not node.decorator_list:
                found.add(id(node))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda()) if name not in kept:
                found.add(id(node.value))
            case ast.Lambda() | ast.GeneratorExp() if _is_of_call(node, parents):
                if not _is_kept_by_call(node, parents):
                    found.add(id(node))
    return found


def _is_kept_by_call(node: ast.AST, parents: dict[int, ast.AST]) -> bool:
    """Say whether a call that gets a function may keep it.

    One that is a statement is there for its effect: fs.append(lambda: …). So is one around it, as
    in fs.append(partial(lambda: …)), unless the function is a keyword: sorted(…, key=lambda: …).
    """
    parent = parents[id(node)]
    if isinstance(parent, ast.keyword):
        parent = parents[id(parent)]
        return _is_statement(parent, parents)
    if isinstance(node, ast.GeneratorExp):
        # What these get they go through at once.
        consumes = getattr(parent.func, "attr", "") in ("extend", "update")  # type: ignore[attr-defined]
        return _is_statement(parent, parents) and not consumes
    outer: ast.AST | None = parent
    while isinstance(outer, ast.expr | ast.keyword):
        if _is_partial(outer) or _is_statement(outer, parents):
            return True
        outer = parents.get(id(outer))
    return False


def _is_partial(node: ast.AST) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", "")) == "partial"


def _is_statement(node: ast.AST, parents: dict[int, ast.AST]) -> bool:
    return isinstance(parents.get(id(node)), ast.Expr)


def _is_of_call(node: ast.AST, parents: dict[int, ast.AST]) -> bool:
    parent = parents.get(id(node))
    if isinstance(parent, ast.keyword):
        parent = parents.get(id(parent))
    return isinstance(parent, ast.Call)


def _name_of(closure: ast.AST) -> str:
    name = getattr(closure, "name", None)
    if name is not None:
        return f"the nested function {name}"
    return "a generator expression" if isinstance(closure, ast.GeneratorExp) else "a lambda"


# -- jumps -------------------------------------------------------------------------------------


def _of_jumps(body: Sequence[ast.stmt], *, inner: bool = False) -> Iterator[Refusal]:
    """Find jumps out of the step that would pass through `try` or `with`."""
    for node in body:
        if isinstance(node, ast.Try | ast.TryStar):
            for jump in _jumps(_blocks(node), inner=inner):
                word = type(jump).__name__.lower()
                yield Refusal(jump.lineno, f"{word} inside of try")
        elif isinstance(node, ast.With):
            for jump in _jumps([node.body], inner=inner):
                if isinstance(jump, ast.Return) and not _is_simple(jump.value):
                    yield Refusal(jump.lineno, "return of an expression inside of with")
            yield from _of_jumps(node.body, inner=inner)
        elif not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            for block in _blocks(node):
                yield from _of_jumps(block, inner=inner or isinstance(node, LOOPS))


def _jumps(blocks: Iterable[Sequence[ast.stmt]], *, inner: bool) -> Iterator[ast.stmt]:
    """Generate the statements that leave the step: return, and break and continue of this loop."""
    for block in blocks:
        for node in block:
            is_jump = isinstance(node, ast.Break | ast.Continue)
            if isinstance(node, ast.Return) or (is_jump and not inner):
                yield node
            elif not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                yield from _jumps(_blocks(node), inner=inner or isinstance(node, LOOPS))


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    blocks = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(node, "handlers", [])]
    blocks += [case.body for case in getattr(node, "cases", [])]
    return [block for block in blocks if isinstance(block, list)]


def _is_simple(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Tuple):
        return all(map(_is_simple, value.elts))
    return value is None or isinstance(value, ast.Name | ast.Constant)


def _outermost_loops(body: Iterable[ast.stmt]) -> dict[ast.AST, Loop]:
    found: dict[ast.AST, Loop] = {}
    for node in walk_scope(body):
        if isinstance(node, LOOPS) and node not in found:
            found |= {inner: node for inner in walk_scope(node) if isinstance(inner, LOOPS)}
    return found


def _declared(nodes: Iterable[ast.AST], kind: type[ast.Global] | type[ast.Nonlocal]) -> set[str]:
    return set().union(*(set(node.names) for node in nodes if isinstance(node, kind)))


def _reads_frame(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FRAME_READERS
        and (node.func.id != "vars" or not node.args)
        and (node.func.id != "dir" or not node.args)
    )
