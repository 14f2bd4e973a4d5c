"""Which names a piece of code reads and binds.

One scope at a time: the body of a nested function does not bind names of the function around it,
but what it refers to there counts as read. Comprehensions are nested scopes, too, except that a
walrus inside of one binds a name of the function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = [
    "LOOPS",
    "SCOPES",
    "Function",
    "Loop",
    "binds_of",
    "bound_names",
    "declared_names",
    "free_names",
    "parameter_names",
    "read_names",
    "walk_scope",
]

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
LOOPS = (ast.For, ast.While, ast.AsyncFor)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While | ast.AsyncFor
Nodes = ast.AST | Iterable[ast.AST]


def walk_scope(nodes: Nodes) -> Iterator[ast.AST]:
    """Generate nodes of one scope: nested functions and classes appear, their bodies do not.

    Nor do the targets of comprehensions, which are names of their own.
    """
    for node in _listed(nodes):
        yield node
        if isinstance(node, SCOPES):
            yield from walk_scope(_outside(node))
        elif isinstance(node, ast.comprehension):
            yield from walk_scope([node.iter, *node.ifs])
        else:
            yield from walk_scope(ast.iter_child_nodes(node))


def read_names(nodes: Nodes) -> set[str]:
    """Return the names that some code refers to, those in functions defined there included."""
    return set().union(*map(_reads, _listed(nodes)))


def _reads(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Store) else {node.id}
    if isinstance(node, SCOPES):
        return free_names(node) | read_names(_outside(node))
    found = read_names(ast.iter_child_nodes(node))
    if isinstance(node, ast.AugAssign):
        return found | bound_names(node.target)
    if isinstance(node, _COMPREHENSIONS):  # the first iterable is evaluated outside of it
        inside = found.difference(*(bound_names(each.target) for each in node.generators))
        return inside | read_names(node.generators[0].iter)
    return found


def free_names(function: ast.AST) -> set[str]:
    """Return what a nested function, a class or a generator takes from around it."""
    if not isinstance(function, SCOPES):
        return _reads(function)
    body = _body(function)
    if isinstance(function, ast.ClassDef):
        return read_names(body)  # (a class body may read what it also binds)
    own = bound_names(body) - declared_names(body, ast.Nonlocal, ast.Global)
    return read_names(body) - own - parameter_names(function)


def parameter_names(function: Any) -> set[str]:
    """Return the names of the parameters of a function."""
    arguments = ast.iter_child_nodes(function.args)
    return {each.arg for each in arguments if isinstance(each, ast.arg)}


def bound_names(nodes: Nodes) -> set[str]:
    """Return the names that some code binds in its own scope."""
    return set().union(*map(binds_of, walk_scope(nodes)))


def binds_of(node: ast.AST) -> set[str]:
    """Return the names that a node binds by itself, not by what stands inside of it."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return {name}
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return {alias.asname or alias.name.partition(".")[0] for alias in aliases}
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            return {name}
        case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return {name}
    return set()


def declared_names(nodes: Nodes, *kinds: type[ast.Global | ast.Nonlocal]) -> set[str]:
    """Return the names that some code declares global or nonlocal."""
    found = (node.names for node in walk_scope(nodes) if isinstance(node, kinds))
    return set().union(*found)


def _outside(function: ast.AST) -> Iterator[ast.AST]:
    """Generate the parts of a nested function that run where it is defined."""
    inside = set(map(id, _body(function)))
    for child in ast.iter_child_nodes(function):
        parts = ast.iter_child_nodes(child) if isinstance(child, ast.arguments) else [child]
        for part in parts:
            if isinstance(part, ast.arg):
                yield from ast.iter_child_nodes(part)
            elif id(part) not in inside:
                yield part


def _body(function: ast.AST) -> list[ast.AST]:
    body = function.body  # type: ignore[attr-defined]
    return body if isinstance(body, list) else [body]


def _listed(nodes: Nodes) -> Iterable[ast.AST]:
    return [nodes] if isinstance(nodes, ast.AST) else nodes
