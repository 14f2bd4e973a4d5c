"""A function's control flow: which names are live, which surely have a value, what ends a turn.

A name is *live* where its value may still be read. A name is *surely bound* where it has a value
whichever way control came. Both are computed on one graph, whose points are statements and the
heads of loops. Where a statement cannot be followed exactly, a name counts as live and as perhaps
unbound.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .names import LOOPS, SCOPES, Loop, binds_of, bound_names, read_names

__all__ = ["Around", "Jump", "jumps_of", "names_around_loops"]

_NONE: frozenset[str] = frozenset()


class Around(NamedTuple):
    """The names around a loop."""

    live: set[str]  # before each turn, and when the loop ends by itself
    live_after_break: set[str]
    in_handlers: set[str]  # live in the except and finally clauses around the loop
    bound: frozenset[str]  # surely, before each turn


@dataclass(eq=False)
class _Point:
    """A point of the graph: control goes on to `next`, or to `errors` if it raises."""

    next: list[_Point]
    errors: Sequence[_Point]
    reads: frozenset[str]
    binds: frozenset[str]
    unbinds: frozenset[str]
    live: frozenset[str] = _NONE
    bound: frozenset[str] | None = None  # None: never reached


class _Targets(NamedTuple):
    """Where a statement may jump to."""

    at_break: _Point | None = None
    at_continue: _Point | None = None
    errors: Sequence[_Point] = ()


def names_around_loops(
    parameters: Iterable[str], body: Sequence[ast.stmt]
) -> dict[ast.AST, Around]:
    """Return the names around each loop of a function that can be reached."""
    graph = _Graph()
    entry = graph.block(body, graph.point((), _Targets()), _Targets())
    entry.bound = frozenset(parameters)
    graph.find_live()
    graph.find_bound()
    found = {}
    for loop, pairs in graph.loops.items():  # (one in a finally clause is there twice)
        reached = [head.bound for head, _ in pairs if head.bound is not None]
        if reached:
            heads = [head for head, _ in pairs]
            found[loop] = Around(
                set().union(*(head.live for head in heads)),
                set().union(*(after.live for _, after in pairs)),
                set().union(*(point.live for head in heads for point in head.errors)),
                frozenset.intersection(*reached),
            )
    return found


class _Graph:
    """The graph of one function, built from its end to its beginning."""

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self.loops: dict[ast.AST, list[tuple[_Point, _Point]]] = {}  # with what follows a break

    def point(
        self,
        next_points: Iterable[_Point | None],
        to: _Targets,
        reads: Iterable[str] = (),
        binds: Iterable[str] = (),
        unbinds: Iterable[str] = (),
    ) -> _Point:
        known = [each for each in next_points if each is not None]
        names = map(frozenset, (reads, binds, unbinds))
        self._points.append(_Point(known, to.errors, *names))
        return self._points[-1]

    def block(self, body: Sequence[ast.stmt], after: _Point, to: _Targets) -> _Point:
        for statement in reversed(body):
            after = self._statement(statement, after, to)
        return after

    def _statement(self, node: ast.stmt, after: _Point, to: _Targets) -> _Point:
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                ways = [self.block(body, after, to), self.block(orelse, after, to)]
                return self.point(ways, to, read_names(test))
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, after, to)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                inside = self.block(body, after, to)
                return self.point([inside], to, read_names(items), bound_names(items))
            case ast.Try() | ast.TryStar():
                return self._try(node, after, to)
            case ast.Match(subject=subject, cases=cases):
                arms = [self._case(each, after, to) for each in cases]
                return self.point([*arms, after], to, read_names(subject))
            case ast.Break():
                return self.point([to.at_break], to)
            case ast.Continue():
                return self.point([to.at_continue], to)
            case ast.Return() | ast.Raise():
                return self.point((), to, read_names(node))
            case ast.Delete():
                return self.point([after], to, read_names(node), unbinds=bound_names(node))
        return self.point([after], to, read_names(node), _surely_bound(node))

    def _loop(self, node: Loop, after: _Point, to: _Targets) -> _Point:
        ended = self.block(node.orelse, after, to)
        inside = to._replace(at_break=after)
        if isinstance(node, ast.While):
            head = self.point([], to, read_names(node.test))
            begin = self.block(node.body, head, inside._replace(at_continue=head))
            is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
            head.next = [begin] if is_endless else [begin, ended]
        else:
            head = self.point([], to)
            body = self.block(node.body, head, inside._replace(at_continue=head))
            begin = self.point([body], to, read_names(node.target), bound_names(node.target))
            head.next = [begin, ended]
        self.loops.setdefault(node, []).append((head, after))
        return (
            head if isinstance(node, ast.While) else self.point([head], to, read_names(node.iter))
        )

    def _try(self, node: ast.Try | ast.TryStar, after: _Point, to: _Targets) -> _Point:
        end, inner = after, to
        if node.finalbody:
            # A second copy of the clause stands on the way of exceptions and jumps.
            jumps = any(isinstance(each, ast.Break | ast.Continue) for each in ast.walk(node))
            leave = self.point([to.at_break, to.at_continue] if jumps else [], to)
            abrupt = self.block(node.finalbody, leave, to)
            end, inner = self.block(node.finalbody, after, to), _Targets(abrupt, abrupt, [abrupt])
        handlers = []
        for each in node.handlers:
            body = self.block(each.body, end, inner)
            reads = set() if each.type is None else read_names(each.type)
            handlers.append(self.point([body], inner, reads, unbinds=binds_of(each)))
        caught = inner._replace(errors=[*handlers, *inner.errors])
        return self.block(node.body, self.block(node.orelse, end, inner), caught)

    def _case(self, case: ast.match_case, after: _Point, to: _Targets) -> _Point:
        reads = read_names([case.pattern, *([case.guard] if case.guard else [])])
        return self.point([self.block(case.body, after, to)], to, reads, bound_names(case.pattern))

    # -- data flow -----------------------------------------------------------------------------

    def find_live(self) -> None:
        changed = True
        while changed:
            changed = False
            for point in self._points:  # later ones first
                live = _NONE.union(*(each.live for each in point.next))
                live = (live - point.binds - point.unbinds).union(
                    point.reads, *(each.live for each in point.errors)
                )
                changed |= live != point.live
                point.live = live

    def find_bound(self) -> None:
        changed = True
        while changed:
            changed = False
            for point in reversed(self._points):
                if point.bound is None:
                    continue
                raised = point.bound - point.unbinds
                ways = [(each, raised | point.binds) for each in point.next]
                for each, names in [*ways, *((error, raised) for error in point.errors)]:
                    bound = names if each.bound is None else each.bound & names
                    changed |= bound != each.bound
                    each.bound = bound


def _surely_bound(node: ast.stmt) -> set[str]:
    """Return names that a simple statement binds in any case."""
    match node:
        case ast.Assign(targets=targets):
            return bound_names(targets)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            return bound_names(target)
    return binds_of(node)


# -- the end of a turn -------------------------------------------------------------------------


class Jump(NamedTuple):
    """A statement that leaves a turn of a loop."""

    node: ast.Break | ast.Continue | ast.Return
    inside: str  # "try" or "with", if it stands in one


def jumps_of(body: Iterable[ast.AST], inside: str = "", *, inner: bool = False) -> Iterator[Jump]:
    """Generate return, and break and continue of this loop; `inner`: not those."""
    for node in body:
        if isinstance(node, ast.Return):
            yield Jump(node, inside)
        elif isinstance(node, ast.Break | ast.Continue):
            if not inner:
                yield Jump(node, inside)
        elif isinstance(node, LOOPS):
            yield from jumps_of(node.body, inside, inner=True)
            yield from jumps_of(node.orelse, inside, inner=inner)
        elif not isinstance(node, SCOPES):
            way = inside or ("with" if isinstance(node, ast.With) else "")
            way = "try" if isinstance(node, ast.Try | ast.TryStar) else way
            yield from jumps_of(ast.iter_child_nodes(node), way, inner=inner)
