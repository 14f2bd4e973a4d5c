"""What is known of a loop before it runs: its state, its outputs, its exits, or why it stays plain.

The *state* of a loop is what goes from turn to turn or out of it: names that the body binds (or
whose objects it changes in place) and that are live at the head of the loop, after a `break`, or in
a `return`. A list that the body only appends to, and an object that it only stores into, are
*outputs*: they need not go from step to step.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .aliases import alias_names, part_names, related_names, relations
from .liveness import Live, bound_at_loops, live_names
from .mutations import Mutation, find_mutations
from .names import FUNCTIONS, LOOPS, binds_of, bound_names, free_names, read_names, walk_scope
from .refusals import FunctionFacts, Refusal, function_facts, refusal_of

__all__ = ["LoopPlan", "Output", "find_loops"]

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEEPEST = 6  # nested loops; the code doubles with every level


@dataclass(frozen=True, slots=True)
class Output:
    """A list that a loop appends to, or an object that it stores into, and does not read."""

    name: str
    kind: Literal["list", "store"]
    window: int = 0  # of a list: how many of its last items the body reads, by out[-1], out[-2], …
    is_steady: bool = False  # every turn has its outputs, whatever its data
    most: int | None = None  # how many items a turn adds to a list, at most; None: any number


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """A loop that can be run as steps."""

    number: int
    line: int
    has_exits: bool  # break or return
    state: tuple[str, ...]
    unbound: frozenset[str]  # names of the state that may have no value
    changed: frozenset[str]  # names of the state whose objects change in place
    deeply: frozenset[str]  # of those, names whose entries change
    reads: tuple[str, ...]  # other local names that the body refers to
    volatile: frozenset[str]  # names whose objects change in place, anywhere in the function
    owns_reads: bool  # whether a step makes what it reads a part of its graph
    is_steady: bool  # whether its body gives no variable of the state a constant
    outputs: tuple[Output, ...]
    needs_item: bool  # whether the body or what follows reads the loop variable
    is_exposed: bool  # whether the function may write to what the loop gives
    is_written_later: bool  # whether it visibly does
    guarded: bool  # whether an exception in the loop may be swallowed around it


Found = LoopPlan | Refusal | None  # None: nothing goes from turn to turn
Loop = ast.For | ast.While | ast.AsyncFor


def find_loops(
    function: Function, local: Iterable[str], arguments: Iterable[str]
) -> dict[ast.AST, Found]:
    """Return what is known of every loop of a function, outer loops first."""
    analysis = _Analysis(function, frozenset(local), arguments)
    loops = [node for node in walk_scope(function.body) if isinstance(node, LOOPS)]
    return {loop: analysis.of(loop, number) for number, loop in enumerate(loops)}


class _Analysis:
    def __init__(self, function: Function, local: frozenset[str], arguments: Iterable[str]) -> None:
        self._local = local
        self._facts: FunctionFacts = function_facts(function)
        self._live: dict[ast.stmt, Live] = live_names(function.body)
        self._bound = bound_at_loops(arguments, function.body)
        self._mutations = find_mutations(function.body)
        self._relations = relations(function.body, calls=True)
        self._visible_relations = relations(function.body, calls=False)
        self._withs = [node for node in walk_scope(function.body) if isinstance(node, ast.With)]
        self._depths = dict(_depths(function.body, 0))

    def of(self, loop: Loop, number: int) -> Found:
        body = _turn(loop)
        mutations = find_mutations(body)
        changed = {each.name for each in mutations if each.name and not each.is_augmented}
        bound = frozenset(bound_names(body) | _target(loop))
        if loop not in self._bound or not (bound | changed):
            return None  # never reached, or it leaves nothing
        outputs = _outputs(loop, mutations, self._local)
        names = self._state(loop, bound | changed) - {each.name for each in outputs}
        if not names and not outputs:
            return None
        for each in outputs:
            if each.kind == "list" and not each.is_steady and each.most is None:
                words = f"turns may add any number of items to {each.name}"
                return Refusal(loop.lineno, words)
        refusal = refusal_of(loop, self._facts) or self._refuse(loop, mutations, bound, names)
        if refusal is not None:
            return refusal
        return self._plan(loop, number, names, outputs, mutations)

    def _state(self, loop: Loop, written: frozenset[str]) -> set[str]:
        head, after, _ = self._live[loop]
        live = set(head)
        if _has(loop, ast.Break):
            live |= after
        for node in _returns(loop):
            live |= read_names(node)
        return live & written & self._local

    def _plan(
        self,
        loop: Loop,
        number: int,
        names: set[str],
        outputs: tuple[Output, ...],
        mutations: list[Mutation],
    ) -> LoopPlan:
        body = _turn(loop)
        written = bound_names(body) | _target(loop) | names | {each.name for each in outputs}
        reads = (read_names(body) & self._local) - written
        unsure = reads - self._bound[loop]  # perhaps unbound: variables of the step, to be sure
        state = tuple(sorted(names | unsure))
        changed = {each.name for each in mutations if each.name}
        exposed = self._exposed(loop, self._relations)
        later = frozenset(self._exposed(loop, self._visible_relations))
        deeply = {each.name for each in mutations if each.name and each.depth > 1}
        return LoopPlan(
            number=number,
            line=loop.lineno,
            has_exits=_has(loop, ast.Break) or any(True for _ in _returns(loop)),
            state=state,
            unbound=frozenset(state) - self._bound[loop] - _target(loop),
            changed=frozenset(changed) & frozenset(state),
            deeply=frozenset(deeply) & frozenset(state),
            reads=tuple(sorted(reads - unsure)),
            volatile=frozenset(each.name for each in self._mutations if each.name) | later,
            is_steady=not _constants(body) & set(state),
            owns_reads=_hands_on(loop.body, set(reads) | _target(loop)),
            outputs=outputs,
            needs_item=bool(_target(loop) & (read_names(body) | set(state))),
            is_exposed=not exposed.isdisjoint((*state, *(o.name for o in outputs))),
            is_written_later=not later.isdisjoint(state),
            guarded=any(loop in ast.walk(each) for each in self._withs),
        )

    def _exposed(self, loop: Loop, groups: list[set[str]]) -> set[str]:
        """Return the names that may stand for what is written to outside of a loop's turns."""
        inside = {id(node) for node in ast.walk(loop)}
        around = self._facts.outermost.get(loop)
        end = loop.end_lineno or 0
        if around is not None:
            end = 0  # all that the outer loop does comes again
        written: set[str] = set()
        for each in self._mutations:
            if id(each.node) not in inside and getattr(each.node, "lineno", end) >= end:
                written |= {each.name} if each.name else read_names(each.node)
        return set().union(*(related_names(name, groups) for name in written))

    def _refuse(
        self,
        loop: Loop,
        mutations: list[Mutation],
        bound: frozenset[str],
        names: set[str],
    ) -> Refusal | None:
        """Return a reason to leave a loop as it is, from what its names stand for."""
        changed = {each.name for each in mutations if each.name}
        refusal = self._refuse_mutations(loop, mutations, changed)
        if refusal is not None:
            return refusal
        for name in sorted(self._live[loop].handlers & (bound | changed)):
            return Refusal(
                loop.lineno, f"an except or finally clause around it reads {name}, which it binds"
            )
        for name in sorted(names & part_names(_turn(loop)) & self._exposed(loop, self._relations)):
            return Refusal(
                loop.lineno,
                f"its body binds {name} to what may be a part of another object, and the function "
                "may write to one of them: take a copy",
            )
        for name, function in _named_functions(loop.body):
            if name in names and free_names(function) & bound:
                line = getattr(function, "lineno", loop.lineno)
                return Refusal(line, f"the nested function {name} outlives a turn")
        if self._depths[loop] > _DEEPEST:
            return Refusal(loop.lineno, f"it lies in {_DEEPEST} other loops")
        return None

    def _refuse_mutations(
        self, loop: Loop, mutations: list[Mutation], changed: set[str]
    ) -> Refusal | None:
        """Return a reason to leave a loop as it is, from what it changes in place."""
        for each in mutations:
            line = getattr(each.node, "lineno", loop.lineno)
            if each.name is None:
                return Refusal(line, f"its body {each.how}, an object from outside")
            if each.name not in self._local:
                return Refusal(line, f"its body {each.how}, which is no local variable")
        target, items = (None, None) if isinstance(loop, ast.While) else (loop.target, loop.iter)
        for name in sorted(changed & alias_names(_turn(loop), target, items)):
            return Refusal(
                loop.lineno,
                f"its body changes {name} in place, which may be part of another object: "
                "change a copy",
            )
        if isinstance(loop, ast.For):
            for name in sorted(read_names(loop.iter) & changed):
                if any(each.name == name and not each.is_augmented for each in mutations):
                    return Refusal(loop.lineno, f"its body changes {name}, which it iterates over")
        return None


