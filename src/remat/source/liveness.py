"""Which names hold a value that is still needed, and which are surely bound, at every loop.

Both walk the statements of one function. `live_names` goes backward and finds, for each loop, the
names that are read later on before they are bound anew: at the head of the loop, where it begins
another turn or ends, and at a `break`. `bound_at_loops` goes forward and finds the names that have
a value whichever way the loop was reached. Where a statement cannot be followed exactly, a name
counts as live, and as perhaps unbound.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .names import bound_names, read_names

__all__ = ["Live", "bound_at_loops", "live_names"]

Names = frozenset[str]
_NONE: Names = frozenset()


class Live(NamedTuple):
    """The names that are live around a loop."""

    head: Names  # before each turn, and when the loop ends by itself
    after: Names  # after a break
    handlers: Names  # in the except and finally clauses around the loop


class _Targets(NamedTuple):
    """What is live where a statement may jump to."""

    at_break: Names = _NONE
    at_continue: Names = _NONE
    at_error: Names = _NONE


def live_names(body: Sequence[ast.stmt]) -> dict[ast.stmt, Live]:
    """Return what is live around each loop of a function."""
    walk = _Liveness()
    walk.block(body, _NONE, _Targets())
    return walk.loops


class _Liveness:
    def __init__(self) -> None:
        self.loops: dict[ast.stmt, Live] = {}

    def block(self, body: Iterable[ast.stmt], after: Names, to: _Targets) -> Names:
        for statement in reversed(list(body)):
            after = self.statement(statement, after, to) | to.at_error
        return after

    def statement(self, node: ast.stmt, after: Names, to: _Targets) -> Names:
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                ways = self.block(body, after, to) | self.block(orelse, after, to)
                return ways | read_names(test)
            case ast.For() | ast.AsyncFor():
                return self._for(node, after, to)
            case ast.While():
                return self._while(node, after, to)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                inside = self.block(body, after, to) - _bound(items)
                return inside | read_names(items) | to.at_error
            case ast.Try() | ast.TryStar():
                return self._try(node, after, to)
            case ast.Match(subject=subject, cases=cases):
                bodies = [self.block(case.body, after, to) for case in cases]
                tests = [read_names([case.pattern, *_some(case.guard)]) for case in cases]
                return after.union(read_names(subject), *bodies, *tests)
            case ast.Break():
                return to.at_break
            case ast.Continue():
                return to.at_continue
            case ast.Return() | ast.Raise():
                return frozenset(read_names(node)) | to.at_error
        return (after - _surely_bound(node)) | read_names(node)

    def _for(self, node: ast.For | ast.AsyncFor, after: Names, to: _Targets) -> Names:
        ended = self.block(node.orelse, after, to)
        target = frozenset(bound_names(node.target)) - read_names(node.target)
        head, known = ended, None
        while head != known:
            known = head
            inner = _Targets(after, head, to.at_error)
            head = head | ((self.block(node.body, head, inner) - target) | read_names(node.target))
        self.loops[node] = Live(head, after, to.at_error)
        return head | read_names(node.iter)

    def _while(self, node: ast.While, after: Names, to: _Targets) -> Names:
        ended = self.block(node.orelse, after, to)
        head, known = ended | read_names(node.test), None
        while head != known:
            known = head
            head = head | self.block(node.body, head, _Targets(after, head, to.at_error))
        self.loops[node] = Live(head, after, to.at_error)
        return head

    def _try(self, node: ast.Try | ast.TryStar, after: Names, to: _Targets) -> Names:
        final = after
        if node.finalbody:
            # It also runs on the way to wherever a jump goes.
            final = self.block(node.finalbody, after.union(*to), to)
            to = _Targets(to.at_break | final, to.at_continue | final, to.at_error | final)
        handled = [
            (self.block(each.body, final, to) - _one(each.name)) | read_names(_some(each.type))
            for each in node.handlers
        ]
        caught = to.at_error.union(*handled)
        inner = to._replace(at_error=caught)
        return self.block(node.body, self.block(node.orelse, final, to), inner) | caught


def _surely_bound(node: ast.stmt) -> set[str]:
    """Return names that a simple statement binds in any case."""
    match node:
        case ast.Assign(targets=targets):
            return set().union(*map(_plain_targets, targets))
        case ast.AnnAssign(target=target, value=value) if value is not None:
            return _plain_targets(target)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return bound_names(node)
    return set()


def _plain_targets(target: ast.expr) -> set[str]:
    return bound_names(target) - read_names(target)


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    return bound_names(list(nodes))


def _some(node: ast.AST | None) -> list[ast.AST]:
    return [] if node is None else [node]


def _one(name: str | None) -> set[str]:
    return set() if name is None else {name}


# -- what is surely bound ----------------------------------------------------------------------

Bound = Names | None  # None: the place is never reached


def bound_at_loops(parameters: Iterable[str], body: Sequence[ast.stmt]) -> dict[ast.stmt, Names]:
    """Return the names that surely have a value when a loop is reached, for each loop."""
    walk = _Binding()
    walk.block(body, frozenset(parameters))
    return walk.loops


class _Binding:
    def __init__(self) -> None:
        self.loops: dict[ast.stmt, Names] = {}
        self._breaks: list[list[Bound]] = []

    def block(self, body: Iterable[ast.stmt], bound: Bound) -> Bound:
        for statement in body:
            bound = self._statement(statement, bound)
        return bound

    def _statement(self, node: ast.stmt, bound: Bound) -> Bound:
        if bound is None:
            return None
        match node:
            case ast.If(body=body, orelse=orelse):
                return _common([self.block(body, bound), self.block(orelse, bound)])
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, bound)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                return self.block(body, bound | _bound(items))
            case ast.Try() | ast.TryStar():
                ended = self.block(node.orelse, self.block(node.body, bound))
                handled = [_less(self.block(h.body, bound), h.name) for h in node.handlers]
                after = _common([ended, *handled])
                final = self.block(node.finalbody, bound)
                return None if after is None or final is None else after | final
            case ast.Match(cases=cases):
                ways = [self.block(case.body, bound | _bound([case.pattern])) for case in cases]
                return _common([bound, *ways])
            case ast.Break():
                self._breaks[-1].append(bound)
                return None
            case ast.Continue() | ast.Return() | ast.Raise():
                return None
            case ast.Delete():
                return bound - bound_names(node)
        return bound | _surely_bound(node)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, bound: Names) -> Bound:
        self.loops[node] = bound - _unbound_in(node)
        self._breaks.append([])
        inside = bound - _unbound_in(node)
        forever = isinstance(node, ast.While) and _is_true(node.test)
        self.block(node.body, inside if isinstance(node, ast.While) else inside | _targets(node))
        breaks = self._breaks.pop()
        ended = None if forever else self.block(node.orelse, inside)
        return _common([ended, *breaks])


def _targets(node: ast.For | ast.AsyncFor) -> set[str]:
    return bound_names(node.target)


def _unbound_in(node: ast.AST) -> set[str]:
    """Names that a loop may unbind: by `del`, or at the end of an except clause."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Delete):
            found |= bound_names(each)
        elif isinstance(each, ast.ExceptHandler) and each.name:
            found.add(each.name)
    return found


def _is_true(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and bool(test.value)


def _less(bound: Bound, name: str | None) -> Bound:
    return bound if bound is None else bound - _one(name)


def _common(ways: Iterable[Bound]) -> Bound:
    reached = [way for way in ways if way is not None]
    return frozenset.intersection(*reached) if reached else None
