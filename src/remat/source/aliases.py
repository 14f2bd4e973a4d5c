"""Which names may stand for a part of another object: a row of an array, an entry of a list.

Changing what such a name stands for changes the other object, too, though nothing shows it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from .names import bound_names, walk_scope

__all__ = ["alias_names", "part_names", "related_names", "relations"]

# Functions and methods whose result looks at the memory of what they are called on.
_VIEWS = frozenset(
    {
        *("as_strided", "asarray", "atleast_1d", "atleast_2d", "broadcast_to", "chunk", "detach"),
        *("diagonal", "expand", "expand_as", "flatten", "from_numpy", "get", "moveaxis", "movedim"),
        *("narrow", "numpy", "permute", "ravel", "reshape", "select", "split", "squeeze"),
        *("swapaxes", "t", "transpose", "unbind", "unsqueeze", "values", "view", "view_as"),
    }
)


_KEEPS = _VIEWS | {"append", "extend", "insert", "setdefault", "pop", "items"}


def alias_names(
    body: Iterable[ast.AST], target: ast.expr | None, items: ast.expr | None
) -> set[str]:
    """Return the names that a loop binds to what may be part of another object."""
    found = set() if target is None or _is_range(items) else bound_names(target)
    for node in walk_scope(body):
        match node:
            case ast.Assign(targets=targets, value=value):
                for each in targets:
                    found |= set(_aliases(each, value))
            case ast.AnnAssign(target=each, value=value) if value is not None:
                found |= set(_aliases(each, value))
            case ast.NamedExpr(target=each, value=value):
                found |= set(_aliases(each, value))
            case ast.For(target=each, iter=iterable) if not _is_range(iterable):
                found |= bound_names(each)
            case ast.withitem(optional_vars=each) if each is not None:
                found |= bound_names(each)
            case ast.match_case(pattern=pattern):
                found |= bound_names(pattern)
    return found


def part_names(body: Iterable[ast.AST]) -> set[str]:
    """Return the names that some code binds to an entry, an attribute or a view of something."""
    found: set[str] = set()
    for node in walk_scope(body):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and value is not None:
            for each in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= set(_aliases(each, value, is_whole_name=False))
    return found


def _aliases(target: ast.expr, value: ast.expr, *, is_whole_name: bool = True) -> Iterator[str]:
    """Generate names that get what may be a part of something, or the whole of a name."""
    both = isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)
    if both and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
        pairs = zip(target.elts, value.elts, strict=True)  # type: ignore[attr-defined]
        for one, other in pairs:
            yield from _aliases(one, other, is_whole_name=is_whole_name)
    elif _may_alias(value) and (is_whole_name or not isinstance(value, ast.Name)):
        yield from bound_names(target)


def _may_alias(value: ast.expr) -> bool:
    match value:
        case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Starred():
            return True
        case ast.IfExp(body=body, orelse=orelse):
            return _may_alias(body) or _may_alias(orelse)
        case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            return any(map(_may_alias, parts))
        case ast.NamedExpr(value=inner):
            return _may_alias(inner)
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=arguments):
            return name in _VIEWS and any(map(_may_alias, [owner, *arguments[:1]]))
    return False


def relations(body: Iterable[ast.AST], *, calls: bool) -> list[set[str]]:
    """Return groups of names that may come to stand for the same object, or for parts of it.

    Any call may return what it gets, or put it into something else that it gets; without `calls`,
    only methods such as `append` do.
    """
    found: list[set[str]] = []
    for node in walk_scope(body):
        match node:
            case ast.Assign() | ast.AnnAssign() | ast.NamedExpr() | ast.withitem() | ast.Expr():
                found.append(set(_handed_on(node, calls=calls)))
            case ast.AugAssign(value=ast.List() | ast.Tuple() | ast.Name()):
                found.append(set(_handed_on(node, calls=calls)))
            case ast.For(target=target, iter=iterable):
                found.append(bound_names(target) | set(_handed_on(iterable, calls=True)))
            case ast.Call() if calls:
                found.append(set(_handed_on(node, calls=calls)))
    return [group for group in found if len(group) > 1]


def related_names(name: str, groups: Iterable[set[str]]) -> set[str]:
    """Return all names that are related to one, by any number of groups."""
    found, rest = {name}, list(groups)
    while near := [group for group in rest if group & found]:
        found = found.union(*near)
        rest = [group for group in rest if not group & found]
    return found


def _handed_on(node: ast.AST, *, calls: bool) -> Iterator[str]:
    """Generate the names in an expression whose objects may be in its value."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Subscript):
        yield from _handed_on(node.value, calls=calls)
    elif isinstance(node, ast.Call) and not calls and _called(node) not in _KEEPS:
        return
    elif not isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.JoinedStr | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _handed_on(child, calls=calls)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _is_range(iterable: ast.expr | None) -> bool:
    match iterable:
        case ast.Call(func=ast.Name(id="range")):
            return True
    return False