def _named_functions(body: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for node in walk_scope(body):
        match node:
            case ast.FunctionDef(name=name):
                yield name, node
            case ast.Assign(targets=targets, value=ast.Lambda() as function):
                yield from ((name, function) for name in bound_names(targets))


def _turn(loop: Loop) -> list[ast.AST]:
    """Return what runs in every turn."""
    return [*loop.body, loop.test] if isinstance(loop, ast.While) else [*loop.body]


def _target(loop: Loop) -> set[str]:
    return set() if isinstance(loop, ast.While) else bound_names(loop.target)


def _hands_on(body: list[ast.stmt], names: set[str]) -> bool:
    """Say whether a body hands on what it reads as it is: to an inner loop, or in a variable."""
    for node in walk_scope(body):
        values: list[ast.expr] = []
        match node:
            case ast.For() | ast.While():
                return True
            case ast.Assign(value=value) | ast.NamedExpr(value=value):
                values = [value]
            case ast.AnnAssign(value=value) if value is not None:
                values = [value]
            case ast.Call(func=ast.Attribute(), args=arguments):
                values = arguments
        parts = (part for value in values for part in _alternatives(value))
        if any(isinstance(part, ast.Name) and part.id in names for part in parts):
            return True
    return False


def _constants(body: Iterable[ast.AST]) -> set[str]:
    """Return the names that get a constant somewhere, such as None: they may hold no array then."""
    found: set[str] = set()
    for node in walk_scope(body):
        value = getattr(node, "value", None)
        is_binding = isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
        parts = _alternatives(value) if is_binding and value is not None else ()
        if any(isinstance(part, ast.Constant) for part in parts):
            found |= bound_names(node)
    return found


def _alternatives(value: ast.AST) -> Iterator[ast.AST]:
    """Generate the values that an expression may have, if it is a choice or a tuple."""
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*_alternatives(body), *_alternatives(orelse))
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.BoolOp(values=parts):
            for part in parts:
                yield from _alternatives(part)
        case _:
            yield value


