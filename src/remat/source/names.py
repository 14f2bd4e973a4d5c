"""Which names a piece of code reads, binds and changes in place.

One scope at a time: the body of a nested function does not bind names of the function around it,
but what it refers to there counts as read. Comprehensions are nested scopes, too, except that a
walrus inside of one binds a name of the function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = [
    "FUNCTIONS",
    "LOOPS",
    "binds_of",
    "bound_names",
    "free_names",
    "read_names",
    "walk_scope",
]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.While, ast.AsyncFor)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Node = ast.AST
Nodes = Node | Iterable[Node]


class _Inside(NamedTuple):
    """What stands inside of a nested scope."""

    body: list[Node]
    own: set[str]


def walk_scope(nodes: Nodes) -> Iterator[Node]:
    """Generate nodes of one scope: nested functions and classes appear, their bodies do not.

    Nor do the targets of comprehensions, which are names of their own.
    """
    for node in [nodes] if isinstance(nodes, Node) else nodes:
        yield node
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from walk_scope(_outside(node))
        elif isinstance(node, ast.comprehension):
            yield from walk_scope([node.iter, *node.ifs])
        else:
            yield from walk_scope(ast.iter_child_nodes(node))


def read_names(nodes: Nodes) -> set[str]:
    """Return the names that some code refers to, those in functions defined there included."""
    found: set[str] = set()
    for node in [nodes] if isinstance(nodes, Node) else nodes:
        found |= _reads(node)
    return found


def _reads(node: Node) -> set[str]:
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Store) else {node.id}
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return {node.target.id} | _reads(node.value)
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return free_names(node) | read_names(_outside(node))
    if isinstance(node, _COMPREHENSIONS):
        return read_names(ast.iter_child_nodes(node)) - _comprehension_targets(node)
    return read_names(ast.iter_child_nodes(node))


def free_names(function: Node) -> set[str]:
    """Return what a nested function, a class or a comprehension takes from around it."""
    if isinstance(function, _COMPREHENSIONS):
        return _reads(function)
    inside = _inside(function)
    return read_names(inside.body) - inside.own


def bound_names(nodes: Nodes) -> set[str]:
    """Return the names that some code binds in its own scope."""
    found: set[str] = set()
    for node in walk_scope(nodes):
        found |= binds_of(node)
    return found


def binds_of(node: Node) -> set[str]:
    """Return the names that a node binds by itself, not by what stands inside of it."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return {name}
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return {alias.asname or alias.name.partition(".")[0] for alias in aliases}
        case ast.ExceptHandler(name=str(name)):
            return {name}
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return {name}
        case ast.MatchMapping(rest=str(name)):
            return {name}
    return set()


def _comprehension_targets(node: Node) -> set[str]:
    generators: list[ast.comprehension] = getattr(node, "generators", [])
    return set().union(*(bound_names(each.target) for each in generators))


def _inside(function: Node) -> _Inside:
    if isinstance(function, ast.Lambda):
        return _Inside([function.body], _parameters(function.args))
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        shared = _declared(function.body, ast.Nonlocal) | _declared(function.body, ast.Global)
        own = _parameters(function.args) | (bound_names(function.body) - shared)
        return _Inside(list(function.body), own)
    assert isinstance(function, ast.ClassDef)
    return _Inside(list(function.body), set())  # (a class body may read what it also binds)


def _outside(function: Node) -> list[Node]:
    """Return the parts of a nested function that run where it is defined."""
    if isinstance(function, ast.ClassDef):
        return [*function.decorator_list, *function.bases, *function.keywords]
    arguments = function.args  # type: ignore[attr-defined]
    parts: list[Node | None] = [*arguments.defaults, *arguments.kw_defaults]
    if not isinstance(function, ast.Lambda):
        each = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        parts += [one.annotation for one in each if one is not None]
        parts += [*function.decorator_list, function.returns]  # type: ignore[attr-defined]
    return [part for part in parts if part is not None]


def _parameters(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return {one.arg for one in every}


def _declared(body: Iterable[Node], kind: type[ast.Global] | type[ast.Nonlocal]) -> set[str]:
    nodes = walk_scope(body)
    return set().union(*(set(node.names) for node in nodes if isinstance(node, kind)))
