"""What is known of a loop before it runs: its state, its outputs, its exits, or why it stays plain.

The *state* of a loop is what goes from turn to turn or out of it: names that the body binds (or
whose objects it changes in place) and that are live at the head of the loop, after a `break`, or in
a `return`. A list that the body only appends to, and an object that it only stores into, are
*outputs*: they need not go from step to step.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .effects import (
    Mutation,
    alternatives,
    assignments,
    find_mutations,
    part_names,
    related_names,
    relations,
)
from .flow import jumps_of, names_around_loops
from .names import (
    LOOPS,
    Function,
    Loop,
    binds_of,
    bound_names,
    parameter_names,
    read_names,
    walk_scope,
)
from .refusals import LoopFacts, Refusal, function_facts, refusal_of

__all__ = ["LoopSpec", "Output", "find_loops"]


@dataclass(frozen=True, slots=True)
class Output:
    """A list that a loop appends to, or an object that it stores into, and does not read."""

    name: str
    kind: Literal["list", "store"]
    window: int = 0  # of a list: how many of its last items the body reads, by out[-1], out[-2], …
    is_steady: bool = False  # every turn has its outputs, whatever its data
    most: int | None = None  # how many items a turn adds to a list, at most; None: any number


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """What is known of a loop that can be run as steps."""

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
    is_bare: bool  # whether a step needs to know no more than one array, if the state is one
    outputs: tuple[Output, ...]
    needs_item: bool  # whether the body or what follows reads the loop variable
    is_exposed: bool  # whether the function may write to what the loop gives
    owns_items: bool  # whether items of lists must have memory of their own
    is_written_later: bool  # whether it visibly does
    guarded: bool  # whether an exception in the loop may be swallowed around it


Found = LoopSpec | Refusal | None  # None: nothing goes from turn to turn


def find_loops(function: Function) -> dict[ast.AST, Found]:
    """Return what is known of every loop of a function, outer loops first."""
    analysis = _Analysis(function)
    return {loop: analysis.of(loop, number) for number, loop in enumerate(analysis.facts.around)}


class _Analysis:
    def __init__(self, function: Function) -> None:
        self._mutations = find_mutations(function.body)
        self.facts = function_facts(function, self._mutations)
        self._names = names_around_loops(parameter_names(function), function.body)
        self._relations = relations(function.body, calls=True)
        self._visible_relations = relations(function.body, calls=False)

    def of(self, loop: Loop, number: int) -> Found:
        body, target, local = _turn(loop), _target(loop), self.facts.local
        mutations = find_mutations(body)
        bound = bound_names(body) | target
        changed = {each.name for each in mutations if each.name and not each.is_augmented}
        if loop not in self._names or not (bound | changed):
            return None  # never reached, or it leaves nothing
        outputs = _outputs(loop, mutations, local)
        state = self._live(loop) & (bound | changed) & local - {each.name for each in outputs}
        if not state and not outputs:
            return None
        exposed = self._exposed(loop, self._relations)
        uneven = [o.name for o in outputs if o.kind == "list" and not o.is_steady and not o.most]
        in_handlers = self._names[loop].in_handlers
        facts = LoopFacts(body, mutations, bound, state, exposed, uneven, in_handlers)
        refusal = refusal_of(loop, self.facts, facts)
        return refusal or self._spec(loop, number, facts, outputs)

    def _live(self, loop: Loop) -> set[str]:
        live = set(self._names[loop].live)
        for jump in jumps_of(loop.body):
            if isinstance(jump.node, ast.Break):
                live |= self._names[loop].live_after_break
            live |= read_names(jump.node)  # of a return
        return live

    def _spec(
        self, loop: Loop, number: int, facts: LoopFacts, outputs: tuple[Output, ...]
    ) -> LoopSpec:
        bound = self._names[loop].bound
        names, target = {each.name for each in outputs}, _target(loop)
        reads = (read_names(facts.body) & self.facts.local) - facts.bound - facts.state - names
        unsure = reads - bound  # perhaps unbound: variables of the step, to be sure
        state = tuple(sorted(facts.state | unsure))
        mutated = [each for each in facts.mutations if each.name]
        later = self._exposed(loop, self._visible_relations)
        has_exits = any(not isinstance(each.node, ast.Continue) for each in jumps_of(loop.body))
        unbound = frozenset(state) - bound - target
        changed = frozenset(state) & {each.name for each in mutated}
        owns_reads = _hands_on(loop.body, reads | target)
        is_exposed = not facts.exposed.isdisjoint((*state, *names))
        is_bare = len(state) == 1 and isinstance(loop, ast.For)
        if has_exits or unbound or changed or owns_reads or is_exposed or outputs:
            is_bare = False
        if set(state) & (_constants(facts.body) | part_names(facts.body, or_whole=True)):
            is_bare = False  # (a constant, such as None, is no array)
        return LoopSpec(
            number=number,
            line=loop.lineno,
            has_exits=has_exits,
            state=state,
            unbound=unbound,
            changed=changed,
            deeply=frozenset(state) & {each.name for each in mutated if each.depth > 1},
            reads=tuple(sorted(reads - unsure)),
            volatile=frozenset(each.name for each in self._mutations if each.name) | later,
            owns_reads=owns_reads,
            is_bare=is_bare,
            outputs=outputs,
            needs_item=bool(target & (read_names(facts.body) | set(state))),
            is_exposed=is_exposed,
            owns_items=is_exposed or bool(self.facts.loops_around(loop)),
            is_written_later=not later.isdisjoint(state),
            guarded=any(isinstance(node, ast.With) for node in self.facts.around[loop]),
        )

    def _exposed(self, loop: Loop, groups: list[set[str]]) -> set[str]:
        """Return the names that may stand for what is written to outside of a loop's turns."""
        inside = set(map(id, ast.walk(loop)))
        # All that an outer loop does comes again.
        end = 0 if self.facts.loops_around(loop) else loop.end_lineno or 0
        written: set[str] = set()
        for each in self._mutations:
            if id(each.node) not in inside and getattr(each.node, "lineno", end) >= end:
                written |= {each.name} if each.name else read_names(each.node)
        return related_names(written, groups)


