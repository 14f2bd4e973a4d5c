"""Which objects a piece of code changes in place, and which names may stand for the same object.

Only what the code itself shows is found: stores into subscripts and attributes, augmented
assignments, methods and functions that are known to change what they are called on. What a called
function does inside stays hidden; but it may return any part of what it gets.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .names import bound_names, walk_scope

__all__ = [
    "Mutation",
    "alternatives",
    "assignments",
    "find_mutations",
    "is_range",
    "part_names",
    "related_names",
    "relations",
]

# As a statement of its own, a call of one of these is there for its effect.
_METHODS = frozenset(
    {
        *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "fill"),
        *("insert", "itemset", "partition", "pop", "popitem", "popleft", "put", "remove"),
        *("resize", "reverse", "rotate", "setdefault", "setflags", "sort", "update"),
        *("difference_update", "intersection_update", "symmetric_difference_update"),
    }
)
# These also give a value, so they are used inside of expressions.
_METHODS_WITH_VALUE = frozenset({"pop", "popitem", "popleft", "setdefault"})
# Functions that change their first argument.
_FUNCTIONS = frozenset(
    {
        *("copyto", "put", "place", "putmask", "fill_diagonal", "put_along_axis", "shuffle"),
        *("heappush", "heappop", "heapify", "heapreplace", "heappushpop", "insort"),
        *("insort_left", "insort_right", "setattr", "delattr"),
    }
)
# Functions and methods whose result shares the memory of what they are called on.
_VIEWS = frozenset(
    {
        *("as_strided", "asarray", "atleast_1d", "atleast_2d", "broadcast_to", "chunk", "detach"),
        *("diagonal", "expand", "expand_as", "flatten", "from_numpy", "get", "moveaxis", "movedim"),
        *("narrow", "numpy", "permute", "ravel", "reshape", "select", "split", "squeeze"),
        *("swapaxes", "t", "transpose", "unbind", "unsqueeze", "values", "view", "view_as"),
    }
)
# Methods that put what they get into their object, or give a part of it.
_HOLDERS = _VIEWS | {"append", "extend", "insert", "setdefault", "pop", "items"}


# -- changes in place --------------------------------------------------------------------------


class Mutation(NamedTuple):
    """One place where an object changes."""

    node: ast.AST
    name: str | None  # of the variable that holds the object; None: it is reached in another way
    how: str  # in words
    depth: int = 1  # 2: what changes is an entry of the object
    is_augmented: bool = False  # x += y, which changes arrays and rebinds numbers


def find_mutations(body: Iterable[ast.AST]) -> list[Mutation]:
    """Return every place where some code visibly changes an object."""
    found: list[Mutation | None] = []
    statements: set[int] = set()  # calls that are statements
    for node in walk_scope(body):
        if isinstance(node, ast.Expr):
            statements.add(id(node.value))
        match node:
            case ast.AugAssign(target=ast.Subscript() as target):  # an entry, perhaps in place
                found.append(_mutation(target, target, "changes an entry of {} in place"))
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                found.append(_mutation(node, node.value, "writes into {}"))
            case ast.Attribute(ctx=ast.Store() | ast.Del(), attr=attribute):
                found.append(Mutation(node, None, f"writes to the attribute .{attribute}"))
            case ast.AugAssign(target=ast.Name(id=name)):
                found.append(Mutation(node, name, f"changes {name} in place", is_augmented=True))
            case ast.Call():
                found += _changes_of_call(node, is_statement=id(node) in statements)
    return [each for each in found if each is not None]


def _changes_of_call(node: ast.Call, *, is_statement: bool) -> Iterator[Mutation | None]:
    for keyword in node.keywords:
        if keyword.arg == "out":
            value = keyword.value
            for part in value.elts if isinstance(value, ast.Tuple) else [value]:
                yield _mutation(node, part, "writes into {} (out=)")
    function, name = node.func, _called_name(node)
    in_place = name.endswith("_") and not name.endswith("__") and name != "_"
    if isinstance(function, ast.Attribute) and (
        in_place or name in _METHODS_WITH_VALUE or (is_statement and name in _METHODS)
    ):
        yield _mutation(node, function.value, f"calls .{name}() on {{}}")
    elif node.args:
        is_at = name == "at" and isinstance(function, ast.Attribute)  # np.add.at(x, …)
        if is_at or in_place or name in _FUNCTIONS:
            yield _mutation(node, node.args[0], f"changes {{}} with {name}()")


def _called_name(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _mutation(node: ast.AST, changed: ast.expr, how: str) -> Mutation | None:
    """Say what changes: a variable, an entry of one, or something that is reached otherwise."""
    depth = 1
    while isinstance(changed, ast.Subscript):
        changed, depth = changed.value, depth + 1
    if isinstance(changed, ast.Name):
        return Mutation(node, changed.id, how.format(changed.id), depth)
    if isinstance(changed, ast.Call | ast.Constant | ast.BinOp | ast.List | ast.Dict):
        return None  # what was just made has no other reference
    return Mutation(node, None, how.format(ast.unparse(changed)))


# -- parts of other objects --------------------------------------------------------------------


def assignments(body: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Generate what is assigned to, with the values; of tuples, their parts."""
    for node in walk_scope(body):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from _pairs(target, value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    match target, value:
        case (
            (ast.Tuple(elts=targets) | ast.List(elts=targets)),
            (ast.Tuple(elts=values) | ast.List(elts=values)),
        ) if len(targets) == len(values):
            for pair in zip(targets, values, strict=True):
                yield from _pairs(*pair)
        case _:
            yield target, value


def alternatives(value: ast.AST) -> Iterator[ast.AST]:
    """Generate the values that an expression may have, if it is a choice or a tuple."""
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*alternatives(body), *alternatives(orelse))
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.BoolOp(values=parts):
            for part in parts:
                yield from alternatives(part)
        case ast.NamedExpr(value=inner):
            yield from alternatives(inner)
        case _:
            yield value


def part_names(body: Iterable[ast.AST], *, or_whole: bool) -> set[str]:
    """Return the names that some code binds to an entry, an attribute or a view of something.

    With `or_whole`, also those that it binds to what another name stands for, and to items.
    """
    found: set[str] = set()
    for target, value in assignments(body):
        if _is_part(value) and (or_whole or not isinstance(value, ast.Name)):
            found |= bound_names(target)
    for node in walk_scope(body) if or_whole else ():
        match node:
            case ast.For(target=target, iter=iterable) if not is_range(iterable):
                found |= bound_names(target)
            case ast.withitem(optional_vars=ast.expr() as target):
                found |= bound_names(target)
            case ast.match_case(pattern=pattern):
                found |= bound_names(pattern)
    return found


def _is_part(value: ast.expr) -> bool:
    """Say whether an expression may give an object, or a part of one, that has another name."""
    for each in alternatives(value):
        match each:
            case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Starred():
                return True
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=arguments):
                if name in _VIEWS and any(map(_is_part, [owner, *arguments[:1]])):
                    return True
    return False


def is_range(iterable: ast.expr) -> bool:
    """Say whether something to iterate over is a range: its items are numbers."""
    function = iterable.func if isinstance(iterable, ast.Call) else None
    return isinstance(function, ast.Name) and function.id == "range"


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


def related_names(names: Iterable[str], groups: Iterable[set[str]]) -> set[str]:
    """Return all names that are related to some, by any number of groups."""
    found, rest = set(names), list(groups)
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
    elif isinstance(node, ast.Call) and not calls and not _is_method_of_holder(node):
        return
    elif not isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.JoinedStr | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _handed_on(child, calls=calls)


def _is_method_of_holder(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in _HOLDERS