def _depths(body: Iterable[ast.AST], depth: int) -> Iterator[tuple[ast.AST, int]]:
    for node in body:
        inner = depth
        if isinstance(node, LOOPS):
            yield node, depth
            inner += 1
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from _depths(ast.iter_child_nodes(node), inner)


def _has(loop: Loop, kind: type[ast.Break]) -> bool:
    """Say whether a loop has such a jump of its own."""

    def search(body: Iterable[ast.AST]) -> bool:
        return any(map(found, body))

    def found(node: ast.AST) -> bool:
        if isinstance(node, kind):
            return True
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return False
        return search(node.orelse if isinstance(node, LOOPS) else ast.iter_child_nodes(node))

    return search(loop.body)


def _returns(loop: Loop) -> Iterator[ast.Return]:
    return (node for node in walk_scope(loop.body) if isinstance(node, ast.Return))


# -- outputs -----------------------------------------------------------------------------------


def _outputs(loop: Loop, mutations: list[Mutation], local: frozenset[str]) -> tuple[Output, ...]:
    body = _turn(loop)
    bound = _bound_otherwise(body) | _target(loop)
    found = []
    jumps = any(isinstance(node, ast.Continue) for node in walk_scope(loop.body))
    changing = bound_names(body) | _target(loop)
    for name in sorted({each.name for each in mutations if each.name} & local - bound):
        is_steady = not jumps and _is_steady(name, loop.body, changing)
        output = _as_list(name, body, is_steady) or _as_store(name, body)
        if output is not None and (is_steady or output.kind == "list"):
            found.append(output)
    return tuple(found)