def _turn(loop: Loop) -> list[ast.AST]:
    """Return what runs in every turn."""
    return [*loop.body, loop.test] if isinstance(loop, ast.While) else [*loop.body]


def _target(loop: Loop) -> set[str]:
    return set() if isinstance(loop, ast.While) else bound_names(loop.target)


def _hands_on(body: list[ast.stmt], names: set[str]) -> bool:
    """Say whether a body hands on what it reads as it is: to an inner loop, or in a variable."""
    values: list[ast.AST] = [value for _, value in assignments(body)]
    for node in walk_scope(body):
        if isinstance(node, LOOPS):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            values += node.args
    parts = [part for value in values for part in alternatives(value)]
    return any(isinstance(part, ast.Name) and part.id in names for part in parts)


def _constants(body: Iterable[ast.AST]) -> set[str]:
    """Return the names that get a constant somewhere, such as None: they may hold no array then."""
    found: set[str] = set()
    for target, value in assignments(body):
        if any(isinstance(part, ast.Constant) for part in alternatives(value)):
            found |= bound_names(target)
    return found


# -- outputs -----------------------------------------------------------------------------------


def _outputs(loop: Loop, mutations: list[Mutation], local: set[str]) -> tuple[Output, ...]:
    nodes = list(walk_scope(_turn(loop)))
    additions = {id(added[0]) for node in nodes if (added := _added(node))}
    bound = _target(loop).union(*(binds_of(node) for node in nodes if id(node) not in additions))
    names = {each.name for each in mutations if each.name} & local - bound
    found = [_output(name, loop, nodes) for name in sorted(names)]
    return tuple(each for each in found if each is not None)


def _output(name: str, loop: Loop, nodes: list[ast.AST]) -> Output | None:
    """Take a name as a list that is only added to, or an object that is only stored into."""
    uses = {id(node) for part in _turn(loop) for node in ast.walk(part) if _is_name(node, name)}
    additions, looks, stores = set(), set(), set()
    window = 0
    for node in nodes:
        match node:
            case ast.Expr() | ast.AugAssign() if added := _added(node):
                additions.add(id(added[0]))
            case ast.Subscript(
                value=used,
                slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(back))),
                ctx=ast.Load(),
            ) if back > 0 and _is_name(used, name):
                looks.add(id(used))
                window = max(window, back)
            case ast.Assign(targets=targets):
                stores |= {id(each.value) for each in targets if isinstance(each, ast.Subscript)}
    changing = bound_names(nodes) | _target(loop)
    is_steady = uses <= set(_in_every_turn(loop.body, changing))
    if any(isinstance(jump.node, ast.Continue) for jump in jumps_of(loop.body)):
        is_steady = False
    if uses & additions and uses <= additions | looks:
        most = _most_added(name, loop.body)
        return Output(
            name, "list", window, is_steady, None if is_steady or math.isinf(most) else int(most)
        )
    return Output(name, "store", is_steady=True) if is_steady and uses <= stores else None


def _in_every_turn(body: Iterable[ast.AST], changing: set[str]) -> Iterator[int]:
    """Generate what runs in every turn alike: not under an `if`, a `while`, a `try`.

    Nor in a `for` over something that depends on the turn, on names that are `changing`.
    """
    for node in body:
        if isinstance(node, ast.With):
            yield from _in_every_turn(node.body, changing)
        elif isinstance(node, ast.For):
            if not any(True for _ in jumps_of(node.body)) and not read_names(node.iter) & changing:
                yield from _in_every_turn(node.body, changing)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
            yield from map(id, ast.walk(node))


def _added(node: ast.AST) -> tuple[ast.Name, float] | None:
    """Return the list that a statement adds to, and the number of items."""
    match node:
        case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name() as used, attr="append"))):
            return used, 1
        case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name() as used, attr="extend"))):
            return used, math.inf
        case ast.AugAssign(ast.Name() as used, ast.Add(), ast.List(elts=items)):
            has_rest = any(isinstance(item, ast.Starred) for item in items)
            return used, math.inf if has_rest else len(items)
    return None


def _most_added(name: str, nodes: Iterable[ast.AST]) -> float:
    """Return how many items a turn adds to a list, at most."""
    total = 0.0
    for node in nodes:
        added = _added(node)
        if added is not None:
            total += added[1] if added[0].id == name else 0
        elif isinstance(node, ast.If):
            total += max(_most_added(name, node.body), _most_added(name, node.orelse))
        else:
            inside = _most_added(name, ast.iter_child_nodes(node))
            total += math.inf if inside and isinstance(node, LOOPS) else inside
    return total


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
