"""Why a loop has to stay as it is, and what to write instead: all reasons that its code shows.

A loop is transformed only if no reason is found. Reasons that show when it runs are in `runtime`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from .effects import Mutation, assignments, is_range, part_names
from .flow import jumps_of
from .names import (
    LOOPS,
    SCOPES,
    Function,
    Loop,
    bound_names,
    declared_names,
    free_names,
    parameter_names,
    read_names,
    walk_scope,
)

__all__ = ["FunctionFacts", "LoopFacts", "Refusal", "function_facts", "refusal_of"]

_FRAME_READERS = frozenset({"locals", "vars", "eval", "exec", "dir"})
_DEEPEST = 6  # nested loops; the code doubles with every level


class Refusal(NamedTuple):
    """A reason, and the line that it comes from."""

    line: int
    reason: str


class FunctionFacts(NamedTuple):
    """What holds for all loops of a function."""

    local: set[str]
    shared: set[str]  # names declared global or nonlocal
    rebound: set[str]  # names that a nested function declares nonlocal
    variables: set[str]  # local names but parameters that keep their value
    closures: list[ast.AST]  # nested functions that outlive the statement they are in
    frame_readers: list[ast.Call]  # calls of locals() and the like
    around: dict[Loop, tuple[ast.AST, ...]]  # every loop, with the loops and `with`s around it

    def loops_around(self, loop: Loop) -> list[Loop]:
        return [node for node in self.around[loop] if isinstance(node, LOOPS)]


class LoopFacts(NamedTuple):
    """What is known of one loop."""

    body: list[ast.AST]  # what runs in every turn
    mutations: list[Mutation]
    bound: set[str]
    state: set[str]
    exposed: set[str]  # names that may stand for what the function writes to elsewhere
    uneven: list[str]  # lists to which a turn adds any number of items
    in_handlers: set[str]


def function_facts(function: Function, mutations: list[Mutation]) -> FunctionFacts:
    """Find out what holds for all loops of a function."""
    shared = declared_names(function.body, ast.Global, ast.Nonlocal)
    own = list(walk_scope(function.body))
    everywhere = [node for node in ast.walk(function) if isinstance(node, ast.Nonlocal)]
    return FunctionFacts(
        (parameter_names(function) | bound_names(function.body)) - shared,
        shared,
        declared_names(everywhere, ast.Nonlocal) - declared_names(function.body, ast.Nonlocal),
        bound_names(function.body) | {each.name for each in mutations if each.name},
        [node for node in own if isinstance(node, (*SCOPES, ast.GeneratorExp))],
        [node for node in own if isinstance(node, ast.Call) and _reads_frame(node)],
        dict(_nested_loops(function)),
    )


def _nested_loops(
    node: ast.AST, around: tuple[ast.AST, ...] = ()
) -> Iterator[tuple[Loop, tuple[ast.AST, ...]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, LOOPS):
            yield child, around
        if not isinstance(child, SCOPES):
            is_around = isinstance(child, (*LOOPS, ast.With))
            yield from _nested_loops(child, (*around, child) if is_around else around)


def _reads_frame(node: ast.Call) -> bool:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    return name in _FRAME_READERS and not (name in ("vars", "dir") and node.args)


def refusal_of(loop: Loop, function: FunctionFacts, facts: LoopFacts) -> Refusal | None:
    """Return the first reason to leave a loop as it is."""
    reasons = (_of_syntax, _of_names, _of_closures, _of_jumps, _of_mutations, _of_objects)
    found = (refusal for reason in reasons for refusal in reason(loop, function, facts))
    return next(found, None)


Refusals = Iterator[Refusal]


def _of_syntax(loop: Loop, function: FunctionFacts, facts: LoopFacts) -> Refusals:
    if isinstance(loop, ast.AsyncFor):
        yield Refusal(loop.lineno, "async for: a step cannot wait; make a list before the loop")
    for call in function.frame_readers:
        words = f"the function calls {ast.unparse(call.func)}(), which sees its frame"
        yield Refusal(call.lineno, f"{words}: name the variables instead")
    if isinstance(loop, ast.For):
        for node in ast.walk(loop.target):
            if isinstance(node, ast.Attribute | ast.Subscript):
                words = f"the loop variable is {ast.unparse(loop.target)}, not a name: use a name"
                yield Refusal(loop.lineno, words)
    for node in walk_scope(facts.body):
        words = _words_of_statement(node)
        if words:
            yield Refusal(getattr(node, "lineno", loop.lineno), words)
    if len(function.loops_around(loop)) > _DEEPEST:
        words = f"it lies in {_DEEPEST} other loops: move it to a function of its own"
        yield Refusal(loop.lineno, words)


def _words_of_statement(node: ast.AST) -> str:
    match node:
        case ast.Yield() | ast.YieldFrom():
            return "yield in its body: append to a list, and yield after the loop"
        case ast.Await() | ast.AsyncFor() | ast.AsyncWith() | ast.comprehension(is_async=1):
            return "await in its body: await before the loop, or after it"
        case ast.Delete():
            return f"{ast.unparse(node)} in its body: assign None instead"
        case ast.ClassDef(name=name):
            return f"its body defines the class {name}: define it before the loop"
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return f"its body declares {', '.join(names)} global or nonlocal: use a local variable"
    return ""


def _of_names(loop: Loop, function: FunctionFacts, facts: LoopFacts) -> Refusals:
    for name in sorted(bound_names([loop]) & function.shared):
        words = f"its body writes to {name}, which is global or nonlocal"
        yield Refusal(loop.lineno, f"{words}: use a local variable, and assign it after the loop")
    used = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
    for name in sorted(used & function.rebound):
        words = f"a nested function rebinds {name} (nonlocal), which it uses: return the new value"
        yield Refusal(loop.lineno, words)
    changed = {each.name for each in facts.mutations if each.name}
    for name in sorted(facts.in_handlers & (facts.bound | changed)):
        words = f"an except or finally clause around it reads {name}, which it binds"
        yield Refusal(loop.lineno, f"{words}: read another variable there")


def _of_jumps(loop: Loop, function: FunctionFacts, facts: LoopFacts) -> Refusals:
    for jump in jumps_of(loop.body):
        word = type(jump.node).__name__.lower()
        if jump.inside == "try":
            words = f"{word} inside of try: set a flag there, and {word} after it"
            yield Refusal(jump.node.lineno, words)
        elif jump.inside == "with" and isinstance(jump.node, ast.Return):
            value = jump.node.value
            parts = value.elts if isinstance(value, ast.Tuple) else [value]
            if not all(isinstance(each, ast.Name | ast.Constant | None) for each in parts):
                words = "return of an expression inside of with: assign it to a variable first"
                yield Refusal(jump.node.lineno, words)


# -- objects -----------------------------------------------------------------------------------


def _of_mutations(loop: Loop, function: FunctionFacts, facts: LoopFacts) -> Refusals:
    """Find changes in place that would happen again, or that another object would not see."""
    for each in facts.mutations:
        line = getattr(each.node, "lineno", loop.lineno)
        if each.name is None:
            yield Refusal(line, f"its body {each.how}, an object from outside: use a variable")
        elif each.name not in function.local:
            words = f"its body {each.how}, which is no local variable: change it after the loop"
            yield Refusal(line, words)
    changed = {each.name for each in facts.mutations if each.name}
    parts = part_names(facts.body, or_whole=True)
    if isinstance(loop, ast.For):
        parts |= set() if is_range(loop.iter) else bound_names(loop.target)
        visibly = {each.name for each in facts.mutations if not each.is_augmented}
        for name in sorted(read_names(loop.iter) & visibly):
            words = f"its body changes {name}, which it iterates over: iterate over a copy"
            yield Refusal(loop.lineno, words)
    for name in sorted(changed & parts):
        words = f"its body changes {name} in place, which may be part of another object"
        yield Refusal(loop.lineno, f"{words}: change a copy")


def _of_objects(loop: Loop, function: FunctionFacts, facts: LoopFacts) -> Refusals:
    """Find what a state or an output cannot hold."""
    for name in facts.uneven:
        words = f"turns may add any number of items to {name}"
        yield Refusal(loop.lineno, f"{words}: append one tuple in each turn")
    for name in sorted(facts.state & part_names(facts.body, or_whole=False) & facts.exposed):
        words = f"its body binds {name} to what may be a part of another object, and the function"
        yield Refusal(loop.lineno, f"{words} may write to one of them: take a copy")
    named: list[tuple[set[str], ast.AST]] = [
        (bound_names(target), value)
        for target, value in assignments(loop.body)
        if isinstance(value, ast.Lambda)
    ]
    named += [({n.name}, n) for n in walk_scope(loop.body) if isinstance(n, ast.FunctionDef)]
    for names, closure in named:
        for name in sorted(names & facts.state):
            if free_names(closure) & facts.bound:
                words = f"the nested function {name} outlives a turn: define it after the loop"
                yield Refusal(getattr(closure, "lineno", loop.lineno), words)


# -- nested functions --------------------------------------------------------------------------


def _of_closures(loop: Loop, function: FunctionFacts, facts: LoopFacts) -> Refusals:
    """Nested functions see variables as they change; a step has variables of its own."""
    bound = bound_names([loop])
    inside = set(map(id, ast.walk(loop)))
    passed = _passed_on(loop)
    outermost = next(iter(function.loops_around(loop)), loop)
    for closure in function.closures:
        is_inside = id(closure) in inside
        is_kept = is_inside and id(closure) not in passed
        # One that is kept sees what any variable holds when it is called.
        shared = sorted(free_names(closure) & (function.variables if is_kept else bound))
        line, what = getattr(closure, "lineno", 0), _words_of_closure(closure)
        if shared and is_kept:
            words = f"{what} in its body refers to {shared[0]} and may be kept"
            yield Refusal(line, f"{words}: call it in the body, or make it after the loop")
        # One that is made after the loop sees what the loop has left.
        is_after = isinstance(closure, ast.GeneratorExp) or line > (outermost.end_lineno or 0)
        if shared and not is_inside and not is_after:
            words = f"{what} refers to {shared[0]}, which the loop binds: pass it as an argument"
            yield Refusal(line, words)


def _words_of_closure(closure: ast.AST) -> str:
    name = getattr(closure, "name", None)
    if name is not None:
        return f"the nested function {name}"
    return "a generator expression" if isinstance(closure, ast.GeneratorExp) else "a lambda"


def _passed_on(loop: Loop) -> set[int]:
    """Return the nested functions that are just called, or handed to a call for its result."""
    parents = {id(child): node for node in ast.walk(loop) for child in ast.iter_child_nodes(node)}
    kept = {
        node.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if _call_of(node, parents) is None
    }
    found: set[int] = set()
    for node in walk_scope(loop.body):
        match node:
            case ast.FunctionDef(name=name) if name not in kept and not node.decorator_list:
                found.add(id(node))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda()) if name not in kept:
                found.add(id(node.value))
            case ast.Lambda() | ast.GeneratorExp():
                call = _call_of(node, parents)
                if call is not None and not _may_keep(call, node, parents):
                    found.add(id(node))
    return found


def _call_of(node: ast.AST, parents: dict[int, ast.AST]) -> ast.Call | None:
    """Return the call that a node is a part of: as what is called, or as an argument."""
    parent = parents.get(id(node))
    if isinstance(parent, ast.keyword):
        parent = parents.get(id(parent))
    return parent if isinstance(parent, ast.Call) else None


def _may_keep(call: ast.Call, closure: ast.AST, parents: dict[int, ast.AST]) -> bool:
    """Say whether a call that gets a function may keep it.

    One that is a statement is there for its effect: fs.append(lambda: …). So is one around it, as
    in fs.append(partial(lambda: …)), unless the function is a keyword: sorted(…, key=lambda: …).
    """
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    is_statement = isinstance(parents.get(id(call)), ast.Expr)
    if isinstance(parents[id(closure)], ast.keyword):
        return is_statement
    if isinstance(closure, ast.GeneratorExp):  # which `extend` goes through at once
        return is_statement and name not in ("extend", "update")
    outer: ast.AST | None = call
    while isinstance(outer, ast.expr | ast.keyword):
        function = getattr(outer, "func", None)
        if getattr(function, "attr", getattr(function, "id", "")) == "partial":
            return True
        if isinstance(parents.get(id(outer)), ast.Expr):
            return True
        outer = parents.get(id(outer))
    return False