def _is_steady(name: str, body: list[ast.stmt], changing: set[str]) -> bool:
    """Say whether an object changes in every turn alike: not under an `if`, a `while`, a `try`.

    Nor in a `for` over something that depends on the turn, on names that are `changing`.
    """
    every = {id(n) for part in body for n in ast.walk(part) if _is_name(n, name)}
    return every <= set(_always(name, body, changing))


def _always(name: str, body: Iterable[ast.AST], changing: set[str]) -> Iterator[int]:
    for node in body:
        if isinstance(node, ast.With):
            yield from _always(name, node.body, changing)
        elif isinstance(node, ast.For) and not _has(node, ast.Break):
            if not read_names(node.iter) & changing:
                yield from _always(name, node.body, changing)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
            yield from (id(each) for each in ast.walk(node) if _is_name(each, name))


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _bound_otherwise(body: list[ast.AST]) -> set[str]:
    """Return the names that a loop binds, other than by adding to a list: out += [x]."""
    nodes = list(walk_scope(body))
    additions = {id(node.target) for node in nodes if _adds_list(node)}  # type: ignore[attr-defined]
    return set().union(*(binds_of(node) for node in nodes if id(node) not in additions))


def _adds_list(node: ast.AST) -> bool:
    return isinstance(node, ast.AugAssign) and isinstance(node.value, ast.List)


def _as_list(name: str, body: list[ast.AST], is_steady: bool) -> Output | None:
    """Take a name as a list that is only added to; its last items may be read."""
    allowed: set[int] = set()
    window = 0
    adds = False
    for node in walk_scope(body):
        match node:
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=each) as used, attr=method))
            ) if each == name and method in ("append", "extend"):
                allowed.add(id(used))
                adds = True
            case ast.AugAssign(
                target=ast.Name(id=each) as used, op=ast.Add(), value=ast.List()
            ) if each == name:
                allowed.add(id(used))
                adds = True
            case ast.Subscript(
                value=ast.Name(id=each) as used,
                slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(back))),
                ctx=ast.Load(),
            ) if each == name and back > 0:
                allowed.add(id(used))
                window = max(window, back)
    is_list = adds and _only(name, body, allowed)
    most = None if is_steady else _most(name, body)
    return Output(name, "list", window, is_steady, most) if is_list else None


def _most(name: str, body: Iterable[ast.AST]) -> int | None:
    """Return how many items some statements add to a list, at most; None: any number."""
    counts = [_added(name, node) for node in body]
    return None if None in counts else sum(count or 0 for count in counts)


def _added(name: str, node: ast.AST) -> int | None:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=each), attr="append"))):
            return int(each == name)
        case ast.AugAssign(target=ast.Name(id=each), value=ast.List(elts=items)) if each == name:
            return len(items)
        case ast.If(body=body, orelse=orelse):
            ways = _most(name, body), _most(name, orelse)
            return None if None in ways else max(way or 0 for way in ways)
        case ast.With(body=body):
            return _most(name, body)
    return None if any(_is_name(each, name) for each in ast.walk(node)) else 0


def _as_store(name: str, body: list[ast.AST]) -> Output | None:
    """Take a name as an object that is only stored into."""
    allowed: set[int] = set()
    for node in walk_scope(body):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                allowed.add(id(target.value))
    return Output(name, "store", is_steady=True) if _only(name, body, allowed) else None


def _only(name: str, body: list[ast.AST], allowed: set[int]) -> bool:
    """Say whether a name is used in no other places than these."""
    every = (node for part in body for node in ast.walk(part))
    return all(id(n) in allowed for n in every if isinstance(n, ast.Name) and n.id == name)
